"""The radix tree finds what a linear search finds, and keeps nothing of what it forgot."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dflash_trio.engine.prefix_tree import PrefixTree

runs = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class Trees(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.known: dict[int, tuple[int, ...]] = {}
        self.next_key = 0

    @rule(tokens=runs)
    def insert(self, tokens: tuple[int, ...]) -> None:
        self.tree.insert(self.next_key, tokens)
        self.known[self.next_key] = tokens
        self.next_key += 1

    @rule(pick=st.integers(0, 1000))
    def remove(self, pick: int) -> None:
        if self.known:
            key = list(self.known)[pick % len(self.known)]
            self.tree.remove(key)
            del self.known[key]
            assert key not in self.tree

    @rule(tokens=runs)
    def longest(self, tokens: tuple[int, ...]) -> None:
        match = self.tree.longest(tokens)
        best = max((common(tokens, known) for known in self.known.values()), default=0)
        if match is None:
            assert best == 0
        else:
            assert match.length == best == common(tokens, self.known[match.key])
            assert match.key == max(k for k, t in self.known.items() if common(tokens, t) == best)

    @invariant()
    def the_tree_is_as_small_as_what_is_in_it(self) -> None:
        assert len(self.tree) == len(self.known)
        nodes, stack = 0, [self.tree._root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            nodes += 1
            if node is not self.tree._root:
                assert node.keys
                ends = any(end is node for end in self.tree._ends.values())
                assert ends or len(node.children) > 1, "a node that parts nothing"
        assert nodes <= 2 * len(self.known) + 1


TestTrees = Trees.TestCase
TestTrees.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
