"""From parsed JSON to attrs classes, with errors that name the field and the index.

cattrs does the walking; here are only the strict rules (a boolean is no number, a string is no
number, an integer is no string) and the translation of its errors into one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.errors import ClassValidationError, IterableValidationError
from cattrs.gen import make_dict_structure_fn

from ..generation.errors import InvalidRequest
from .json_body import json_type_name

T = TypeVar("T")


class FieldProblem(ValueError):
    """A field's value is wrong. ``where``: path inside the value, ``""`` for itself."""

    def __init__(self, problem: str, where: str = "") -> None:
        super().__init__(problem)
        self.where = where


def structure(cls: type[T], data: dict[str, Any]) -> T:
    """Build ``cls`` from a JSON object. Unknown keys are ignored.

    Raises InvalidRequest naming the first wrong field, as ``messages[1].content``.
    """
    try:
        return converter.structure(data, cls)
    except (ClassValidationError, IterableValidationError) as error:
        path, problem = _first_problem(error, "")
    except FieldProblem as error:
        path, problem = error.where, str(error)
    raise InvalidRequest(f"{path}: {problem}." if path else f"{problem}.", param=path or None)


def refuse_unavailable(data: Mapping[str, Any], harmless: Mapping[str, Sequence[Any]]) -> None:
    """Raise InvalidRequest for a key of ``harmless`` with a value that is none of those there.

    For features that are not available yet: a client that forces one must not get an answer
    without it.
    """
    for name, values in harmless.items():
        value = data.get(name)
        # By type too: 0 == False, and {"top_logprobs": false} is no number.
        if not any(type(value) is type(h) and value == h for h in values):
            raise InvalidRequest(f"{name}: is not available yet; leave it out.", param=name)


@attrs.frozen
class InRange:
    """An attrs validator for optional numbers within closed bounds."""

    low: float | None
    high: float | None = None
    exclusive_low: bool = False

    def __call__(self, _instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None:
            return
        low, high = self.low, self.high
        too_low = low is not None and (value <= low if self.exclusive_low else value < low)
        if too_low or (high is not None and value > high):
            above = f"more than {low}" if self.exclusive_low else f"at least {low}"
            if high is None:
                bounds = above
            elif self.exclusive_low:
                bounds = f"{above} and at most {high}"
            else:
                bounds = f"from {low} to {high}"
            raise FieldProblem(f"must be {bounds}, not {shown_number(value)}", attribute.name)


def in_range(
    low: float | None, high: float | None = None, *, exclusive_low: bool = False
) -> InRange:
    """A validator for optional numbers, whose bounds the server's own description can read."""
    return InRange(low, high, exclusive_low)


def shown_number(value: float) -> str:
    """A number for an error message, short however many digits it has."""
    text = str(value)
    return text if len(text) <= 30 else f"a number of {len(text)} digits"


def _first_problem(error: BaseException, path: str) -> tuple[str, str]:
    """The path and sentence of the first leaf of cattrs' exception tree."""
    if isinstance(error, ClassValidationError):
        located, unlocated = error.group_exceptions()
        if located:
            inner, note = located[0]
            return _first_problem(inner, f"{path}.{note.name}" if path else note.name)
        return _first_problem(unlocated[0], path)
    if isinstance(error, IterableValidationError):
        elements, rest = error.group_exceptions()
        if elements:
            inner, element = elements[0]
            return _first_problem(inner, f"{path}[{element.index}]")
        return _first_problem(rest[0], path)
    if isinstance(error, FieldProblem):
        where = error.where
        if where and path:
            where = path + (where if where[0] in "[." else f".{where}")
        return where or path, str(error)
    if isinstance(error, KeyError):  # cattrs looked for a key that is not there
        return path, "is required"
    return path, str(error)


def _integer(value: Any, _: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldProblem(f"must be an integer, not {_with_value(value)}")
    return value


def _number(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldProblem(f"must be a number, not {json_type_name(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise FieldProblem("is too large a number") from None
    if not math.isfinite(number):
        raise FieldProblem("must be a finite number")
    return number


def _string(value: Any, _: Any) -> str:
    if not isinstance(value, str):
        raise FieldProblem(f"must be a string, not {json_type_name(value)}")
    return value


def _boolean(value: Any, _: Any) -> bool:
    if not isinstance(value, bool):
        raise FieldProblem(f"must be true or false, not {json_type_name(value)}")
    return value


def _with_value(value: Any) -> str:
    return str(value) if isinstance(value, float) else json_type_name(value)


converter = cattrs.Converter(detailed_validation=True)
"""Structures requests; dialects register hooks for their unions here."""
converter.register_structure_hook(int, _integer)
converter.register_structure_hook(float, _number)
converter.register_structure_hook(str, _string)
converter.register_structure_hook(bool, _boolean)


def _strict_tuple(hook_type: Any) -> Callable[[Any, Any], Any]:
    element = hook_type.__args__[0]

    def structure_tuple(value: Any, _: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise FieldProblem(f"must be an array, not {json_type_name(value)}")
        items = []
        for index, item in enumerate(value):
            try:
                items.append(converter.structure(item, element))
            except (ClassValidationError, IterableValidationError, FieldProblem) as error:
                path, problem = _first_problem(error, f"[{index}]")
                raise FieldProblem(problem, path) from None
        return tuple(items)

    return structure_tuple


def _is_homogeneous_tuple(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is tuple and kind.__args__[-1:] == (Ellipsis,)


converter.register_structure_hook_factory(_is_homogeneous_tuple, _strict_tuple)


class _ByFields:
    """The hook of a class that has none of its own: a JSON object, field by field."""

    def __init__(self, cls: Any) -> None:
        self._build = make_dict_structure_fn(cls, converter)

    def __call__(self, value: Any, kind: Any) -> Any:
        if not isinstance(value, dict):
            raise FieldProblem(f"must be an object, not {json_type_name(value)}")
        return self._build(value, kind)


def is_read_by_fields(cls: type) -> bool:
    """Whether a class is read as an object with its fields, by no hook of its own."""
    return isinstance(converter.get_structure_hook(cls), _ByFields)


converter.register_structure_hook_factory(attrs.has, _ByFields)
