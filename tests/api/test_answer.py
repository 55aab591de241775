"""What came of a generation: calls told from content, in order, streamed and whole alike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.api.answer import (
    AnswerEvent,
    AnswerFailed,
    AnswerReader,
    CallArguments,
    CallBegun,
    CallEnded,
    ChoiceEnded,
    ContentDelta,
    ReasoningDelta,
    WholeAnswer,
)
from dflash_trio.generation.errors import EngineFailed, InvalidRequest
from dflash_trio.generation.events import (
    Event,
    Failed,
    Finished,
    Retired,
    TextDelta,
    TokenAlternative,
    TokenLogprob,
    Usage,
)
from dflash_trio.generation.request import PreparedPrompt, SamplingParams, Tool

USAGE = Usage(prompt_tokens=3, completion_tokens=2)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def reader(**changes: Any) -> AnswerReader:
    fields = {"tokens": (1, 2, 3), "max_tokens": 9, "sampling": SamplingParams(), **changes}
    return AnswerReader(PreparedPrompt(**fields), "call_")


def with_tools(**changes: Any) -> AnswerReader:
    return reader(tool_format="hermes", tools=(Tool("f"),), **changes)


def text(words: str, index: int = 0, **fields: Any) -> TextDelta:
    return TextDelta(words, 1, index=index, **fields)


def end(reason: Any = "stop", index: int = 0, stop: str | None = None) -> Finished:
    return Finished(reason, USAGE, stop, None, index)


def calls(events: list[AnswerEvent]) -> list[tuple[str, str]]:
    """Name and arguments of each."""
    found: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegun):
            found.append((event.name, ""))
        elif isinstance(event, CallArguments):
            found[-1] = (found[-1][0], found[-1][1] + event.text)
    return found


def content(events: list[AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def ending(events: list[AnswerEvent]) -> ChoiceEnded:
    assert isinstance(events[-1], ChoiceEnded)
    return events[-1]


def test_without_tools_an_answer_that_looks_like_a_call_is_text() -> None:
    read = reader().read([text(CALL), end()])
    assert content(read) == CALL
    assert ending(read).reason == "stop"


def test_calls_are_told_from_text_and_numbered_and_each_has_an_id_of_its_own() -> None:
    read = with_tools().read([text(f"Let me see. {CALL}\n{CALL}"), end()])
    assert content(read).strip() == "Let me see."
    assert calls(read) == [("f", '{"a": 1}')] * 2
    begun = [event for event in read if isinstance(event, CallBegun)]
    assert [event.call for event in begun] == [0, 1]
    assert len({event.id for event in begun}) == 2
    assert all(event.id.startswith("call_") for event in begun)
    assert [e.call for e in read if isinstance(e, CallEnded)] == [0, 1]
    assert ending(read).reason == "tool_calls"


@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_a_call_that_is_cut_is_closed_and_the_answer_says_that_it_was_cut(reason: str) -> None:
    read = with_tools().read([text(CALL[:40]), end(reason)])
    assert calls(read)[0][0] == "f"
    assert isinstance(read[-2], CallEnded)
    assert ending(read).reason == reason


def test_a_stop_string_of_the_request_is_the_reason_also_behind_a_call() -> None:
    assert ending(with_tools().read([text(CALL), end(stop="x")])).reason == "stop"


def test_when_only_one_call_is_wanted_nothing_behind_it_is_heard() -> None:
    one = with_tools(parallel_calls=False)
    read = one.read([text(f"{CALL}\n{CALL} and more")]) + one.read([text("!"), end()])
    assert calls(read) == [("f", '{"a": 1}')]
    assert content(read) == ""
    assert ending(read).reason == "tool_calls"


def test_channels_that_a_models_format_keeps_apart_are_calls_too() -> None:
    answer = with_tools()
    read = answer.read(
        [
            text("hm", channel="reasoning"),
            text('{"a"', channel="tool:f"),
            text(": 1}", channel="tool:f"),
            text("{}", channel="tool:g"),
            text("done"),
            end(),
        ]
    )
    assert isinstance(read[0], ReasoningDelta)
    assert calls(read) == [("f", '{"a": 1}'), ("g", "{}")]
    assert content(read) == "done"
    assert sum(isinstance(event, CallEnded) for event in read) == 2


def test_log_probabilities_stay_with_the_content() -> None:
    entry = TokenLogprob(TokenAlternative(1, b"a", -0.1))
    read = reader().read([text("a", logprobs=(entry,)), text("b", logprobs=(entry,)), end()])
    assert read[0] == ContentDelta(0, "ab", (entry, entry))


def test_each_of_several_answers_has_calls_and_an_end_of_its_own() -> None:
    answer = with_tools(n=2)
    first = answer.read([text(CALL, 0), text("no", 1), end(index=1)])
    assert not answer.done
    assert next(e for e in first if isinstance(e, ChoiceEnded)).reason == "stop"
    last = answer.read([end(index=0)])
    assert answer.done
    assert ending(last).reason == "tool_calls"


def test_a_failure_ends_it_after_what_came_before() -> None:
    answer = reader()
    with pytest.raises(AnswerFailed, match="gone") as failed:
        answer.read([text("so far"), Failed("gone"), Retired()])
    assert content(failed.value.read) == "so far"
    assert isinstance(failed.value.error, EngineFailed)
    assert answer.done


def test_a_failure_that_is_the_requests_own_is_told_as_such() -> None:
    with pytest.raises(AnswerFailed) as failed:
        reader().read([Failed("too large", is_the_requests=True)])
    assert isinstance(failed.value.error, InvalidRequest)
    assert "too large" in str(failed.value.error)


pieces = st.lists(st.integers(0, 80), max_size=12)


@given(pieces, st.sampled_from([CALL, f"a {CALL} b {CALL}", "plain", CALL[:-3], CALL[:30]]))
def test_the_whole_is_what_the_stream_says_however_it_is_cut(cuts: list[int], said: str) -> None:
    at = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
    events: list[Event] = [text(said[a:b]) for a, b in pairwise(at)]
    streamed = with_tools()
    read = [event for one in [*events, end()] for event in streamed.read([one])]
    whole = WholeAnswer(1)
    whole.add(with_tools().read([*events, end()]))
    (choice,) = whole.choices
    assert choice.content == content(read)
    assert [(call.name, call.arguments) for call in choice.calls] == calls(read)
    assert choice.ending.reason == ending(read).reason
    kinds = [type(event) for event in choice.events]
    assert all(a != b or a is not ContentDelta for a, b in pairwise(kinds))


def test_a_token_that_shows_nothing_yet_does_not_cut_a_call_in_two() -> None:
    read = with_tools().read(
        [text('{"x":"', channel="tool:f"), text(""), text('ok"}', channel="tool:f"), end()]
    )
    assert calls(read) == [("f", '{"x":"ok"}')]


def test_one_call_is_one_also_where_channels_follow_each_other() -> None:
    read = with_tools(parallel_calls=False).read(
        [text("{}", channel="tool:f"), text("{}", channel="tool:g"), end()]
    )
    assert calls(read) == [("f", "{}")]


# ------------------------------------------------------------------------- only one call


BROKEN = '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>'


@pytest.mark.parametrize("call", [CALL, BROKEN])
@pytest.mark.parametrize(
    "unheard", [end("length"), end(stop="STOP"), end("cancelled"), end("stop")]
)
def test_the_one_call_that_is_wanted_ends_the_answer_whatever_comes_behind_it(
    call: str, unheard: Finished
) -> None:
    events = [text(f"{call}\n and more"), unheard]
    together = with_tools(parallel_calls=False).read(events)
    one = with_tools(parallel_calls=False)
    assert together[-2:] == [event for e in events for event in one.read([e])][-2:]
    assert together[-2] == CallEnded(0, 0, cut=False)
    assert (ending(together).reason, ending(together).stop_sequence) == ("tool_calls", None)
    assert ending(together).usage == USAGE


@pytest.mark.parametrize("unheard", [end("length"), end(stop="STOP"), end("cancelled")])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_the_answers_end_cuts_is_marked_and_does_not_excuse_it(
    unheard: Finished, parallel: bool
) -> None:
    read = with_tools(parallel_calls=parallel).read([text(CALL[:45]), unheard])
    assert read[-2] == CallEnded(0, 0, cut=True)
    assert (ending(read).reason, ending(read).stop_sequence) == (
        unheard.reason,
        unheard.stop_sequence,
    )
    channels = with_tools(parallel_calls=parallel).read([text("{", channel="tool:f"), unheard])
    assert channels[-2] == CallEnded(0, 0, cut=True)


def test_what_the_model_ends_is_not_cut() -> None:
    assert with_tools().read([text(CALL[:45]), end()])[-2] == CallEnded(0, 0, cut=False)
    assert with_tools().read([text(CALL), end("length")])[-2] == CallEnded(0, 0, cut=False)


def test_an_engine_may_stop_once_every_answer_has_its_one_call() -> None:
    answer = with_tools(n=3, parallel_calls=False)
    answer.read([text(CALL[:-20], 0), text("hm", 1), text("hm", 2)])
    assert not answer.suffices
    answer.read([text(CALL[-20:], 0), end(index=1)])
    assert not answer.suffices, "one of them has something to say"
    answer.read([text(CALL, 2)])
    assert answer.suffices
    answer.read([end("cancelled", 0), end("cancelled", 2)])
    assert answer.done
    assert not answer.suffices, "there is nothing to stop any more"


def test_where_several_calls_are_allowed_none_is_enough() -> None:
    answer = with_tools()
    answer.read([text(CALL)])
    assert not answer.suffices


# ---------------------------------------------------- log probabilities, beside calls


def scored(*tokens: str | bytes) -> list[Event]:
    """One delta for each token, as the engine tells them; bytes: with what follows."""
    deltas: list[Event] = []
    waiting: list[TokenLogprob] = []
    pending = b""
    for token in tokens:
        piece = token.encode() if isinstance(token, str) else token
        waiting.append(TokenLogprob(TokenAlternative(1, piece, -0.1)))
        pending += piece
        try:
            shown = pending.decode()
        except UnicodeDecodeError:
            deltas.append(text(""))
            continue
        deltas.append(text(shown, logprobs=tuple(waiting)))
        waiting, pending = [], b""
    return deltas


def tokens_of(read: list[AnswerEvent]) -> list[bytes]:
    return [
        entry.chosen.piece
        for event in read
        if isinstance(event, ContentDelta)
        for entry in event.logprobs
    ]


CALL_TOKENS = (
    "<tool",
    "_call>",
    "\n",
    '{"name": "f", "argu',
    'ments": {"a": "pre"}}',
    "\n</tool_call>",
)
F0_9F = ("\U0001f600".encode()[:2], "\U0001f600".encode()[2:])


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        (("pre", " ", *CALL_TOKENS), [b"pre"]),
        (("pre", " <", "tool_call>", *CALL_TOKENS[2:]), [b"pre"]),
        (("pre <", "tool_call>", *CALL_TOKENS[2:]), [b"pre <"]),
        (CALL_TOKENS, []),
        ((*CALL_TOKENS, "\n", "pre", " x"), [b"pre", b" x"]),
        ((*CALL_TOKENS, "\n", *CALL_TOKENS, " <", "to", "x"), [b" <", b"to", b"x"]),
        (("a", " ", " <", "tool", "b", " "), [b"a", b" ", b" <", b"tool", b"b", b" "]),
        ((*F0_9F, " ", *CALL_TOKENS, *F0_9F), [*F0_9F, *F0_9F]),
        (("a", "</tool_call>", "<", "<b"), [b"a", b"</tool_call>", b"<", b"<b"]),
        (("  ", "hi", "\n\n"), [b"  ", b"hi", b"\n\n"]),
        (("a", "", "b", ""), [b"a", b"", b"b", b""]),
        ((*CALL_TOKENS[:4],), []),
        (("x", "<tool"), [b"x", b"<tool"]),
    ],
)
def test_log_probabilities_are_those_of_the_contents_tokens_however_they_come(
    tokens: tuple[str | bytes, ...], kept: list[bytes]
) -> None:
    events = [*scored(*tokens), end()]
    together = with_tools(logprobs=0).read(events)
    assert tokens_of(together) == kept
    one = with_tools(logprobs=0)
    apart = [event for e in events for event in one.read([e])]
    assert tokens_of(apart) == kept
    assert content(apart) == content(together)
    whole = WholeAnswer(1)
    whole.add(apart)
    assert [entry.chosen.piece for entry in whole.choices[0].logprobs] == kept
    # The same text as without them, and nothing of a call.
    assert content(together) == content(with_tools().read(events))


def test_log_probabilities_of_a_call_that_nobody_hears_are_nobodys() -> None:
    one = with_tools(logprobs=0, parallel_calls=False)
    assert tokens_of(one.read([*scored("a", *CALL_TOKENS, "b"), end()])) == [b"a"]


@given(
    pieces,
    st.sampled_from(
        ["a < b ", f"a  {CALL}\n{CALL} b<c", f"{CALL}<tool <x", "<<to<tool", f"{CALL}\n<<x"]
    ),
)
def test_with_single_characters_as_tokens_they_spell_the_content(
    cuts: list[int], said: str
) -> None:
    read = with_tools(logprobs=0).read([*scored(*said), end()])
    assert b"".join(tokens_of(read)).decode() == content(read)
    at = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
    events: list[Event] = []
    for a, b in pairwise(at):
        # Several tokens in one delta, as behind what might have become a stop string.
        few = [event for event in scored(*said[a:b]) if isinstance(event, TextDelta)]
        logprobs = tuple(entry for event in few for entry in event.logprobs)
        events.append(text(said[a:b], logprobs=logprobs))
    assert tokens_of(with_tools(logprobs=0).read([*events, end()])) == tokens_of(read)


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>\n<function=f>\n<paramete pre",
        "a <tool_call>\n<function=f>\n</function>\n</tool_call>\n<<tool",
    ],
)
def test_text_in_which_a_call_broke_off_has_its_log_probabilities(said: str) -> None:
    odd = reader(tool_format="qwen-xml", tools=(Tool("f"),), logprobs=0)
    read = odd.read([*scored(*said), end()])
    assert calls(read)
    assert b"".join(tokens_of(read)).decode() == content(read) != ""
