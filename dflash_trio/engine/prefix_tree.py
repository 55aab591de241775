"""PrefixTree: which of some token sequences shares the longest beginning with a prompt.

A radix tree: each edge carries a run of tokens, and sequences that begin alike share the nodes of
what they have in common. Finding costs the length of the match, however many sequences there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

Tokens = tuple[int, ...]


@frozen
class Match:
    """The sequence of ``key`` and a prompt begin with the same ``length`` tokens."""

    key: int
    length: int


@define(eq=False)
class _Node:
    tokens: Tokens
    """Of the edge that leads here."""
    parent: _Node | None
    children: dict[int, _Node] = field(factory=dict)
    """By the first token of their edges."""
    keys: dict[int, None] = field(factory=dict)
    """Of the sequences that end here or below, the latest last."""


class PrefixTree:
    """Token sequences by keys of the caller's choice. Not thread-safe."""

    def __init__(self) -> None:
        self._root = _Node((), None)
        self._ends: dict[int, _Node] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def insert(self, key: int, tokens: Sequence[int]) -> None:
        """Know a sequence, not empty, under a key that is not in use."""
        assert tokens
        assert key not in self._ends
        rest = tuple(tokens)
        node = self._root
        node.keys[key] = None
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                child = node.children[rest[0]] = _Node(rest, node)
                rest = ()
            else:
                common = _common(child.tokens, rest)
                if common < len(child.tokens):
                    child = self._split(child, common)
                rest = rest[common:]
            node = child
            node.keys[key] = None
        self._ends[key] = node

    @staticmethod
    def _split(child: _Node, at: int) -> _Node:
        """A node in the middle of the edge to ``child``."""
        parent = child.parent
        assert parent is not None
        middle = _Node(child.tokens[:at], parent)
        middle.keys = dict(child.keys)
        parent.children[child.tokens[0]] = middle
        child.tokens, child.parent = child.tokens[at:], middle
        middle.children[child.tokens[0]] = child
        return middle

    def remove(self, key: int) -> None:
        """Forget a sequence. KeyError for one that is not there."""
        node: _Node | None = self._ends.pop(key)
        while node is not None:
            del node.keys[key]
            parent = node.parent
            if parent is not None and not node.keys:
                del parent.children[node.tokens[0]]
            elif parent is not None and len(node.children) == 1:
                self._join(node)
            node = parent

    def _join(self, node: _Node) -> None:
        """Take out a node that no sequence ends at and that has one child."""
        (child,) = node.children.values()
        if len(child.keys) < len(node.keys):
            return  # somebody ends here
        parent = node.parent
        assert parent is not None
        child.tokens, child.parent = node.tokens + child.tokens, parent
        parent.children[child.tokens[0]] = child

    def longest(self, tokens: Sequence[int]) -> Match | None:
        """The latest of the sequences with the longest common beginning; ``None``: no token in
        common with any."""
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            common = _common(child.tokens, tokens[at : at + len(child.tokens)])
            at += common
            node = child
            if common < len(child.tokens):
                break
        if not at:
            return None
        return Match(next(reversed(node.keys)), at)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two runs begin with alike."""
    length = min(len(first), len(second))
    if tuple(first[:length]) == tuple(second[:length]):  # the usual case, compared in C
        return length
    low, high = 0, length  # alike up to low, not up to high
    while high - low > 1:
        middle = (low + high) // 2
        if tuple(first[low:middle]) == tuple(second[low:middle]):
            low = middle
        else:
            high = middle
    return low
