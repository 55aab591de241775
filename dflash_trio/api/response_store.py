"""The answers of the Responses API that this process keeps, in bounded memory.

They live as long as the process, and the oldest make room for new ones: by their number and by the
bytes that they hold. What one API key made is not there for another one: every look-up is made on
behalf of an owner.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from attrs import frozen

from .responses_items import ConversationItem

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 2**20
"""Of all kept answers together, with the conversations that led to them, as Python holds them.
Conversations that share turns count them once each: what is really held is less."""

Owner = int | None
"""Which of the server's API keys; ``None`` where it wants none, and all clients are one."""
_Key = tuple[Owner, str]


@frozen
class KeptResponse:
    """An answer that is over, and the conversation that it belongs to."""

    id: str
    body: bytes
    """The whole response object, as JSON."""
    input_items: tuple[ConversationItem, ...]
    """All before the answer, those of earlier answers that it carried on included; oldest first."""
    output_items: tuple[ConversationItem, ...]
    held_bytes: int
    """What the items hold, in bytes; the body is counted apart."""

    @property
    def size(self) -> int:
        return self.held_bytes + len(self.body)


class AnswerUnderWay(Protocol):
    """An answer that is being generated."""

    @property
    def readable(self) -> bool:
        """Whether it may be looked at by its id: it is to be kept."""
        ...

    @property
    def input_items(self) -> tuple[ConversationItem, ...]: ...

    def snapshot(self) -> dict[str, Any]:
        """The response object as it is now."""
        ...

    def cancel(self) -> None:
        """End it. Its own request hears of it as soon as the engine has dropped it."""
        ...

    def forget(self) -> None:
        """Do not keep it when it is over."""
        ...


class ResponseStore:
    """All that is kept. Usable from any thread: bodies are parsed on several."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, KeptResponse] = OrderedDict()
        # Each item as the kept answers bring it along, by their ids, the newest last. Every answer
        # has its own, so that none is held that no kept answer is charged for.
        self._items: dict[_Key, dict[str, ConversationItem]] = {}
        # Until their requests are over.
        self._under_way: dict[_Key, AnswerUnderWay] = {}
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, owner: Owner) -> OwnedResponses:
        """What one owner may see."""
        return OwnedResponses(self, owner)

    def get(self, key: _Key) -> KeptResponse | None:
        with self._lock:
            return self._kept.get(key)

    def item(self, key: _Key) -> ConversationItem | None:
        with self._lock:
            holders = self._items.get(key)
            return next(reversed(holders.values())) if holders is not None else None

    def under_way(self, key: _Key) -> AnswerUnderWay | None:
        with self._lock:
            return self._under_way.get(key)

    def begin(self, key: _Key, answer: AnswerUnderWay) -> None:
        with self._lock:
            self._under_way[key] = answer

    def end(self, key: _Key) -> None:
        with self._lock:
            self._under_way.pop(key, None)

    def keep(self, owner: Owner, response: KeptResponse) -> None:
        """Keep it in place of the oldest ones, unless it alone is more than all may be."""
        if response.size > self._max_bytes:
            return
        with self._lock:
            self._kept[owner, response.id] = response
            self._bytes += response.size
            for item in (*response.input_items, *response.output_items):
                self._items.setdefault((owner, item.id), {})[response.id] = item
            while self._bytes > self._max_bytes or len(self._kept) > self._max_responses:
                self._drop(next(iter(self._kept)))

    def delete(self, key: _Key) -> bool:
        """Whether there was such a one."""
        with self._lock:
            if key not in self._kept:
                return False
            self._drop(key)
            return True

    def _drop(self, key: _Key) -> None:
        response = self._kept.pop(key)
        self._bytes -= response.size
        for item in (*response.input_items, *response.output_items):
            item_key = (key[0], item.id)
            # One answer may have an id twice.
            holders = self._items.get(item_key, {})
            holders.pop(response.id, None)
            if not holders:
                self._items.pop(item_key, None)


@frozen
class OwnedResponses:
    """The store as one owner sees it."""

    _store: ResponseStore
    _owner: Owner

    def get(self, response_id: str) -> KeptResponse | None:
        return self._store.get((self._owner, response_id))

    def item(self, item_id: str) -> ConversationItem | None:
        """An item of a kept answer or of the conversation before it."""
        return self._store.item((self._owner, item_id))

    def under_way(self, response_id: str) -> AnswerUnderWay | None:
        return self._store.under_way((self._owner, response_id))

    def begin(self, response_id: str, answer: AnswerUnderWay) -> None:
        self._store.begin((self._owner, response_id), answer)

    def end(self, response_id: str) -> None:
        self._store.end((self._owner, response_id))

    def keep(self, response: KeptResponse) -> None:
        self._store.keep(self._owner, response)

    def delete(self, response_id: str) -> bool:
        return self._store.delete((self._owner, response_id))


def bytes_held(items: Iterable[ConversationItem]) -> int:
    """The memory of some items and of everything in them. Linear in them."""
    seen: set[int] = set()
    total = 0
    stack: list[Any] = [value for item in items for value in (item.id, item.shown, item.turn)]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        if isinstance(value, Mapping):
            stack.extend(value.keys())
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
    return total
