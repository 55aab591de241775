"""What is asked: how many streams, of which prompts, and how long the answers are."""

from __future__ import annotations

import random

from attrs import frozen

_COMMON = """
    time year people way day man thing woman life child world school state family student group
    country problem hand part place case week company system program question work government
    number night point home water room mother area money story fact month lot right study book eye
    job word business issue side kind head house service friend father power hour game line end
    member law car city community name president team minute idea body information back parent face
    others level office door health person art war history party result change morning reason
    research girl guy moment air teacher force education foot boy age policy music market sense
    good new first last long great little own other old big high different small large next early
    young important few public bad same able best better clear cold dark deep easy fast final free
    full green happy hard heavy hot human late light local low main major natural open past poor
    quick ready real red rich round safe short simple slow soft special strong sure sweet tall warm
    white wide wild wrong ask be begin call come feel find follow get give go grow hear help hold
    keep know lead learn leave let like live look lose make mean meet move need offer pay play put
    read remember run say see seem send serve set show sit speak stand start stay stop take talk
    tell think try turn use wait walk want watch win write above across after again against along
    among around before behind below beside between beyond down during inside near outside over
    through toward under until without always maybe never often once quite rather soon still
    together
"""
WORDS = tuple(_COMMON.split())


@frozen
class Workload:
    """One row of a table, whoever serves it."""

    streams: int
    """Requests at a time."""
    words: int
    """Of each prompt, its own."""
    shared_words: int
    """In front of those, the same for everybody."""
    tokens: int
    """Of each answer."""
    requests: int = 1
    """Each stream sends so many in a round, one after the other."""
    temperature: float = 0.0
    ignore_eos: bool = True
    prompts: tuple[str, ...] = ()
    """To be asked in turn, instead of words."""

    @property
    def tokens_in_all(self) -> int:
        """Of one round, if no answer ends early."""
        return self.streams * self.requests * self.tokens


def some_words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def _given(workload: Workload, round_name: str) -> list[list[str]]:
    each = workload.streams * workload.requests
    begin = each * int(round_name.rpartition(" ")[2])
    some = [workload.prompts[(begin + at) % len(workload.prompts)] for at in range(each)]
    return [some[at :: workload.streams] for at in range(workload.streams)]


def prompts_of(workload: Workload, seed: int, round_name: str) -> list[list[str]]:
    """For each stream, the prompts of one round in their order.

    The same for the same arguments, so that all contestants are asked the same; and other ones in
    each round, so that nobody can answer from what is left of an earlier one. Only the shared
    head is the same in all rounds of a workload. Given prompts are asked in their order, round
    after round, and begin again at the end.
    """
    if workload.prompts:
        return _given(workload, round_name)
    name = f"{seed} {workload!r}"
    head = some_words(random.Random(f"{name} head"), workload.shared_words)
    chance = random.Random(f"{name} {round_name}")
    return [
        [f"{head} {some_words(chance, workload.words)}".strip() for _ in range(workload.requests)]
        for _ in range(workload.streams)
    ]
