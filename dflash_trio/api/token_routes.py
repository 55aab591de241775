"""Counting, tokenizing, rendering: what a model's tokenizer and template make of a body.

None of it takes a slot or waits for an engine. Parsing and tokenizing run on threads, few at a
time, so that a long count slows down other counts and nothing else.

Which tokenizer is meant is part of the question here, unlike on generating routes: with several
loaded models the body must name one, and no other one answers in its place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import trio
from quart import Response

from ..engine.model_runner import EngineError
from ..generation.errors import (
    EngineFailed,
    InvalidRequest,
    ModelNotNamed,
    Unhealthy,
    UnknownModel,
)
from ..routing.router import Router, usable_cores
from ..routing.served_model import ServedModel
from .json_body import printable
from .json_text import LongArray, dump_in_parts
from .off_loop import parse_body
from .response_store import OwnedResponses
from .token_requests import (
    DetokenizeCall,
    PromptCall,
    TokenizeCall,
    parse_apply_template,
    parse_detokenize,
    parse_messages_count,
    parse_responses_count,
    parse_tokenize,
)


class NamesModel(Protocol):
    """A parsed body of one of these routes."""

    @property
    def model(self) -> str | None: ...


Call = TypeVar("Call", bound=NamesModel)


class TokenRoutes:
    """The views. ``read``: the current request's body, checked for its size."""

    def __init__(
        self,
        router: Router,
        read: Callable[[], Awaitable[bytes]],
        *,
        kept: Callable[[], OwnedResponses | None] = lambda: None,
        limit: int | None = None,
    ) -> None:
        """``kept``: the answers that the current request's body may refer to. ``limit``: how many
        bodies are worked on at a time; default 2 x usable cores."""
        self._router = router
        self._read = read
        self._kept = kept
        self._limiter = trio.CapacityLimiter(limit or 2 * usable_cores())

    def table(self) -> dict[str, Callable[[], Awaitable[Response]]]:
        """Path, without ``/v1``, to view."""
        return {
            "/messages/count_tokens": self._count_messages,
            "/responses/input_tokens": self._count_responses,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/apply-template": self._apply_template,
        }

    async def _count_messages(self) -> Response:
        return await self._answer(parse_messages_count, count_messages)

    async def _count_responses(self) -> Response:
        parse = partial(parse_responses_count, responses=self._kept())
        return await self._answer(parse, count_responses)

    async def _tokenize(self) -> Response:
        return await self._answer(parse_tokenize, tokenize)

    async def _detokenize(self) -> Response:
        return await self._answer(parse_detokenize, detokenize)

    async def _apply_template(self) -> Response:
        return await self._answer(parse_apply_template, apply_template)

    async def _answer(
        self,
        parse: Callable[[bytes], Call],
        work: Callable[[ServedModel, Call], dict[str, Any]],
    ) -> Response:
        raw = await self._read()
        call = await parse_body(parse, raw, limiter=self._limiter)
        del raw
        model = choose_model(self._router.models, call.model)

        def work_and_encode() -> str:
            # Again, now that it is its turn: a shutdown does not wait for a line of these.
            self._router.check_open()
            return dump_in_parts(work(model, call))

        try:
            # Not abandoned when the client leaves: the thread reads the model's vocabulary, which
            # must outlive it. Bounded by the body's size and the template's own limits.
            body = await trio.to_thread.run_sync(work_and_encode, limiter=self._limiter)
        except (InvalidRequest, EngineError) as error:
            if not model.healthy:
                # It went away meanwhile, which may be all that is wrong with the request.
                raise Unhealthy([model.name]) from error
            if isinstance(error, EngineError):
                raise EngineFailed(f"{model.name} cannot tokenize: {error}") from error
            raise
        return Response(body, 200, content_type="application/json")


def choose_model(models: Sequence[ServedModel], name: str | None) -> ServedModel:
    """The model whose tokenizer is meant.

    Raises ModelNotNamed, UnknownModel, and Unhealthy: nobody answers for another model.
    """
    if len(models) == 1:
        model = models[0]
    else:
        names = [model.name for model in models]
        if name is None:
            raise ModelNotNamed(names)
        found = next((model for model in models if model.is_called(name)), None)
        if found is None:
            raise UnknownModel(printable(name), names)
        model = found
    if not model.healthy:
        raise Unhealthy([model.name])
    return model


# ------------------------------------------------------------------------- what threads do


def count_messages(model: ServedModel, call: PromptCall) -> dict[str, Any]:
    return {"input_tokens": len(model.tokenize_chat(call.request))}


def count_responses(model: ServedModel, call: PromptCall) -> dict[str, Any]:
    return {
        "object": "response.input_tokens",
        "input_tokens": len(model.tokenize_chat(call.request)),
    }


def apply_template(model: ServedModel, call: PromptCall) -> dict[str, Any]:
    return {"prompt": model.render_chat(call.request).text}


def tokenize(model: ServedModel, call: TokenizeCall) -> dict[str, Any]:
    tokens = model.tokenize_text(
        call.content,
        add_special=call.add_special is True,
        parse_special=call.parse_special is not False,
    )
    if not call.with_pieces:
        return {"tokens": tokens}
    # One by one: a megabyte of text can be a million tokens, and each of these has 300 bytes.
    pieces = ({"id": token, "piece": _shown_piece(model.piece(token))} for token in tokens)
    return {"tokens": LongArray(pieces)}


def _shown_piece(piece: bytes) -> str | list[int]:
    """Text, or the bytes of what is only a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def detokenize(model: ServedModel, call: DetokenizeCall) -> dict[str, Any]:
    size = model.vocabulary_size
    for index, token in enumerate(call.tokens.ids):
        if not 0 <= token < size:
            raise InvalidRequest(
                f"tokens[{index}]: must be from 0 to {size - 1} for {model.name}.",
                param=f"tokens[{index}]",
            )
    return {"content": model.detokenize(call.tokens.ids)}
