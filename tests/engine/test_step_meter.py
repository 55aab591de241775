"""What a step's parts and the gaps between tokens are, on a clock of the test's own."""

from __future__ import annotations

from dflash_trio.engine.step_meter import StepMeter
from dflash_trio.generation.events import Retired, TextDelta
from dflash_trio.generation.histogram import Histogram


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def text(generation_id: int, index: int = 0) -> tuple[int, TextDelta]:
    return generation_id, TextDelta("x", 1, index=index)


def test_a_bucket_holds_its_upper_bound_and_the_last_one_the_rest() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.snapshot().counts == (2, 2, 1)
    assert (histogram.snapshot().count, histogram.snapshot().total) == (5, 14.0)


def test_the_parts_of_a_step_add_up_to_it_and_no_step_is_no_observation() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    meter.step_ended()
    assert meter.timings().sample.count == 0
    meter.drafted(8)
    meter.decode_begins()
    clock.now += 4
    meter.decode_ended()
    clock.now += 2
    meter.step_ended()
    meter.delivery_begins()
    clock.now += 1
    meter.delivered([])
    timings = meter.timings()
    parts = (timings.draft, timings.decode, timings.sample, timings.deliver)
    assert [part.total for part in parts] == [8, 4, 2, 1]
    assert [part.count for part in parts] == [1, 1, 1, 1]


def test_gaps_are_each_answers_own_and_pieces_of_one_delivery_are_one() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    meter.delivered([text(1), text(1), text(2), text(2, 1)])
    assert meter.timings().inter_token.count == 0
    clock.now += 3
    meter.delivered([text(1), text(1), text(2, 1)])
    clock.now += 1
    meter.delivered([text(2)])
    assert (meter.timings().inter_token.count, meter.timings().inter_token.total) == (3, 3 + 3 + 4)


def test_nothing_is_kept_of_a_generation_that_is_retired() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    meter.delivered([text(1), (1, Retired())])
    clock.now += 1
    meter.delivered([text(1)])
    assert meter.timings().inter_token.count == 0
