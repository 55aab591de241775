"""Several answers of one prefill, thinking that is closed in time, likelihoods with their text."""

from __future__ import annotations

import re
from functools import partial

import attrs
import pytest

from dflash_trio.engine.admission import KVLedger
from dflash_trio.engine.scheduler import Scheduler
from dflash_trio.engine.scripted_runner import EOG, Script, ScriptedRunner, ScriptedVocabulary
from dflash_trio.engine.sequence import Sequence
from dflash_trio.generation.constraint import ConstraintError, TokenConstraint
from dflash_trio.generation.events import (
    SERVER_SHUTDOWN,
    Event,
    Failed,
    Finished,
    Retired,
    TextDelta,
    TokenLogprob,
)
from dflash_trio.generation.request import PreparedPrompt, SamplingParams, ThinkingPlan
from dflash_trio.text.reasoning import THINK, ThinkSplitter
from dflash_trio.text.structured import compile_grammar
from tests.engine.engine_helpers import GREEDY, prompt


class Engine:
    """A scheduler with room for a few sequences, and everything that it told."""

    def __init__(self, *, slots: int = 4, max_ctx: int = 300, script: Script | None = None) -> None:
        self.ledger = KVLedger(
            slots=slots, pool=slots * max_ctx, max_ctx=max_ctx, decode_headroom=16
        )
        self.runner = ScriptedRunner(slots=slots, cells=slots * max_ctx, script=script)
        self.scheduler = Scheduler(self.runner, self.ledger, chunk=32)
        self.told: list[Event] = []

    def add(self, prepared: PreparedPrompt) -> None:
        hold = self.ledger.try_reserve(prepared.prompt_tokens, prepared.max_tokens, prepared.n)
        assert hold is not None
        self.hold = hold
        self.scheduler.add(Sequence(1, prepared, hold))

    def step(self) -> None:
        self.scheduler.step()
        self.told += [event for _, event in self.scheduler.take_events()]

    def run(self, prepared: PreparedPrompt) -> list[Event]:
        self.add(prepared)
        for _ in range(1000):
            if self.scheduler.idle:
                break
            self.step()
        return self.end()

    def end(self) -> list[Event]:
        """Everything told, after checking that nothing is left of it."""
        self.told += [event for _, event in self.scheduler.take_events()]
        self.scheduler.check_idle()
        self.ledger.release(self.hold)
        assert self.told.count(Retired()) == 1
        assert self.told[-1] == Retired()
        assert (self.runner.cells_used, self.runner.open_samplers) == (0, 0)
        assert self.scheduler.statistics().cells_used == 0
        return self.told


def answer(text: str, after: bytes = b"why>") -> Script:
    """A script that says ``text`` after the prompt ``why>`` and then ends its turn."""

    def script(history: bytes, _: int) -> int | None:
        said, wanted = history.partition(after)[2], text.encode()
        return wanted[len(said)] if len(said) < len(wanted) else EOG

    return script


def text_of(events: list[Event], index: int = 0, channel: str = "content") -> str:
    return "".join(
        e.text
        for e in events
        if isinstance(e, TextDelta) and (e.index, e.channel) == (index, channel)
    )


def finished(events: list[Event]) -> dict[int, Finished]:
    found = {e.index: e for e in events if isinstance(e, Finished)}
    assert len(found) == sum(isinstance(e, Finished) for e in events)
    return found


DRAWN = SamplingParams(temperature=1.0, seed=7)


def several(n: int, max_tokens: int = 20, sampling: SamplingParams = DRAWN) -> PreparedPrompt:
    one = prompt("a question of forty-one bytes, all counted", max_tokens, sampling=sampling)
    return attrs.evolve(one, n=n, ignore_eos=True)


# ----------------------------------------------------------------------------- several answers


def test_several_answers_share_one_prefill() -> None:
    engine = Engine()
    prepared = several(3)
    events = engine.run(prepared)
    # Every answer decodes its tokens but the last; the prompt was decoded once for all of them.
    assert engine.runner.decoded_tokens == prepared.prompt_tokens + 3 * (20 - 1)
    assert {i: e.usage.completion_tokens for i, e in finished(events).items()} == {
        0: 20,
        1: 20,
        2: 20,
    }
    assert all(e.usage.prompt_tokens == prepared.prompt_tokens for e in finished(events).values())


def test_each_of_several_seeded_answers_is_its_own_and_repeats() -> None:
    first, again = Engine().run(several(3)), Engine().run(several(3))
    texts = [text_of(first, index) for index in range(3)]
    assert texts == [text_of(again, index) for index in range(3)]
    assert len(set(texts)) == 3
    # The first is what a request for one would have got, each other what its seed gives.
    for index in range(3):
        alone = Engine().run(several(1, sampling=attrs.evolve(DRAWN, seed=7 + index)))
        assert text_of(alone) == texts[index]


def test_greedy_answers_are_all_the_same() -> None:
    events = Engine().run(several(2, sampling=GREEDY))
    assert text_of(events, 0) == text_of(events, 1) != ""


def test_an_answer_that_ends_early_leaves_the_others_running() -> None:
    stop = text_of(Engine().run(several(3)), 1)[2:4]
    events = Engine().run(attrs.evolve(several(3), stop=(stop,)))
    ends = finished(events)
    assert ends[1].stop_sequence == stop
    assert ends[1].usage.completion_tokens < 20
    assert any(e.usage.completion_tokens == 20 for e in ends.values())


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancellation_takes_all_answers_along(steps: int) -> None:
    engine = Engine()
    engine.add(several(3))
    for _ in range(steps):
        engine.step()
    engine.scheduler.cancel(1)
    assert {e.reason for e in finished(engine.end()).values()} == {"cancelled"}


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_shutdown_finalizes_all_answers(steps: int) -> None:
    engine = Engine()
    engine.add(several(3))
    for _ in range(steps):
        engine.step()
    engine.scheduler.finalize_all()
    ends = finished(engine.end())
    assert len(ends) == 3
    assert {e.detail for e in ends.values()} == {SERVER_SHUTDOWN}


def test_a_lost_engine_fails_several_answers_once() -> None:
    engine = Engine()
    engine.add(several(3))
    engine.step()
    engine.scheduler.fail_all("gone")
    events = [event for _, event in engine.scheduler.take_events()]
    assert events[-2:] == [Failed("gone"), Retired()]
    assert events.count(Failed("gone")) == 1


def test_several_answers_may_grow_past_what_was_promised_them() -> None:
    engine = Engine()
    events = engine.run(several(4, max_tokens=120))
    assert {e.usage.completion_tokens for e in finished(events).values()} == {120}
    assert engine.hold.cells >= len(several(4).tokens) + 4 * 119


# ----------------------------------------------------------------------------------- thinking

OPEN = ThinkingPlan(
    new_splitter=partial(ThinkSplitter, THINK, starts_open=True),
    limit=1000,
    limited_by="budget",
    close_tokens=tuple(b"\n</think>\n\n"),
)


def thinker(said: str, *, max_tokens: int = 200, **plan: object) -> list[Event]:
    prepared = attrs.evolve(prompt("why>", max_tokens), thinking=attrs.evolve(OPEN, **plan))
    return Engine(script=answer(said)).run(prepared)


def test_what_a_model_thinks_is_told_from_what_it_says() -> None:
    events = thinker("hm, so\n</think>\n\nBecause. </think>")
    assert text_of(events, channel="reasoning") == "hm, so"
    assert text_of(events) == "Because. </think>"
    usage = finished(events)[0].usage
    assert usage.thinking_closed_by == "model"
    assert usage.reasoning_tokens == len("hm, so\n</think>")
    assert usage.completion_tokens == len("hm, so\n</think>\n\nBecause. </think>") + 1


def test_a_model_that_begins_to_think_by_itself_is_understood_too() -> None:
    closed = partial(ThinkSplitter, THINK, starts_open=False)
    events = thinker("<think>hm</think>yes", new_splitter=closed)
    assert (text_of(events, channel="reasoning"), text_of(events)) == ("hm", "yes")
    events = thinker("no <think> at all", new_splitter=closed)
    assert (text_of(events, channel="reasoning"), text_of(events)) == ("", "no <think> at all")
    assert finished(events)[0].usage.reasoning_tokens == 0


@pytest.mark.parametrize("limit", [0, 1, 7])
@pytest.mark.parametrize("why", ["budget", "reply_budget"])
def test_thinking_ends_at_its_limit_and_the_answer_follows(limit: int, why: str) -> None:
    def says(history: bytes, length: int) -> int | None:
        if b"</think>\n\n" not in history:
            return ord("t")
        return answer("done", b"</think>\n\n")(history, length)

    prepared = attrs.evolve(
        prompt("why>", 100), thinking=attrs.evolve(OPEN, limit=limit, limited_by=why)
    )
    events = Engine(script=says).run(prepared)
    assert text_of(events, channel="reasoning") == "t" * limit
    assert text_of(events) == "done"
    usage = finished(events)[0].usage
    assert usage.thinking_closed_by == why
    assert usage.reasoning_tokens == limit + len("\n</think>")


def test_stop_strings_are_looked_for_in_the_answer_only() -> None:
    prepared = attrs.evolve(prompt("why>", 99, stop=("STOP",)), thinking=OPEN)
    events = Engine(script=answer("a STOP b</think>c STOP d")).run(prepared)
    assert text_of(events, channel="reasoning") == "a STOP b"
    assert text_of(events) == "c "
    assert finished(events)[0].stop_sequence == "STOP"


def grammar(source: str) -> TokenConstraint:
    return compile_grammar(ScriptedVocabulary().guide_tokenizer(), source)


@pytest.mark.parametrize("thought", ["hm</think>", "hm", ""])
def test_an_answer_under_a_grammar_comes_however_the_thinking_ends(thought: str) -> None:
    """Also when the model would end its turn in the middle of a thought."""
    prepared = attrs.evolve(
        prompt("why>", 200), thinking=OPEN, constraint=grammar('start: "{" /[0-9]{3}/ "}"')
    )
    events = Engine(script=answer(thought)).run(prepared)
    assert text_of(events, channel="reasoning") == thought.removesuffix("</think>")
    assert re.fullmatch(r"\{[0-9]{3}\}", text_of(events))
    assert finished(events)[0].reason == "stop"
    assert finished(events)[0].usage.thinking_closed_by == "model"


def test_an_answer_under_a_grammar_ends_with_the_grammar_and_without_another_token() -> None:
    prepared = attrs.evolve(
        prompt("why>", 200, ignore_eos=True), constraint=grammar('start: "yes" | "no"')
    )
    events = Engine(script=answer("nope")).run(prepared)
    assert text_of(events) == "no"
    assert finished(events)[0].usage.completion_tokens == 2


def test_several_answers_under_a_grammar_each_follow_it() -> None:
    prepared = attrs.evolve(several(3, 50), constraint=grammar("start: /[a-c]{5}/"))
    events = Engine().run(prepared)
    texts = [text_of(events, index) for index in range(3)]
    assert all(re.fullmatch("[a-c]{5}", text) for text in texts)
    assert len(set(texts)) > 1


def test_a_grammar_that_cannot_be_followed_fails_its_generation_alone() -> None:
    class Lost:
        finished = False

        def mask(self) -> bytes:
            raise ConstraintError("too large")

        def accept(self, token: int) -> None:
            raise AssertionError

        def new_matcher(self) -> Lost:
            return self

    engine = Engine()
    events = engine.run(attrs.evolve(several(2), constraint=Lost()))
    failure = Failed("the answer's grammar: too large", is_the_requests=True)
    assert events == [failure, Retired()]


@pytest.mark.parametrize(("stop", "named"), [((), None), (("<end>",), "<end>")])
def test_the_string_that_ends_the_models_turns_is_named_only_if_the_request_asked_for_it(
    stop: tuple[str, ...], named: str | None
) -> None:
    prepared = attrs.evolve(prompt("why>", 99, stop=stop), turn_ends=("<end>",))
    events = Engine(script=answer("so<end>more")).run(prepared)
    assert text_of(events) == "so"
    assert (finished(events)[0].reason, finished(events)[0].stop_sequence) == ("stop", named)


# ----------------------------------------------------------------------------- likelihoods


def likely(said: str, top: int = 2, **changes: object) -> list[Event]:
    prepared = attrs.evolve(prompt("why>", 99), logprobs=top, **changes)
    return Engine(script=answer(said)).run(prepared)


def logprobs(events: list[Event]) -> list[TokenLogprob]:
    return [entry for e in events if isinstance(e, TextDelta) for entry in e.logprobs]


def test_every_token_of_the_text_has_its_likelihood_and_the_end_has_none() -> None:
    events = likely("grüße")
    entries = logprobs(events)
    assert b"".join(entry.chosen.piece for entry in entries).decode() == "grüße"
    assert all(len(entry.top) == 2 for entry in entries)
    assert all(entry.top[0] == entry.chosen for entry in entries)


def test_likelihoods_come_with_their_text_and_not_before_it() -> None:
    text, seen = "", b""
    for event in likely("abSTOpxy", stop=("STOP",)):
        if isinstance(event, TextDelta):
            text += event.text
            seen += b"".join(entry.chosen.piece for entry in event.logprobs)
            assert text.encode().startswith(seen)
    assert seen == b"abSTOpxy"


def test_what_a_stop_string_takes_away_has_no_likelihood() -> None:
    events = likely("abSTOPcd", stop=("STOP",))
    assert text_of(events) == "ab"
    assert b"".join(entry.chosen.piece for entry in logprobs(events)) == b"ab"


def test_thoughts_have_no_likelihoods() -> None:
    events = likely("hm</think>yes", thinking=OPEN)
    assert b"".join(entry.chosen.piece for entry in logprobs(events)) == b"yes"


def test_likelihoods_are_of_every_token_also_on_a_model_that_might_think() -> None:
    closed = attrs.evolve(OPEN, new_splitter=partial(ThinkSplitter, THINK, starts_open=False))
    events = likely(" aé😀b<t", thinking=closed)
    said = b"".join(entry.chosen.piece for entry in logprobs(events))
    assert said.decode() == text_of(events) == " aé😀b<t"


def test_answers_that_wait_for_a_prompt_that_has_no_cells_end_with_it() -> None:
    engine = Engine(slots=2, max_ctx=60)
    engine.runner._cells = 20
    events = engine.run(several(2))
    assert {e.detail for e in finished(events).values()} == {"no_free_cells"}
    assert len(finished(events)) == 2


def test_without_being_asked_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(ScriptedRunner, "logprobs", refuse)
    assert logprobs(Engine(script=answer("abc")).run(prompt("why>", 9))) == []
