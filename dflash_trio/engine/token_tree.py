"""Trees of tokens in a batch, and the paths from their root to their leaves. Pure.

A tree is told by its *parents*: for each token, in an order in which it comes after the one that it
follows, that one's place; -1 for the first, which is the root.
"""

from __future__ import annotations

from collections.abc import Sequence


def depths_of(parents: Sequence[int]) -> list[int]:
    """How many tokens each has before it. ValueError where the parents make no tree."""
    depths: list[int] = []
    for place, parent in enumerate(parents):
        if not place:
            if parent != -1:
                raise ValueError("a tree whose first token is no root")
            depths.append(0)
        elif not 0 <= parent < place:
            raise ValueError(f"token {place} of a tree follows {parent}")
        else:
            depths.append(depths[parent] + 1)
    return depths


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """For each token, the numbers of the paths that go through it, ascending.

    A token's first child goes on with a path of its own, each later one begins a path: so path 0
    takes the first turn everywhere, and numbers are as many as there are leaves. ValueError where
    the parents make no tree.
    """
    depths_of(parents)
    ends: list[int] = []
    continued = [False] * len(parents)
    paths = 0
    for parent in parents:
        if parent >= 0 and not continued[parent]:
            continued[parent] = True
            ends.append(ends[parent])
        else:
            ends.append(paths)
            paths += 1
    through: list[list[int]] = [[] for _ in parents]
    for place in range(len(parents) - 1, -1, -1):
        if not continued[place]:
            through[place] = [ends[place]]
        through[place].sort()
        if place:
            through[parents[place]] += through[place]
    return through


def check_path(parents: Sequence[int], path: Sequence[int]) -> None:
    """ValueError unless ``path`` leads from the root along the tree."""
    before = -1
    for place in path:
        if not 0 <= place < len(parents) or parents[place] != before:
            raise ValueError(f"{list(path)} is no path of the tree {list(parents)}")
        before = place
    if not path:
        raise ValueError("a path without the root")
