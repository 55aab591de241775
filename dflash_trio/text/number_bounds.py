"""Bounds of numbers, written so that llguidance 1.9.1 enforces them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeAlias

Pointer: TypeAlias = tuple[str, ...]

_DIGITS = 15
"""As many of them as the engine reads without an error in the last."""
_LEAST = 1e-20
"""What stands for "above 0": far below every bound that a schema may name."""


def settle_bounds(
    schemas: Mapping[Pointer, Any], refused: Callable[[Pointer, str], Exception]
) -> None:
    """Give the exclusive whole bounds that the engine would not exclude as inclusive ones.

    It accepts the 3 of ``exclusiveMinimum: 3, maximum: 3.14``: a whole bound, and the other one
    less than 1 away on the side that is further from 0. Schemas may be merged later, by ``allOf``
    and others, so a bound is compared with all the opposite ones of the document. The number next
    to it then stands for it, so what is merged is right as well.

    ``refused``: makes the exception for a keyword at a place, and what it needs.
    """
    found = [(at, schema) for at, schema in schemas.items() if isinstance(schema, dict)]
    for exclusive, inclusive, opposite, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        # With the sign, what is true for the lower bounds is true for the upper ones.
        others = sorted(
            {sign * schema[name] for _, schema in found for name in opposite if name in schema}
        )
        for at, schema in found:
            if exclusive not in schema:
                continue
            bound = sign * schema[exclusive]
            index = bisect_right(others, bound)
            if bound < 0 or bound != int(bound):
                continue
            if index == len(others) or others[index] >= bound + 1:
                continue
            least = _next_to(int(bound))
            if others[index] <= least:
                raise refused((*at, exclusive), "an opposite bound that is not so close")
            del schema[exclusive]
            schema[inclusive] = sign * max(least, sign * schema.get(inclusive, sign * least))


def _next_to(whole: int) -> float:
    return float(whole + Decimal(1).scaleb(len(str(whole)) - _DIGITS)) if whole else _LEAST
