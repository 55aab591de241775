"""llama.cpp's grammars (GBNF) as grammars of llguidance.

GBNF is made of characters. llguidance reads lexemes, and takes the longest: with the lexeme "ab"
anywhere in the grammar, the text "aby" is no longer an "a", a "b" and a "y". So a grammar without
recursion becomes one expression, and in any other one every lexeme is a single character.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attrs import frozen

from .bad_constraint import BadConstraint, quoted
from .patterns import MAX_REPEAT

MAX_EXPRESSION = 50_000
"""A grammar without recursion that is longer as one expression is handled like one with it."""
_MAX_GROUPS = 60


@frozen
class Chars:
    """One character. ``pattern`` is an expression that matches it."""

    pattern: str


@frozen
class Ref:
    name: str


@frozen
class Sequence:
    items: tuple[Node, ...]


@frozen
class Choice:
    options: tuple[Node, ...]


@frozen
class Repeat:
    item: Node
    least: int
    most: int | None


Node: TypeAlias = Chars | Ref | Sequence | Choice | Repeat
Rules: TypeAlias = Mapping[str, Node]


def gbnf_to_lark(text: str) -> str:
    """A Lark grammar of the same texts. Raises BadConstraint for a broken one."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise BadConstraint("the grammar has no rule named root")
    for name, body in rules.items():
        for ref in _refs(body):
            if ref not in rules:
                raise BadConstraint(f"the grammar's rule {quoted(name)} uses {quoted(ref)}, "
                                    "which is not defined")  # fmt: skip
    if "root" not in _ending(rules):
        raise BadConstraint("the grammar accepts no finite text")
    order = _order(rules)
    if order is not None:
        expression = _as_expression(rules, order)
        if expression is not None:
            return f"start: /{expression}/\n" if expression else 'start: ""\n'
    names = {name: f"r{index}" for index, name in enumerate(rules)} | {"root": "start"}
    return "".join(f"{names[name]}: {_lark(body, names)}\n" for name, body in rules.items())


def _refs(node: Node) -> list[str]:
    match node:
        case Ref(name):
            return [name]
        case Sequence(items) | Choice(items):
            return [ref for item in items for ref in _refs(item)]
        case Repeat(item):
            return _refs(item)
        case _:
            return []


def _ending(rules: Rules) -> set[str]:
    """The rules that some finite text fulfils."""

    def ends(node: Node) -> bool:
        match node:
            case Ref(name):
                return name in found
            case Sequence(items):
                return all(map(ends, items))
            case Choice(options):
                return any(map(ends, options))
            case Repeat(item, least):
                return least == 0 or ends(item)
            case _:
                return True

    found: set[str] = set()
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, body in rules.items():
        for ref in _refs(body):
            users[ref].add(name)
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in found and ends(rules[name]):
            found.add(name)
            todo += users[name]
    return found


def _order(rules: Rules) -> list[str] | None:
    """The rules that root needs, those used before their users; ``None`` with recursion."""
    order: dict[str, None] = {}
    entered = {"root"}
    stack = [("root", iter(_refs(rules["root"])))]
    while stack:
        name, refs = stack[-1]
        for ref in refs:
            if ref in entered:
                if ref not in order:
                    return None
                continue
            entered.add(ref)
            stack.append((ref, iter(_refs(rules[ref]))))
            break
        else:
            order[name] = None
            stack.pop()
    return list(order)


def _as_expression(rules: Rules, order: list[str]) -> str | None:
    """Root with everything that it uses filled in; ``None`` if that is too long."""
    done: dict[str, str] = {}

    def write(node: Node) -> str:
        match node:
            case Chars(pattern):
                return pattern
            case Ref(name):
                return done[name]
            case Sequence(items):
                return "".join(map(write, items))
            case Choice(options):
                return f"(?:{'|'.join(map(write, options))})"
            case Repeat(item, least, most):
                return f"(?:{write(item)}){{{least},{'' if most is None else most}}}"

    def size(node: Node) -> int:
        match node:
            case Chars(pattern):
                return len(pattern)
            case Ref(name):
                return len(done[name])
            case Sequence(items) | Choice(items):
                return sum(map(size, items)) + len(items) + 4
            case Repeat(item):
                return size(item) + 20

    for name in order:
        if size(rules[name]) > MAX_EXPRESSION:
            return None
        done[name] = write(rules[name])
    return done["root"]


def _lark(node: Node, names: Mapping[str, str]) -> str:
    match node:
        case Chars(pattern):
            return f"/{pattern}/"
        case Ref(name):
            return names[name]
        case Sequence(items):
            return " ".join(_lark(item, names) for item in items) or '""'
        case Choice(options):
            return f"({' | '.join(_lark(option, names) for option in options)})"
        case Repeat(item, least, most):
            if most == 0:
                return '""'
            return f"({_lark(item, names)}){{{least},{'' if most is None else most}}}"


def _character(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:x}}}"


class _Parser:
    """One pass over a grammar's text."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n").replace("\r", "\n")
        self._at = 0
        self._open = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._space(lines=True)
        while self._peek():
            name = self._name()
            self._space()
            if not self._take("::="):
                raise self._error("expected ::=")
            self._space(lines=True)
            if name in rules:
                raise self._error(f"the rule {quoted(name)} is defined twice")
            rules[name] = self._choice()
            if self._peek() not in ("", "\n"):
                raise self._error("expected the end of the rule")
            self._space(lines=True)
        return rules

    def _error(self, what: str) -> BadConstraint:
        line = self._text.count("\n", 0, self._at) + 1
        near = self._text[self._at : self._at + 20]
        where = f"before {quoted(near)}" if near else "at its end"
        return BadConstraint(f"the grammar cannot be read: {what}, line {line} {where}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, literal: str) -> bool:
        found = self._text.startswith(literal, self._at)
        if found:
            self._at += len(literal)
        return found

    def _space(self, *, lines: bool = False) -> None:
        while char := self._peek():
            if char == "#":
                end = self._text.find("\n", self._at)
                self._at = end if end >= 0 else len(self._text)
            elif char in " \t" or (lines and char == "\n"):
                self._at += 1
            else:
                return

    def _name(self) -> str:
        start = self._at
        while (char := self._peek()) and char.isascii() and (char.isalnum() or char in "-_"):
            self._at += 1
        if self._at == start:
            raise self._error("expected a rule's name")
        return self._text[start : self._at]

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._bar():
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _bar(self) -> bool:
        """Over a bar, which may also stand at the beginning of a further line."""
        here = self._at
        self._space(lines=True)
        if self._take("|"):
            self._space(lines=True)
            return True
        self._at = here
        return False

    def _sequence(self) -> Node:
        items: list[Node] = []
        repeated = False
        while True:
            self._space(lines=self._open > 0)
            char = self._peek()
            if repeated and char and char in "*+?{":
                raise self._error("a repetition of a repetition needs parentheses")
            repeated = False
            if char == '"':
                items.append(self._literal())
            elif char == "[":
                items.append(self._class())
            elif char == "(":
                items.append(self._group())
            elif char == ".":
                self._at += 1
                items.append(Chars("(?s:.)"))
            elif char in ("<", "!"):
                raise self._error("tokens in a grammar are not supported")
            elif char and char.isascii() and (char.isalnum() or char in "-_"):
                items.append(Ref(self._name()))
            elif items and char and char in "*+?{":
                items[-1] = self._repeated(items[-1])
                repeated = True
            else:
                return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _group(self) -> Node:
        self._at += 1
        self._open += 1
        if self._open > _MAX_GROUPS:
            raise self._error(f"groups are nested more than {_MAX_GROUPS} deep")
        inner = self._choice()
        self._space(lines=True)
        self._open -= 1
        if not self._take(")"):
            raise self._error("expected )")
        return inner

    def _repeated(self, item: Node) -> Node:
        mark = self._peek()
        self._at += 1
        if mark != "{":
            return Repeat(item, int(mark == "+"), 1 if mark == "?" else None)
        least = self._number()
        most: int | None = least
        if self._take(","):
            self._space(lines=True)
            most = self._number() if self._peek().isdigit() else None
        if not self._take("}"):
            raise self._error("expected }")
        if most is not None and most < least:
            raise self._error("a repetition ends below its beginning")
        return Repeat(item, least, most)

    def _number(self) -> int:
        self._space(lines=True)
        start = self._at
        while (char := self._peek()) and char in "0123456789":
            self._at += 1
        digits = self._text[start : self._at]
        if not digits or len(digits) > 7 or int(digits) > MAX_REPEAT:
            raise self._error(f"expected a count of at most {MAX_REPEAT}")
        self._space(lines=True)
        return int(digits)

    def _literal(self) -> Node:
        self._at += 1
        items: list[Node] = []
        while not self._take('"'):
            items.append(Chars(_character(self._code())))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _class(self) -> Node:
        self._at += 1
        pattern = "[^" if self._take("^") else "["
        if self._peek() == "]":
            raise self._error("a class of characters is empty")
        while not self._take("]"):
            first = last = self._code()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._code()
            if last < first:
                raise self._error("a range of characters ends below its beginning")
            pattern += _character(first) + (f"-{_character(last)}" if last > first else "")
        return Chars(pattern + "]")

    def _code(self) -> int:
        """The code point of one character, written out or escaped."""
        char = self._peek()
        if not char:
            raise self._error("unexpected end")
        self._at += 1
        code = ord(char)
        if char == "\\":
            kind = self._peek()
            self._at += 1
            if kind and kind in 'nrt"\\[]':
                code = ord({"n": "\n", "r": "\r", "t": "\t"}.get(kind, kind))
            elif kind and kind in "xuU":
                size = {"x": 2, "u": 4, "U": 8}[kind]
                digits = self._text[self._at : self._at + size]
                if len(digits) < size or set(digits) - set("0123456789abcdefABCDEF"):
                    raise self._error(f"expected {size} hexadecimal digits")
                self._at += size
                code = int(digits, 16)
            else:
                raise self._error("unknown escape")
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error("this is no character")
        return code
