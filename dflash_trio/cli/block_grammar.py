"""The command line's grammar: which block an option belongs to, and which words are its values.

The rules, for a list of words:

- ``--model PATH`` starts a block. Words before the first one, or before and after a bare path,
  belong to the first block; a bare path stands in the first block only, and is its ``--model``.
- A value is the next word or what follows ``=``. A word that begins with ``--`` is never taken as
  a value (its neighbour has lost its own), one with a single dash is: ``--seed -1``.
- Names are whole: an abbreviation is an unknown option. ``--`` has no meaning here.
- An option with many values goes on as long as the next word has the form of one.
- What is given twice in a block is an error, unless the option may be repeated.

Words are first cut into pieces without judging them, because an error names its block, and a
block's name may come behind the mistake. The first mistake in the order of words is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from dflash_trio.cli.errors import refusal, shown
from dflash_trio.cli.given import (
    Block,
    Given,
    ParsedLaunch,
    added,
    block_label,
    check_default_name,
    default_model_name,
    given,
)
from dflash_trio.cli.option import Option, Scope
from dflash_trio.cli.option_table import BY_NAME, REMOVED, nearest
from dflash_trio.cli.values import looks_like_curve_point

_MODEL = BY_NAME["model"]


@frozen
class _Piece:
    """One option with its words, or what is wrong with them."""

    block: int
    option: Option | None = None
    spelling: str = ""
    texts: tuple[str, ...] = ()
    problem: str = ""
    remedy: str = ""


def read_arguments(argv: Sequence[str]) -> ParsedLaunch:
    """Read the words behind the program's name; UsageError says which one is wrong."""
    pieces = list(_cut(argv))
    labels = _labels(pieces)
    launch: dict[str, Given] = {}
    listener: dict[str, Given] = {}
    blocks: list[dict[str, Given]] = [{} for _ in labels]
    for piece in pieces:
        label = labels[piece.block]
        option = piece.option
        if option is None:
            raise refusal(piece.problem, piece.remedy, label)
        if option.scope is Scope.LISTENER and piece.block > 0:
            raise refusal(
                f"{option.flag} belongs to the first block and stands in a later one",
                "move it before the second model",
                label,
            )
        if piece.problem:
            raise refusal(piece.problem, piece.remedy, label if option.scope.per_model else "")
        if option.scope is Scope.LAUNCH:
            values, where = launch, ""
        elif option.scope is Scope.LISTENER:
            values, where = listener, ""
        else:
            values, where = blocks[piece.block], label
        _put(values, given(option, piece.spelling, piece.texts, where))
    # A first block without a path is the listener's options alone, or a launch without a model.
    if not blocks[0]:
        blocks = []
    found = tuple(Block(position, values) for position, values in enumerate(blocks))
    for block in found:
        if "model" in block.values:
            check_default_name(block)
    return ParsedLaunch(launch, listener, found)


def _put(values: dict[str, Given], new: Given) -> None:
    earlier = values.get(new.option.name)
    if earlier is None:
        values[new.option.name] = new
    elif new.option.repeatable:
        values[new.option.name] = added(earlier, new)
    else:
        raise new.refused("is given twice", "keep one")


def _labels(pieces: Sequence[_Piece]) -> list[str]:
    """Each block's label, read from words that may still turn out to be wrong."""
    names = [""] * (1 + max((piece.block for piece in pieces), default=0))
    for wanted in ("model", "model-name"):
        for piece in pieces:
            if piece.option is not None and piece.option.name == wanted and piece.texts:
                text = piece.texts[0]
                name = default_model_name(text) if wanted == "model" else text
                names[piece.block] = name
    return [block_label(position, name) for position, name in enumerate(names)]


def _cut(argv: Sequence[str]) -> Iterator[_Piece]:
    block = 0
    has_path = False
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("-"):
            yield _bare_path(word, block, has_path)
            has_path = True
            continue
        flag, equals, attached = word.partition("=")
        option = BY_NAME.get(flag[2:]) if flag.startswith("--") else None
        if option is None:
            # Whatever follows is more likely this option's value than a model's path.
            if not equals and position < len(argv) and not argv[position].startswith("-"):
                position += 1
            yield _unknown(flag, block)
            continue
        if option is _MODEL:
            block += has_path
            has_path = True
        if option.takes is None:
            yield _flag(option, block, bool(equals))
            continue
        if equals:
            texts = [attached]
        elif position < len(argv) and not argv[position].startswith("--"):
            texts = [argv[position]]
            position += 1
        else:
            yield _without_value(option, block, argv[position : position + 1])
            continue
        if option.many_values:
            while position < len(argv) and looks_like_curve_point(argv[position]):
                texts.append(argv[position])
                position += 1
        yield _Piece(block, option, option.flag, tuple(texts))


def _bare_path(word: str, block: int, has_path: bool) -> _Piece:
    if block == 0 and not has_path:
        return _Piece(block, _MODEL, "the model's path", (word,))
    problem = (
        f"{shown(word)} stands alone in a later block"
        if block
        else f"{shown(word)} is a second path in the first block"
    )
    return _Piece(block, problem=problem, remedy="write --model PATH to start another block")


def _flag(option: Option, block: int, has_value: bool) -> _Piece:
    if not has_value:
        return _Piece(block, option, option.flag)
    return _Piece(
        block, option, problem=f"{option.flag} takes no value", remedy=f"write {option.flag} alone"
    )


def _without_value(option: Option, block: int, following: Sequence[str]) -> _Piece:
    remedy = f"write {option.usage}"
    if following:
        remedy += f", or {option.flag}=VALUE for a value that begins with two dashes"
    return _Piece(block, option, problem=f"{option.flag} has no value", remedy=remedy)


def _unknown(flag: str, block: int) -> _Piece:
    name = flag.lstrip("-")
    if flag.startswith("--") and name in REMOVED:
        return _Piece(block, problem=f"{flag} does not exist any more", remedy=REMOVED[name])
    if not name:
        return _Piece(
            block,
            problem=f"{flag} alone means nothing here",
            remedy="write a path that begins with a dash as ./-PATH",
        )
    guess = nearest(name, BY_NAME)
    remedy = f"did you mean --{guess}?" if guess else "see --help for the options"
    return _Piece(block, problem=f"{shown(flag)} is no option", remedy=remedy)
