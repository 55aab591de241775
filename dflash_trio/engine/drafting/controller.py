"""How many tokens to guess in a step: as many as pay, and none where guessing costs more.

Theory of operation. A step without guesses commits one token of each sequence. One with guesses
takes longer, by what the guessing takes and by the larger batch, and commits as many more tokens
as were guessed right. All of it is measured: seconds by the batch's tokens, seconds of guessing,
and chances of acceptance by place, for each sequence and for the model. The number with the most
expected tokens a second is taken; none at all where that is not more than without.

What is not tried is not known, and a try that fails costs time. So tries are paid for: an account
in seconds gets ``ALLOWANCE`` of all decoding time, and each step with guesses adds what it gained
against plain steps, or takes what it lost. A try needs its worst case on the account. Two tries
are free, before anything is known. Tries that fail become rarer, those that succeed are followed
up at once, and a new sequence is worth an early try. The first ones are of a single guess, which
tells the most for the least; but where guessing costs the same however many are asked for, and
verifying hardly more, one never pays and seven do: so as many as there are have their turn where
they might pay, if they took no longer than what was verified until then. One that seems to cost
more than the account holds is saved up for: what asking costs is known from asking only, and may
have been measured at a bad moment.

Plain steps behind one with guesses may take longer. Of guesses that go on for long each pays for a
share of that; the account, which is told of it whole, ends what begins again and again.

A draft that has not seen a prompt catches up first. That is no try, and says nothing of what a
guess costs; it is a debt, which is paid off by what guesses gain, or else by the allowance. One
that has reached its bound has to be paid before anybody asks again.

Pure: it is told what was measured, reads no clock, and decides the same again.
"""

from __future__ import annotations

from collections.abc import Sequence

from .acceptance import Acceptance, learn
from .costs import CostTable
from .step_costs import FIRST_REFERENCE, StepCosts

ALLOWANCE = 0.01
"""The share of decoding time that tries may cost."""
FREE_TRIES = 2
"""Steps with guesses before there is any evidence."""
GAIN_TO_BEGIN, GAIN_TO_GO_ON = 1.03, 1.01
"""Times the plain rate that is to be expected of guessing."""
MOST_SAVED, MOST_OWED = 32, 4
"""Plain steps that the account holds, and that it may be overdrawn by."""
MOST_AT_ONCE = 1024
"""Plain steps that are saved up for a single dear try, and that may be owed for catching up."""
FIRST_PAUSE, LONGEST_PAUSE = 4, 32
"""Steps between tries that fail."""
CHEAP = 0.01
"""A share of a plain step. Guessing that costs less is always worth a look at the guesses."""
ENOUGH_EVIDENCE = 1.5
"""Guesses judged, faded."""


class DraftController:
    """``longest``: tokens that can be guessed in one go, in a tree or one after the other.
    ``verify_limit``: tokens that a batch with guesses has at most. ``partitioned``: the cache
    computes sequences in one pass only as far as their parts of the batch are equally long, and
    ``builds_graphs`` anew for each pass of several. ``acceptance``: how guesses are judged."""

    def __init__(
        self,
        longest: int,
        *,
        verify_limit: int,
        partitioned: bool,
        builds_graphs: bool = False,
        acceptance: type[Acceptance] = Acceptance,
    ) -> None:
        self._longest = longest
        self._limit = verify_limit
        self._step_costs = StepCosts(partitioned=partitioned, builds_graphs=builds_graphs)
        # Of guessing, by the tokens asked for; by the octave of the number of sequences.
        self._draft_costs: dict[int, CostTable] = {}
        self._new_acceptance = acceptance
        self._acceptance = acceptance(longest, fading=0.98, weight=3.0)
        self._supply = 1.0
        """The share of sequences that a guess is known for when asked."""
        self._supplied: float | None = None
        """The same of the step under way, if anybody was asked."""
        self._account = 0.0
        self._dearest = 0.0
        """What the try costs that is saved up for; 0: none is."""
        self._debt = 0.0
        """Seconds of catching up that are not earned back."""
        self._exhausted = False
        """The debt has reached its bound, and is not paid off yet."""
        self._catching_up = False
        """The last question brought no guess, as the draft had a prompt to work off."""
        self._free = FREE_TRIES
        self._pause = FIRST_PAUSE
        self._wait = 0
        self._on = False
        self._trying = False
        self._nobody = self.new_acceptance()

    def new_acceptance(self) -> Acceptance:
        """For a sequence that begins."""
        self._wait = 0
        self._pause = FIRST_PAUSE
        return self._new_acceptance(self._longest, fading=0.9, weight=2.0)

    # --------------------------------------------------------------------------- decisions

    def choose(self, sequences: Sequence[Acceptance]) -> int:
        """How many tokens to guess for each of the sequences of a step; 0: none."""
        count = len(sequences)
        self._trying, self._supplied = False, None
        room = self._limit - count
        if self._exhausted or room < 1:
            return 0
        if self._step_costs.plain_is_due(count):
            return 0
        if self._asking_is_cheap(count):
            return min(self._longest, room)
        longest = min(self._longest, room // count)
        if longest < 1:
            return 0
        if self._wait and not self._on:
            self._wait -= 1
            return 0
        supplied = max(1, round(self._supply * count))
        return self._decide(sequences, [supplied] * longest, None)

    def keep(
        self, lengths: Sequence[int], matched: Sequence[int], sequences: Sequence[Acceptance]
    ) -> list[int]:
        """How many guesses to verify of each sequence's, which are known now."""
        longest = self.trim(lengths, sequences)
        return [min(length, longest) for length in lengths]

    def trim(self, lengths: Sequence[int], sequences: Sequence[Acceptance]) -> int:
        """How many guesses to keep of each sequence's, which are known now."""
        count, longest = len(sequences), max(lengths)
        self._supplied = sum(map(bool, lengths)) / count
        if not longest:
            return 0
        counts = [sum(length > place for length in lengths) for place in range(longest)]
        if not self._asking_is_cheap(count):
            # It was decided on before. Less may be worth it, now that it is known who has any.
            if self._trying or min(lengths) == longest:
                return longest
            best, gain = self._best(sequences, counts, lengths)
            return best if gain > 1.0 else 0
        if self._wait and not self._on:
            self._wait -= 1
            return 0
        return self._decide(sequences, counts, lengths)

    def _decide(
        self, sequences: Sequence[Acceptance], counts: Sequence[int], lengths: Sequence[int] | None
    ) -> int:
        """``counts``: sequences that have a first guess, a second, ... ``lengths``: the guesses of
        each, where they are known."""
        count = len(sequences)
        best, gain = self._best(sequences, counts, lengths)
        enough = GAIN_TO_GO_ON if self._on else GAIN_TO_BEGIN
        pays = gain > enough
        solvent = self._account > -MOST_OWED * self._step_costs.estimate(count)
        if pays and solvent and self._acceptance.evidence >= ENOUGH_EVIDENCE:
            self._on = True
            return best
        self._on = False
        # One guess each tells whether more are worth it, for the least; but not where the first
        # one costs more than those behind it.
        tried = len(counts) if not self._free and self._could_pay(counts, count) else 1
        while tried > 1 and count + sum(counts[:tried]) > self._limit:
            tried -= 1
        asking = self._draft_cost(count, tried) if lengths is None else 0.0
        costs = self._step_costs
        worst = asking + costs.of_step(count, counts[:tried]) - costs.estimate(count)
        worst = min(worst, MOST_AT_ONCE * self._step_costs.estimate(count))
        if not best or not (self._free or self._catching_up or self._account >= worst):
            self._dearest = worst if best else 0.0
            self._wait = FIRST_PAUSE
            return 0
        self._trying = True
        return tried

    def _best(
        self,
        sequences: Sequence[Acceptance],
        counts: Sequence[int],
        lengths: Sequence[int] | None,
    ) -> tuple[int, float]:
        """The best number of guesses, one or more (0: the batch has no room), and how many times as
        fast as none at all it is expected to be."""
        count = len(sequences)
        reached = [0.0] * len(counts)
        expected = self._acceptance.chances(len(counts))
        for place, sequence in enumerate(sequences):
            chances = sequence.reach(expected)
            longest = len(counts) if lengths is None else lengths[place]
            for at in range(longest):
                reached[at] += chances[at]
        supply = self._supply if lengths is None else 1.0
        plain = self._step_costs.estimate(count)
        most = min(self._limit, max(2 * self._step_costs.largest, count + 1))
        best, gain, committed, size = 0, 0.0, float(count), count
        for at, more in enumerate(reached):
            size += counts[at]
            if size > most and best:
                break
            if size > self._limit:
                break
            committed += supply * more
            seconds = self._step_costs.of_step(count, counts[: at + 1], in_a_row=FIRST_REFERENCE)
            if lengths is None:
                if counts[0] == count:
                    # Sometimes there is nothing to verify all the same.
                    seconds = supply * seconds + (1 - supply) * plain
                seconds += self._draft_cost(count, at + 1)
            faster = committed / count * plain / seconds if seconds else 0.0
            if faster > gain:
                best, gain = at + 1, faster
        return best, gain

    def _could_pay(self, counts: Sequence[int], count: int) -> bool:
        """All guesses, if they took no longer than the most that were ever verified, and a sequence
        of which nothing is known yet had them."""
        reached = self._nobody.reach(self._acceptance.chances(len(counts)))
        committed = count + sum(n * chance for n, chance in zip(counts, reached, strict=True))
        costs = self._step_costs
        seconds = costs.of_step(count, counts, boldly=True, in_a_row=FIRST_REFERENCE)
        seconds += self._draft_cost(count, len(counts))
        return committed / count * costs.estimate(count) > seconds

    def _draft_cost(self, count: int, tokens: int) -> float:
        """Seconds that asking for so many takes."""
        table = self._draft_table(count)
        return 0.0 if table is None else table.estimate(tokens)

    def _draft_table(self, count: int) -> CostTable | None:
        """What asking for so many sequences takes, or for fewer: better too little than never to
        try. ``None``: nobody was asked yet."""
        known = [octave for octave in self._draft_costs if octave <= count.bit_length()]
        return self._draft_costs[max(known)] if known else None

    def _asking_is_cheap(self, count: int) -> bool:
        if self._draft_table(count) is None:
            return False
        cost = self._draft_cost(count, self._longest)
        return cost < CHEAP * self._step_costs.estimate(count)

    # -------------------------------------------------------------------------- experience

    def watched(self, sequence: Acceptance, matched: int, judged: int, right: int) -> None:
        """Nothing: guesses that cost something are asked for to be verified, and judged then."""

    def observe(
        self,
        lengths: Sequence[int],
        judged: Sequence[tuple[Acceptance, int, Sequence[int]]],
        *,
        committed: int,
        asked: int,
        draft_seconds: float,
        step_seconds: float,
        caught_up_seconds: float = 0.0,
    ) -> None:
        """What became of a step without prompts. ``lengths``: tokens of each sequence in the batch;
        ``judged``: of each with guesses, how many had their turn and which were right;
        ``asked``: guesses asked for; ``draft_seconds``: until they were there;
        ``caught_up_seconds``: those of them that the draft spent on tokens it had not seen."""
        count = len(lengths)
        only_caught_up = caught_up_seconds > 0 and not judged
        if only_caught_up:
            caught_up_seconds = draft_seconds
        draft_seconds -= caught_up_seconds
        if asked:
            self._catching_up = only_caught_up
        if asked and not only_caught_up:
            self._learn_asking(count, asked, draft_seconds)
        plain = self._step_costs.estimate(count)
        self._earn(ALLOWANCE * step_seconds)
        if caught_up_seconds:
            most = MOST_AT_ONCE * plain
            self._debt = min(self._debt + caught_up_seconds, most)
            self._exhausted = self._exhausted or self._debt >= most
        learn(self._acceptance, judged)
        switching = self._step_costs.switching(count)
        self._step_costs.observe_step(lengths, step_seconds, judged=bool(judged))
        spent = draft_seconds
        if judged:
            spent += step_seconds + switching
            gained = committed / count * plain - spent
        else:
            gained = -spent
        trying = self._trying and asked and not only_caught_up
        if trying:
            self._dearest = 0.0
            self._judge_try(won=gained > 0)
        if trying and self._free:
            self._free -= 1
            gained = max(0.0, gained)
        self._earn(gained)
        self._trying = False
        self._bound_account(plain)

    def took(self, seconds: float) -> None:
        """Nothing: what lies between steps is the same with guesses and without, about."""

    def missed(self, sequences: int, seconds: float) -> None:
        """See ``drafter.Controller``. It saves up for tries all the same."""
        self._earn(ALLOWANCE * seconds)
        self._bound_account(self._step_costs.estimate(sequences))

    def _bound_account(self, plain: float) -> None:
        most = max(MOST_SAVED * plain, self._dearest)
        self._account = min(max(self._account, -MOST_OWED * plain), most)

    def _earn(self, seconds: float) -> None:
        """Put them on the account. What it has beyond nothing goes into the debt first."""
        self._account += seconds
        paid = min(max(self._account, 0.0), self._debt)
        self._account -= paid
        self._debt -= paid
        if not self._debt:
            self._exhausted = False

    def _judge_try(self, *, won: bool) -> None:
        if won:
            self._pause, self._wait = FIRST_PAUSE, 0
        else:
            self._wait = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _learn_asking(self, count: int, asked: int, seconds: float) -> None:
        if self._supplied is not None:
            self._supply += 0.1 * (self._supplied - self._supply)
        known = self._draft_table(count)
        if self._supplied == 0 and (known is None or seconds <= known.estimate(asked)):
            return  # nobody had a guess: that takes no time, and says nothing of what guesses take
        saved_up = self._trying and self._dearest > MOST_SAVED * self._step_costs.estimate(count)
        if saved_up and 2 * seconds < self._draft_cost(count, asked):
            # What was measured long ago was at a bad moment, and would count for long.
            self._draft_costs.clear()
        table = self._draft_costs.setdefault(count.bit_length(), CostTable())
        table.observe(asked, seconds)
