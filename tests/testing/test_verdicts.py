"""The rules, on hand-made observations: one signal at time 100, slack 3, golden "one two three"."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trio.testing import CheckOptions, Observation, Scenario, Verdict
from dflash_trio.testing.client import End, Seen
from dflash_trio.testing.dialects import DIALECTS, Answer
from dflash_trio.testing.reference import Golden, Kind, Reference, prompt_and_tokens
from dflash_trio.testing.verdicts import judge
from dflash_trio.testing.witnesses import Account, Role
from tests.testing.bad_servers import encode

TEXT = "one two three"
GOLDEN = Golden(Answer(TEXT, "length", terminal=True), 1000, 0.5, 0.5, 5.0)
REFERENCE = Reference(goldens={("chat", kind): GOLDEN for kind in Kind})
RIGHT = Verdict("right")


def options(**changes: Any) -> CheckOptions:
    return CheckOptions(("{port}",), **changes)


def stream(text: str, finish: str | None = "length") -> bytes:
    body = b"".join(encode("chat", "delta", f"{word} ") for word in text.split())
    body = encode("chat", "delta", text) if text else body
    return body + (encode("chat", "end", "", finish) if finish else b"")


def client(
    role: Role, end: End = End.COMPLETE, status: int | None = 200, *, at: float = 103.0, **seen: Any
) -> Account:
    began = seen.pop("began_at", 99.0)
    kind = Kind.LONG_PROMPT if role is Role.PREFILL else Kind.ANSWER
    return Account(role, Seen(end, status, ended_at=at, **seen), kind, True, began_at=began)


def verdict(
    *clients: Account,
    signals: int = 1,
    exit_code: int | None = 0,
    exited_at: float | None = 104.0,
    leftovers: tuple[str, ...] = (),
    **changes: Any,
) -> Verdict:
    observation = Observation(
        Scenario("streaming", "term", "chat"),
        reached="so",
        clients=clients,
        signals_at=tuple(100.0 + i / 10 for i in range(signals)),
        exit_code=exit_code,
        exited_at=exited_at,
        leftovers=leftovers,
    )
    return judge(observation, options(**changes), REFERENCE)


def fault(*clients: Account, **fields: Any) -> str:
    """The single fault that is found."""
    found = verdict(*clients, **fields)
    assert found.kind == "wrong", found
    assert len(found.reasons) == 1, found
    return found.reasons[0]


WHOLE = client(Role.ACTIVE, body=stream(TEXT))


def test_a_whole_answer_equal_to_the_golden_one_is_right_where_the_policy_is_to_drain() -> None:
    assert verdict(WHOLE) == RIGHT


@pytest.mark.parametrize(
    ("body", "end", "words"),
    [
        (stream("one two", None), End.CUT, "active answer: cut after 7 of 13 characters"),
        (b"", End.CLOSED, "active answer: closed after 0 of 13 characters"),
        (stream("one"), End.COMPLETE, "active answer: 3 characters instead of 13 characters"),
        (stream(TEXT, "stop"), End.COMPLETE, "active answer: ended with stop instead of length"),
        (stream(TEXT, None), End.COMPLETE, "active answer: ended without its terminal event"),
        (stream("one too three"), End.COMPLETE, "active answer: its text differs from the golden"),
    ],
)
def test_anything_less_is_wrong_and_says_what(body: bytes, end: End, words: str) -> None:
    assert fault(client(Role.ACTIVE, end, body=body)).startswith(words)


def test_a_prefix_may_go_on_differently_and_a_length_is_only_counted() -> None:
    long = "x" * 40
    golden = Golden(Answer(long + "abc", "length", terminal=True), 1000, 0.5, 0.5, 5.0)
    reference = Reference(goldens={("chat", Kind.ANSWER): golden})

    def judged(text: str, equal: Any) -> str:
        observation = Observation(
            Scenario("streaming", "term", "chat"),
            clients=(client(Role.ACTIVE, body=stream(text)),),
            signals_at=(100.0,),
            exit_code=0,
            exited_at=104.0,
        )
        return judge(observation, options(equal=equal), reference).kind

    assert [judged(long + "abd", equal) for equal in ("exact", "prefix", "length")] == [
        "wrong",
        "right",
        "right",
    ]
    assert [judged("y" * 43, equal) for equal in ("exact", "prefix", "length")] == [
        "wrong",
        "wrong",
        "right",
    ]
    assert judged("y" * 20, "length") == "wrong"


FINALIZE = {"policy": "finalize", "exited_at": 101.0}


def test_finalizing_ends_with_a_beginning_and_the_right_word() -> None:
    assert verdict(client(Role.ACTIVE, body=stream("one two"), at=100.5), **FINALIZE) == RIGHT
    late = client(Role.ACTIVE, body=stream("one two"), at=104.0)
    assert fault(late, policy="finalize") == "active answer: was kept waiting for 4.0 s"
    word = client(Role.ACTIVE, body=stream("one", "stop"), at=100.5)
    assert fault(word, **FINALIZE) == "active answer: ended with stop instead of length"


def test_finalizing_a_whole_answer_is_wrong_or_came_too_late_to_tell() -> None:
    assert "went on to its end" in fault(WHOLE, policy="finalize")
    raced = client(Role.ACTIVE, body=stream(TEXT), at=100.3)
    assert verdict(raced, **FINALIZE).kind == "not reached"


def test_a_finalized_prefill_gets_503() -> None:
    assert verdict(client(Role.PREFILL, status=503, at=100.5), **FINALIZE) == RIGHT
    answered = client(Role.PREFILL, body=stream(TEXT), at=100.5)
    assert "instead of a 503" in fault(answered, **FINALIZE)
    missed = client(Role.PREFILL, body=stream("one"), at=100.5)
    assert verdict(missed, **FINALIZE).kind == "not reached"
    headers_sent = client(Role.PREFILL, body=stream(""), at=100.5, first_byte_at=99.5)
    assert verdict(headers_sent, **FINALIZE) == RIGHT


@pytest.mark.parametrize("role", [Role.WAITER, Role.NEW_REQUEST, Role.HALF_SENT])
def test_who_is_turned_away_gets_503_at_once(role: Role) -> None:
    assert verdict(WHOLE, client(role, status=503, at=101.0)) == RIGHT
    assert "was kept waiting for 3.5 s" in fault(WHOLE, client(role, status=503, at=103.5))
    assert "was never answered" in fault(WHOLE, client(role, End.OPEN, None))
    assert "got 200" in fault(WHOLE, client(role, body=stream(TEXT)))
    closed = verdict(WHOLE, client(role, End.CLOSED, None, at=100.1))
    assert closed.kind == ("wrong" if role is Role.WAITER else "right")


def test_a_new_request_is_timed_from_when_it_was_sent() -> None:
    late = client(Role.NEW_REQUEST, status=503, at=104.0, began_at=103.0)
    assert verdict(WHOLE, late, exited_at=104.1) == RIGHT


def test_idle_connections_close_and_new_ones_are_refused() -> None:
    assert verdict(client(Role.IDLE, End.CLOSED, None, at=100.1), exited_at=100.2) == RIGHT
    assert "was not closed" in fault(client(Role.IDLE, End.OPEN, None), exited_at=100.2)
    assert verdict(WHOLE, client(Role.NEW_CONNECTION, End.REFUSED, None)) == RIGHT
    assert "still accepted" in fault(WHOLE, client(Role.NEW_CONNECTION, End.OPEN, None))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"exit_code": 3}, "exit code 3 instead of exit code 0"),
        ({"exit_code": -15}, "death by SIGTERM instead of exit code 0"),
        ({"exit_code": None, "exited_at": None}, "the server did not end within 120 s"),
        ({"exited_at": 110.0}, "the server ended 7.0 s after it should have"),
        ({"leftovers": ("process 7 (sleep)",)}, "left over: process 7 (sleep)"),
    ],
)
def test_the_process(fields: dict[str, Any], words: str) -> None:
    assert fault(WHOLE, **fields) == words


def test_a_second_signal_may_cut_but_not_lie_or_linger() -> None:
    cut = client(Role.ACTIVE, End.CUT, body=stream("one two", None), at=101.0)
    assert verdict(cut, signals=2, exited_at=102.0) == RIGHT
    ended = client(Role.ACTIVE, body=stream("one two"), at=101.0)
    assert verdict(ended, signals=2, exited_at=102.0) == RIGHT
    lie = client(Role.ACTIVE, End.CUT, body=stream("one to", None), at=101.0)
    assert "its text differs" in fault(lie, signals=2, exited_at=102.0)
    assert "after it should have" in fault(cut, signals=2, exited_at=106.0)


def test_a_third_signal_exits_130_at_once() -> None:
    cut = client(Role.ACTIVE, End.CUT, body=stream("one two", None), at=101.0)
    assert verdict(cut, signals=3, exit_code=130, exited_at=100.5) == RIGHT
    assert fault(cut, signals=3, exited_at=100.5) == "exit code 0 instead of exit code 130"
    assert verdict(cut, signals=3, exit_code=1, exited_at=100.5, third_exit=1) == RIGHT


def test_an_unread_answer_may_be_whole_or_finalized() -> None:
    for text in (TEXT, "one"):
        unread = client(Role.UNREAD, body=stream(text), at=102.0)
        assert verdict(unread, policy="finalize", exited_at=102.1) == RIGHT


def test_a_phase_that_was_not_reached_is_never_right() -> None:
    observation = Observation(Scenario("queued", "term", "chat"), not_reached="nobody waited")
    assert judge(observation, options(), REFERENCE) == Verdict("not reached", ("nobody waited",))


def test_who_was_cut_before_it_could_leave_proves_nothing() -> None:
    assert verdict(client(Role.LEAVER, End.LEFT, at=101.0), exited_at=102.0) == RIGHT
    for end in (End.CUT, End.COMPLETE):
        found = verdict(client(Role.LEAVER, end, at=101.0), exited_at=102.0)
        assert found.kind == "not reached"


def test_no_two_apis_share_a_long_prompt() -> None:
    prompts = {prompt_and_tokens(options(), api, Kind.LONG_PROMPT)[0][:40] for api in DIALECTS}
    assert len(prompts) == len(DIALECTS)
