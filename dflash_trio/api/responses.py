"""POST /v1/responses: an answer in the words of OpenAI's Responses API."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from attrs import define, field, frozen

from ..generation.errors import GenerationError
from ..generation.events import TokenLogprob
from . import sse
from .answer import (
    AnswerEvent,
    CallArguments,
    CallBegun,
    CallEnded,
    ChoiceEnded,
    ContentDelta,
    ReasoningDelta,
    WholeAnswer,
    new_id,
)
from .error_responses import answer_for
from .generating import AnswerContext
from .json_text import dump_in_parts
from .response_store import KeptResponse, OwnedResponses, bytes_held
from .responses_items import ConversationItem, read_item
from .responses_object import (
    ItemStatus,
    Status,
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    response_object,
    response_usage,
    shown_logprobs,
    text_part,
)

MANY_LOGPROBS = 64
"""Tokens with log probabilities from which on their item is not encoded in one go."""


@frozen
class Keeping:
    """Where an answer can be found by its id, and the conversation that led to it."""

    responses: OwnedResponses
    items: tuple[ConversationItem, ...]
    held_bytes: int
    kept: bool
    """Also once it is over. Cancelled it can be in any case."""


@define
class _OpenItem:
    """The item of the output that is being written."""

    kind: Literal["message", "reasoning", "function_call"]
    id: str
    texts: list[str] = field(factory=list)
    logprobs: list[TokenLogprob] = field(factory=list)
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        """All of its content so far; calls have none."""
        if self.kind == "reasoning":
            return reasoning_part(self.text)
        return text_part(self.text, self.logprobs)

    def item(self, status: ItemStatus, *, empty: bool = False) -> dict[str, Any]:
        """As it stands. ``empty``: as it began."""
        if self.kind == "function_call":
            arguments = "" if empty else self.text
            return call_item(self.id, self.call_id, self.name, arguments, status)
        make = reasoning_item if self.kind == "reasoning" else message_item
        return make(self.id, [] if empty else [self.part()], status)


class ResponsesEncoder:
    """One response and its encodings, streamed or whole.

    While it is written it can be looked up by its id, and cancelled; once it is over, it is kept.
    """

    call_prefix = "call_"

    def __init__(
        self, context: AnswerContext, settings: Mapping[str, Any], keeping: Keeping | None = None
    ) -> None:
        self.id = new_id("resp_")
        sampling = context.prepared.sampling
        # What the request left open is said as the answering model has filled it in.
        effective = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": context.model,
            **settings,
            **{key: v for key, v in effective.items() if settings.get(key) is None},
        }
        self._cancel_generation = context.cancel
        self._keeping = keeping
        self._forgotten = False
        self._cancelled = False
        self._sequence_number = 0
        self._output: list[dict[str, Any]] = []
        """Items that are complete, in the order they came in."""
        self._open: _OpenItem | None = None
        self._early_logprobs: list[TokenLogprob] = []
        """Of tokens whose text has not come yet: it may turn out to be a call."""
        self._ended: ChoiceEnded | None = None
        self._silent = False
        """Nobody reads the events."""
        self._large = False
        """Its events, those of deltas apart, are long: a thread encodes them."""
        if keeping is not None:
            keeping.responses.begin(self.id, self)
            # Over with its request, also where the client has gone and nobody writes the end.
            context.at_close(partial(keeping.responses.end, self.id))

    # ----------------------------------------------------------------- as an answer under way

    @property
    def readable(self) -> bool:
        return self._keeping is not None and self._keeping.kept and not self._forgotten

    @property
    def input_items(self) -> tuple[ConversationItem, ...]:
        return self._keeping.items if self._keeping is not None else ()

    def snapshot(self) -> dict[str, Any]:
        # Read once, and before those that are complete: a thread may be writing the answer
        # meanwhile, and an item that it completes in between is in either or in both.
        under_way = self._open
        output = list(self._output)
        if under_way is not None and all(item["id"] != under_way.id for item in output):
            output.append(under_way.item("in_progress"))
        return self._response("cancelled" if self._cancelled else "in_progress", output)

    def cancel(self) -> None:
        self._cancelled = True
        self._cancel_generation()

    def forget(self) -> None:
        self._forgotten = True

    # ---------------------------------------------------------------------------- the stream

    def opening(self) -> bytes:
        response = self.snapshot()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def encode(self, events: Sequence[AnswerEvent]) -> bytes:
        return b"".join(map(self._one, events))

    def closing(self) -> bytes:
        response = self._final()
        # There is no event for an answer that was cancelled: its status tells.
        kind = "completed" if response["status"] == "completed" else "incomplete"
        return self._event(f"response.{kind}", response=response)

    def failure(self, error: GenerationError) -> bytes:
        output = list(self._output)
        if self._open is not None:
            output.append(self._open.item("incomplete"))
        failed = {"code": "server_error", "message": answer_for(error).message}
        response = self._response("failed", output, error=failed)
        self._keep(response)
        return self._event("response.failed", response=response)

    def keep_alive(self) -> bytes:
        return self._event("response.in_progress", response=self.snapshot())

    def whole(self, answer: WholeAnswer) -> dict[str, Any]:
        # By the way of the stream, so that both make the same items of the same answer.
        self._silent = True
        self.encode(answer.choices[0].events)
        return self._final()

    # ------------------------------------------------------------------------- event by event

    def _one(self, event: AnswerEvent) -> bytes:
        match event:
            case ReasoningDelta(_, text):
                return self._in("reasoning") + self._delta("response.reasoning_text.delta", text)
            case ContentDelta(_, "", logprobs):
                # No text, no message; what it belongs to comes later.
                self._early_logprobs += logprobs
                return b""
            case ContentDelta(_, text, logprobs):
                logprobs = (*self._early_logprobs, *logprobs)
                self._early_logprobs = []
                begun = self._in("message")
                assert self._open is not None
                self._open.logprobs += logprobs
                self._large = self._large or len(self._open.logprobs) > MANY_LOGPROBS
                return begun + self._delta(
                    "response.output_text.delta", text, logprobs=shown_logprobs(logprobs)
                )
            case CallBegun(_, _, call_id, name):
                closed = self._close()
                return closed + self._begin(
                    _OpenItem("function_call", new_id("fc_"), call_id=call_id, name=name)
                )
            case CallArguments(_, _, text):
                return self._delta("response.function_call_arguments.delta", text)
            case CallEnded(cut=cut):
                return self._close(cut=cut and not _is_json(self._open))
            case ChoiceEnded():
                return self._end(event)

    def _in(self, kind: Literal["message", "reasoning"]) -> bytes:
        """See to it that an item of this kind is the one that is open."""
        if self._open is not None and self._open.kind == kind:
            return b""
        prefix = "rs_" if kind == "reasoning" else "msg_"
        return self._close() + self._begin(_OpenItem(kind, new_id(prefix)))

    def _begin(self, item: _OpenItem) -> bytes:
        self._open = item
        shown = item.item("in_progress", empty=True)
        added = self._event(
            "response.output_item.added", output_index=len(self._output), item=shown
        )
        if item.kind == "function_call":
            return added
        return added + self._of_part("response.content_part.added", part=item.part())

    def _delta(self, kind: str, text: str, **more: Any) -> bytes:
        item = self._open
        assert item is not None
        item.texts.append(text)
        if item.kind == "function_call":
            return self._of_item(kind, delta=text)
        return self._of_part(kind, delta=text, **more)

    def _close(self, *, cut: bool = False) -> bytes:
        """End the open item, if there is one. ``cut``: the answer ended within it."""
        item = self._open
        early, self._early_logprobs = self._early_logprobs, []
        if item is None:
            return b""
        done = b""
        if early and item.kind == "message":
            # No text came with them any more, so they are of tokens at the very end of this one.
            item.logprobs += early
            done = self._delta("response.output_text.delta", "", logprobs=shown_logprobs(early))
        if item.kind == "function_call":
            done += self._of_item(
                "response.function_call_arguments.done", name=item.name, arguments=item.text
            )
        else:
            part = item.part()
            if item.kind == "reasoning":
                done += self._of_part("response.reasoning_text.done", text=item.text)
            else:
                done += self._of_part(
                    "response.output_text.done", text=item.text, logprobs=part["logprobs"]
                )
            done += self._of_part("response.content_part.done", part=part)
        finished = item.item("incomplete" if cut else "completed")
        done += self._event(
            "response.output_item.done", output_index=len(self._output), item=finished
        )
        # In this order; see snapshot.
        self._output.append(finished)
        self._open = None
        return done

    def _end(self, ended: ChoiceEnded) -> bytes:
        self._ended = ended
        cut = _cut(ended)
        closed = self._close(cut=cut)
        if self._output and (cut or self._output[-1]["type"] != "reasoning"):
            return closed
        # Whoever reads an answer looks for a message: there is one, even if nothing was said.
        return closed + self._in("message") + self._close(cut=cut)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """An event of the item that is open."""
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if self._silent:
            return b""
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        line = sse.json_line(event, large=self._large and not kind.endswith(".delta"))
        self._sequence_number += 1
        return f"event: {kind}\ndata: {line}\n\n".encode()

    # -------------------------------------------------------------------------------- the end

    def _final(self) -> dict[str, Any]:
        """The response as it stays, kept if it is to be."""
        ended = self._ended
        assert ended is not None, "the answer has not ended"
        status: Status = "completed"
        if ended.reason == "cancelled":
            status = "cancelled"
        elif ended.reason == "length":
            status = "incomplete"
        response = self._response(
            status,
            self._output,
            completed_at=int(time.time()) if status == "completed" else None,
            usage=response_usage(ended.usage, ended.detail),
        )
        self._keep(response)
        return response

    def _response(
        self, status: Status, output: Sequence[Mapping[str, Any]], **more: Any
    ) -> dict[str, Any]:
        return response_object(self._head, status, output, **more)

    def _keep(self, response: Mapping[str, Any]) -> None:
        keeping = self._keeping
        if keeping is None:
            return
        if self.readable:
            items = tuple(read_item(dict(item)) for item in response["output"])
            body = dump_in_parts(response).encode()
            held = keeping.held_bytes + bytes_held(items)
            keeping.responses.keep(KeptResponse(self.id, body, keeping.items, items, held))
        keeping.responses.end(self.id)


def _cut(ended: ChoiceEnded) -> bool:
    """Whether an answer ended before the model ended it."""
    return ended.reason in ("length", "cancelled")


def _is_json(item: _OpenItem | None) -> bool:
    """Whether a call's arguments are complete as they stand."""
    if item is None:
        return False
    try:
        return isinstance(json.loads(item.text), dict)
    except (ValueError, RecursionError):
        return False
