"""The routes of the Responses API: answers that are made, kept, read, cancelled and deleted."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from quart import Response, request
from werkzeug.datastructures import Headers, MultiDict

from ..generation.errors import InvalidRequest
from .error_responses import ErrorAnswer
from .generating import GenerationRoutes
from .json_body import printable
from .off_loop import parse_body
from .response_store import OwnedResponses, Owner, ResponseStore
from .responses_call import parse_responses_call
from .responses_items import ConversationItem

MAX_PAGE = 100
DEFAULT_PAGE = 20
"""Items of one list: OpenAI's bounds."""

_BRING_MORE = (b"previous_response_id", b"item_reference", b'"id"')

View = Callable[..., Awaitable[Response]]


class ResponsesRoutes:
    """The views. ``read``: the current request's body, checked for its size."""

    def __init__(
        self,
        generation: GenerationRoutes,
        read: Callable[[], Awaitable[bytes]],
        api_keys: Sequence[bytes],
        *,
        store: ResponseStore | None = None,
    ) -> None:
        """``api_keys``: those that the server wants. What one of them made, no other sees."""
        self._generation = generation
        self._read = read
        self._api_keys = tuple(api_keys)
        self._store = store or ResponseStore()

    def table(self) -> list[tuple[str, View, list[str]]]:
        """Path, without ``/v1``, view and methods."""
        return [
            ("/responses", self._create, ["POST"]),
            ("/responses/<response_id>", self._one, ["GET", "DELETE"]),
            ("/responses/<response_id>/input_items", self._input_items, ["GET"]),
            ("/responses/<response_id>/cancel", self._cancel, ["POST"]),
        ]

    def visible(self) -> OwnedResponses:
        """What the current request's client may see."""
        return self._store.of(owner_of(request.headers, self._api_keys))

    async def _create(self) -> Response:
        raw = await self._read()
        parse = partial(parse_responses_call, responses=self.visible())
        # However short the body, the conversation that it carries on may be long.
        call = await parse_body(parse, raw, costly=_BRING_MORE)
        del raw
        return await self._generation.answer(call)

    async def _one(self, response_id: str) -> Response:
        if request.method == "DELETE":
            return self._delete(response_id)
        if request.args.get("stream", "").lower() == "true":
            raise InvalidRequest(
                "stream: an answer is streamed only to the request that asked for it; leave it "
                "out to get the response as it is now.",
                param="stream",
            )
        return self._shown(response_id)

    def _shown(self, response_id: str) -> Response:
        kept = self.visible().get(response_id)
        if kept is not None:
            return Response(kept.body, 200, content_type="application/json")
        under_way = self.visible().under_way(response_id)
        if under_way is not None and under_way.readable:
            return _json(under_way.snapshot())
        return _not_found(response_id)

    def _delete(self, response_id: str) -> Response:
        responses = self.visible()
        under_way = responses.under_way(response_id)
        found = responses.delete(response_id)
        if under_way is not None and under_way.readable:
            # Its own client still gets all of it.
            under_way.forget()
            found = True
        if not found:
            return _not_found(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, response_id: str) -> Response:
        under_way = self.visible().under_way(response_id)
        if under_way is not None:
            under_way.cancel()
            return _json(under_way.snapshot())
        # What is over stays as it ended: cancelling twice, or too late, is no mistake.
        return self._shown(response_id)

    async def _input_items(self, response_id: str) -> Response:
        kept = self.visible().get(response_id)
        if kept is not None:
            return _json(item_page(kept.input_items, request.args))
        under_way = self.visible().under_way(response_id)
        if under_way is not None and under_way.readable:
            return _json(item_page(under_way.input_items, request.args))
        return _not_found(response_id)


def owner_of(headers: Headers, api_keys: Sequence[bytes]) -> Owner:
    """Which of the server's keys a request brings; ``None`` where none is wanted.

    Compared as AccessPolicy does, which has let the request in.
    """
    scheme, _, credential = headers.get("Authorization", "").partition(" ")
    bearer = credential.strip() if scheme.lower() == "bearer" else ""
    offered = [bearer, headers.get("X-Api-Key", "")]
    for text in offered:
        raw = text.encode("latin-1", "replace")
        for number, key in enumerate(api_keys):
            if hmac.compare_digest(raw, key):
                return number
    return None


def item_page(items: Sequence[ConversationItem], query: MultiDict[str, str]) -> dict[str, Any]:
    """A list of items as ``order``, ``after`` and ``limit`` ask for it; newest first by default.

    Raises InvalidRequest.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: must be asc or desc, not {printable(order)}.", param="order")
    given = query.get("limit", str(DEFAULT_PAGE))
    if not (given.isascii() and given.isdigit() and len(given) < 4 and 1 <= int(given) <= MAX_PAGE):
        raise InvalidRequest(
            f"limit: must be from 1 to {MAX_PAGE}, not {printable(given)}.", param="limit"
        )
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        place = next((i for i, item in enumerate(ordered) if item.id == after), None)
        if place is None:
            raise InvalidRequest(
                f"after: there is no item {printable(after)} in this list.", param="after"
            )
        ordered = ordered[place + 1 :]
    page = ordered[: int(given)]
    return {
        "object": "list",
        "data": [item.shown for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(ordered) > len(page),
    }


def _json(body: Any) -> Response:
    return Response(json.dumps(body, ensure_ascii=False), 200, content_type="application/json")


def _not_found(response_id: str) -> Response:
    answer = ErrorAnswer(
        404,
        f"No response {printable(response_id)} is kept here: answers are kept in bounded memory "
        "of this process, the oldest making room for new ones.",
        "invalid_request_error",
        code="not_found",
    )
    return Response(answer.json_for(request.path, ""), 404, answer.all_headers())
