"""A model card gives a model's defaults in the options' words, and names its own mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_trio.cli.errors import printable
from dflash_trio.cli.model_card import SECTIONS, card_beside
from dflash_trio.cli.option_table import BY_NAME
from dflash_trio.config import ModelCard, SamplingDefaults
from tests.cli.cli_cases import OUT_OF_RANGE, good_value, parse, refusal_of

# Those that are options.
KEYS = [(section, key) for section, keys in SECTIONS.items() for key in keys if key in BY_NAME]

WHOLE = """
[sampling]
temperature = 1
top-p = 0.9
top-k = 0
min-p = 0.1
repeat-penalty = 1.5
seed = 7
[limits]
default-max-tokens = 100
hard-limit-reply-budget = 0
think-max-tokens = 50
[reasoning]
thinking = "on"
reasoning-effort-low = 0
reasoning-effort-x-high = 40
[tools]
tool-parser = "qwen-xml"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def card_of(line: str) -> ModelCard | None:
    (model,) = parse(line).config.models
    return model.card


def refusal_in(folder: Path, text: str) -> str:
    (folder / "m.card.toml").write_text(text)
    return refusal_of("m.gguf")


def toml_of(key: str) -> str:
    option = BY_NAME[key]
    (word,) = good_value(option)
    assert option.takes is not None
    return word if int in option.takes.toml else f'"{word}"'


# Which file


def test_the_named_card_is_read(folder: Path) -> None:
    (folder / "mine").write_text("[sampling]\ntop-k = 3")
    (folder / "m.card.toml").write_text("[sampling]\ntop-k = 4")
    card = card_of("m.gguf --model-card mine")
    assert card is not None
    assert (card.path, card.sampling.top_k) == ("mine", 3)


@pytest.mark.parametrize(
    ("model", "card"),
    [
        ("m.gguf", "m.card.toml"),
        ("/a/b.Q4_K_M.gguf", "/a/b.Q4_K_M.card.toml"),
        ("./a/big-00001-of-00003.gguf", "./a/big-00001-of-00003.card.toml"),
        ("model", "model.card.toml"),
    ],
)
def test_the_card_beside_a_model_is_named_like_its_file(model: str, card: str) -> None:
    assert card_beside(model) == card


def test_the_card_beside_the_model_is_read_without_being_named(folder: Path) -> None:
    (folder / "m.card.toml").write_text("[sampling]\ntop-k = 4")
    card = card_of("m.gguf --model-name other")
    assert card is not None
    assert (card.path, card.sampling.top_k) == ("m.card.toml", 4)


@pytest.mark.parametrize("model", ["m.gguf", "nowhere/m.gguf", "file/m.gguf", "x" * 250])
def test_no_card_beside_the_model_is_no_error(folder: Path, model: str) -> None:
    (folder / "file").touch()
    assert card_of(f"{model} --model-name m") is None


def test_a_named_card_that_is_missing_is_refused() -> None:
    message = refusal_of("m.gguf --model-card none.toml")
    assert message.startswith("--model-card none.toml does not exist (model block 1 (m))")


def test_a_card_beside_the_model_that_cannot_be_read_is_refused(folder: Path) -> None:
    path = folder / "m.card.toml"
    path.symlink_to("nowhere")
    assert "the model card m.card.toml does not exist (model block 1 (m))" in refusal_of("m.gguf")
    path.unlink()
    path.mkdir()
    assert "the model card m.card.toml is a directory" in refusal_of("m.gguf")
    path.rmdir()
    os.mkfifo(path)
    assert "the model card m.card.toml is no regular file" in refusal_of("m.gguf")


def test_the_cards_of_unused_blocks_are_not_opened(folder: Path) -> None:
    (folder / "b.card.toml").write_text("nonsense")
    parse("a.gguf --model b.gguf")
    parse("a.gguf --model c.gguf --model-card none")
    message = refusal_of("--load-balancing a.gguf --model b.gguf")
    assert "b.card.toml" in message
    assert "model block 2 (b)" in message


def test_each_loaded_block_has_its_own_card(folder: Path) -> None:
    (folder / "b.card.toml").write_text("[sampling]\ntop-k = 4")
    models = parse("--load-balancing a.gguf --model b.gguf").config.models
    assert [model.card and model.card.path for model in models] == [None, "b.card.toml"]


def test_a_configuration_file_names_cards_too(folder: Path) -> None:
    (folder / "launch.toml").write_text('[[model]]\nmodel = "m.gguf"\nmodel-card = "none"')
    message = refusal_of("--config launch.toml")
    assert message.startswith("model-card none does not exist (model block 1 (m), [[model]] of ")


# What it says


def test_everything_that_a_card_says_arrives(folder: Path) -> None:
    (folder / "m.card.toml").write_text(WHOLE)
    card = card_of("m.gguf")
    assert card == ModelCard(
        path="m.card.toml",
        sampling=SamplingDefaults(1.0, 0.9, 0, 0.1, 1.5, 7),
        default_max_tokens=100,
        hard_limit_reply_budget=0,
        think_max_tokens=50,
        reasoning_efforts={"low": 0, "x-high": 40},
        thinking="on",
        tool_parser="qwen-xml",
        given=frozenset(
            {
                *("sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.min_p"),
                *("sampling.repeat_penalty", "sampling.seed", "default_max_tokens"),
                *("hard_limit_reply_budget", "think_max_tokens", "reasoning_efforts.low"),
                *("reasoning_efforts.x-high", "thinking", "tool_parser"),
            }
        ),
    )


def test_a_card_changes_nothing_that_was_given(folder: Path) -> None:
    (folder / "m.card.toml").write_text(WHOLE)
    (model,) = parse("m.gguf --top-k 9 --thinking auto").config.models
    assert (model.sampling.top_k, model.thinking) == (9, "auto")
    assert model.given == {"sampling.top_k", "thinking"}
    assert model.default_max_tokens is None


@pytest.mark.parametrize("text", ["", "# nothing", "[sampling]", "[limits]\n[tools]"])
def test_a_card_may_leave_everything_out(folder: Path, text: str) -> None:
    (folder / "m.card.toml").write_text(text)
    assert card_of("m.gguf") == ModelCard("m.card.toml")


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_every_key_is_an_option_and_says_what_the_option_says(
    folder: Path, section: str, key: str
) -> None:
    (folder / "m.card.toml").write_text(f"[{section}]\n{key} = {toml_of(key)}")
    card = card_of("m.gguf")
    (model,) = parse(f"x.gguf {BY_NAME[key].flag} {good_value(BY_NAME[key])[0]}").config.models
    assert card is not None
    assert card.given == model.given
    for name in ("sampling", "reasoning_efforts"):
        assert getattr(card, name) == getattr(model, name)
    name = BY_NAME[key].field
    if "." not in name:
        assert getattr(card, name) == getattr(model, name)


# Mistakes


@pytest.mark.parametrize(
    ("section", "key", "text"),
    [
        (section, key, text)
        for section, key in KEYS
        for text in OUT_OF_RANGE.get(key, ())
        if text not in ("nan", "inf", "-inf", "1e999")
    ],
)
def test_a_number_out_of_range_is_refused_naming_file_key_and_block(
    folder: Path, section: str, key: str, text: str
) -> None:
    message = refusal_in(folder, f"[{section}]\n{key} = {text}")
    place = f"([{section}] of m.card.toml, model block 1 (m))"
    assert message.startswith(f"{key} {text} is out of range {place}: write ")


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("[sampling]\ntemperature = nan", "temperature nan is not a finite number ([sampling] of"),
        ('[sampling]\ntemperature = "1"', "temperature is a string ([sampling] of"),
        ("[sampling]\ntop-k = true", "top-k is true or false ([sampling] of"),
        ("[sampling]\ntop-k = 1.0", "top-k is a float ([sampling] of"),
        ("[sampling]\ntop-k = [1]", "top-k is an array ([sampling] of"),
        ("[limits]\ndefault-max-tokens = 2020-01-01", "default-max-tokens is a date or time"),
        ("[reasoning]\nthinking = true", "thinking is true or false ([reasoning] of"),
        ('[reasoning]\nthinking = "yes"', "thinking yes is not a value of this option"),
        ('[tools]\ntool-parser = "xml"', "tool-parser xml is not a value of this option"),
        ("[sampling]\ntop_p = 1", "top_p is no key of a model card ([sampling] of"),
        ("[limits]\ntop-p = 1", "top-p has no place here ([limits] of"),
        ("top-p = 1", "top-p has no place here (top level of m.card.toml, model"),
        ("[limits]\nmax-ctx = 1", "max-ctx does not belong into a model card ([limits] of"),
        ("max-ctx = 1", "max-ctx does not belong into a model card (top level of"),
        ("[samplings]", "samplings is no section of a model card (m.card.toml, model block"),
        ("xyz = 1", "xyz is no section of a model card (m.card.toml, model block 1 (m))"),
        ("sampling = 1", "sampling is no table (m.card.toml, model block 1 (m)): write it as ["),
        ("[[sampling]]", "sampling is no table (m.card.toml, model block 1 (m))"),
        ("[sampling]\ntop-k = 1\ntop-k = 2", "model card m.card.toml is not TOML, "),
        ("[sampling\n", "model card m.card.toml is not TOML, "),
        ("[sampling]\nseed = " + "9" * 5000, "model card m.card.toml cannot be read as TOML"),
        ("[sampling]\nseed = 0x" + "f" * 5000, "seed 1000000000000000000000000000000 is out of"),
        ("[sampling]\nx = " + "[" * 5000, "model card m.card.toml cannot be read as TOML"),
        ('[sampling]\n"a\\nb" = 1', "'a\\nb' is no key of a model card"),
    ],
)
def test_a_mistake_is_named_with_its_place(folder: Path, text: str, start: str) -> None:
    message = refusal_in(folder, text)
    assert message.startswith(printable(start))
    assert "m.card.toml" in message
    assert "model block 1 (m)" in message


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("[sampling]\ntop_p = 1", "did you mean top-p?"),
        ("[limits]\nmax-tokens = 1", "did you mean default-max-tokens?"),
        ("[limits]\ntop-p = 1", "put it into [sampling]"),
        ("[limits]\nmax-ctx = 1", "give it as --max-ctx"),
        ("[samplings]", "did you mean [sampling]?"),
        ("[xyz]", "a card has [sampling], [limits], [reasoning], [tools], [chat]"),
    ],
)
def test_a_mistake_comes_with_what_was_meant(folder: Path, text: str, remedy: str) -> None:
    assert refusal_in(folder, text).endswith(remedy)


def test_a_card_that_is_not_utf_8_is_refused_with_its_line(folder: Path) -> None:
    (folder / "m.card.toml").write_bytes(b"[tools]\n# \xff")
    message = refusal_of("m.gguf")
    assert message.startswith("model card m.card.toml is not UTF-8 at line 2 (model block 1 (m))")


# What is no option


def test_turn_ends_are_strings_that_end_an_answer(folder: Path) -> None:
    (folder / "m.card.toml").write_text('[chat]\nturn-ends = ["\\nUser:", "###"]')
    card = card_of("m.gguf")
    assert card is not None
    assert card.turn_ends == ("\nUser:", "###")


@pytest.mark.parametrize("ends", ['"x"', "5", '[""]', "[1]", str([str(n) for n in range(17)])])
def test_turn_ends_that_are_none_are_refused_by_key_and_block(folder: Path, ends: str) -> None:
    refusal = refusal_in(folder, f"[chat]\nturn-ends = {ends}")
    assert "turn-ends" in refusal
    assert "model block 1" in refusal


def test_nothing_else_is_said_of_chat(folder: Path) -> None:
    assert "turn-end" in refusal_in(folder, '[chat]\nturn-end = ["x"]')
