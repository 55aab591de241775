"""The Jinja environment of chat templates: sandboxed, complete, and bounded.

A template comes out of a model file, so it is data of strangers. Jinja's immutable sandbox keeps it
from Python's internals and from changing what it is given, and limits ``range``. It does not limit
time or memory: nested loops, recursive macros, ``"x" * 10**9`` or doubling a string fifty times
would hold a thread or the machine. So this environment meters a rendering:

* Every turn of a ``for`` loop, every call, every filter and every expression written looks at a
  deadline. Between two of these a template can do only one operation at a time, on values of
  bounded size.
* Whatever an operator, a filter, a call or a concatenation returns is bounded in size. Operations
  that would build something huge in one step (multiplication, powers, padding, ``replace``,
  ``join``, printf widths) are refused before they start.
* Lists within lists count with all their parts, wherever they occur: a list of twice the same list,
  forty times over, would be small in memory and endless to compare or print.
* All text written is counted, also into macros and ``set`` blocks, the template's own text too.

The bound is therefore the deadline plus one operation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dflash_trio.text.control_tokens import STAND_INS
from dflash_trio.text.render_meter import RenderMeter

# No template can write these names, as they contain a blank.
METER_VARIABLE = "render meter"
_LOOP_FILTER = "metered loop"
_VALUE_FILTER = "metered value"
_NEST_FILTER = "metered nesting"


class TemplateRaised(JinjaError):
    """The template called ``raise_exception``; the message is the template's own."""


class _MeteredIterable:
    """What a loop runs over, looking at the deadline at each turn."""

    __slots__ = ("_meter", "_over")

    def __init__(self, over: Any, meter: RenderMeter) -> None:
        self._over = over
        self._meter = meter

    def __iter__(self) -> Iterator[Any]:
        tick = self._meter.tick
        for item in self._over:
            tick()
            yield item

    def __len__(self) -> int:
        # A TypeError tells Jinja to count by iterating, as it would have without us.
        return len(self._over)


def _meter(context: Context) -> RenderMeter:
    meter = context.parent[METER_VARIABLE]
    assert isinstance(meter, RenderMeter)
    return meter


@pass_context
def _metered_loop(context: Context, over: Any) -> _MeteredIterable:
    iter(over)  # fail here as the plain loop would, with its own words
    return _MeteredIterable(over, _meter(context))


@pass_context
def _metered_value(context: Context, value: Any) -> Any:
    return _meter(context).check(value)


@pass_context
def _metered_nesting(context: Context, value: Any) -> Any:
    _meter(context).measure(value)
    return value


@pass_context
def _write(context: Context, value: Any) -> str:
    return _meter(context).text_of(value)


def _gathered(items: Any, meter: RenderMeter) -> Any:
    """What is to be joined, bounded as it will be as one text."""
    if not isinstance(items, str):
        items = list(items)
        meter.measure(items)
    return items


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def metered(context: Context, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        subject, *rest = args or (None,)
        if name == "join":
            subject = _gathered(subject, meter)
            args = (subject, *rest)
        meter.before(name, subject, [*rest, *kwargs.values()])
        if wants == "context":
            args = (context, *args)
        elif wants == "eval_context":
            args = (context.eval_ctx, *args)
        elif wants == "environment":
            args = (context.environment, *args)
        result = meter.check(function(*args, **kwargs))
        if name == "list":  # of batches, for example
            meter.measure(result)
        return result

    return metered


class _Meters(NodeTransformer):
    """Puts the metering filters into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _filtered(node.iter, _LOOP_FILTER)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _VALUE_FILTER)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _constant(node.items) else _filtered(node, _NEST_FILTER)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        if node.ctx != "load" or _constant(node.items):
            return node
        return _filtered(node, _NEST_FILTER)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        if _constant([pair.value for pair in node.items]):
            return node
        return _filtered(node, _NEST_FILTER)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        # As a constant expression it goes through ``finalize`` and is counted.
        return nodes.Const(node.data, lineno=node.lineno)


def _constant(items: Iterable[nodes.Expr]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``: marks training text, means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates. Renderings need a meter under ``METER_VARIABLE``."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            # Folding constants would run the template's operations while it compiles, unmetered.
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_write,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _metered_filter(name, f) for name, f in self.filters.items()}
        self.filters[_LOOP_FILTER] = _metered_loop
        self.filters[_VALUE_FILTER] = _metered_value
        self.filters[_NEST_FILTER] = _metered_nesting
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]

    def metered(self, tree: nodes.Template) -> nodes.Template:
        """The parsed template with metering in it, to be compiled instead."""
        metered: nodes.Template = _Meters().visit(tree)
        return metered.set_environment(self)  # type: ignore[return-value]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something from within a template."""
        meter = _meter(__context)
        name = getattr(__obj, "__name__", "")
        subject = getattr(__obj, "__self__", None)
        if name == "join" and isinstance(subject, str):
            args = tuple(_gathered(arg, meter) for arg in args)
        meter.before(name, subject, [*args, *kwargs.values()])
        result = meter.check(super().call(__context, __obj, *args, **kwargs))
        if isinstance(result, dict):
            meter.measure(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run one of the operators that can make something large out of little."""
        meter = _meter(context)
        if operator == "*":
            meter.before("*", left, (right,))
            meter.before("*", right, (left,))
        elif operator == "**":
            meter.before("**", left, (right,))
        elif operator == "%" and isinstance(left, str):
            meter.before("%", left, (right,))
        result = meter.check(super().call_binop(context, operator, left, right))
        if operator == "*" and isinstance(result, list | tuple):
            meter.measure(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Keep the string that a wrapped ``format`` belongs to visible to ``call``."""
        wrapper: Any = super().wrap_str_format(value)
        if wrapper is not None:
            wrapper.__self__ = value.__self__
        return wrapper  # type: ignore[no-any-return]


def _raise_exception(message: object = "") -> None:
    raise TemplateRaised(str(message))


def _escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


# Stand-ins are left alone: escaped, they could no longer be turned back.
_to_escape = re.compile(f"[^\\0-\x7f{chr(STAND_INS[0])}-{chr(STAND_INS[1])}]")


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: characters and key order as they are.

    Jinja's own filter escapes what matters in HTML and sorts the keys.
    """
    _meter(context).measure(value)
    text = json.dumps(
        value,
        ensure_ascii=False,
        indent=indent,
        separators=(separators[0], separators[1]) if separators else None,
        sort_keys=sort_keys,
    )
    return _to_escape.sub(_escape, text) if ensure_ascii else text


def words_of(tree: nodes.Template) -> tuple[set[str], set[str]]:
    """The strings a parsed template may compare with, and those it may write.

    The first are its constants and the names of variables, attributes and keyword arguments; the
    second its constants and its literal text.
    """
    spoken: set[str] = set()
    written: set[str] = set()
    for data in tree.find_all(nodes.TemplateData):
        written.add(data.data)
    for const in tree.find_all(nodes.Const):
        if isinstance(const.value, str):
            spoken.add(const.value)
            written.add(const.value)
    spoken.update(node.attr for node in tree.find_all(nodes.Getattr))
    spoken.update(node.name for node in tree.find_all(nodes.Name))
    return spoken, written
