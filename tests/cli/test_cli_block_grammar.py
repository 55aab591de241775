"""Which words belong together, and to which block."""

from __future__ import annotations

import pytest

from dflash_trio.cli.block_grammar import read_arguments
from dflash_trio.cli.option import Option
from dflash_trio.cli.option_table import BY_NAME, OPTIONS
from tests.cli.cli_cases import (
    LAUNCH,
    LISTENER,
    OUT_OF_RANGE,
    PER_MODEL,
    good_value,
    parse,
    refusal_of,
)

WITH_VALUE = [option for option in OPTIONS if option.takes is not None]
NOT_MODEL = [option for option in OPTIONS if option.name not in ("model", "help", "version")]
TAKES_ONCE = [option for option in NOT_MODEL if not option.repeatable]


def by_name(option: Option) -> str:
    return option.name


def test_model_options_belong_to_the_model_before_them() -> None:
    launch = parse(
        "--load-balancing --model a.gguf --max-ctx 10 --model b.gguf --max-ctx 20 --model c.gguf"
    )
    assert [(model.name, model.max_ctx) for model in launch.config.models] == [
        ("a", 10),
        ("b", 20),
        ("c", None),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "--max-ctx 10 --port 9 --model a.gguf --threads 2",
        "--max-ctx 10 a.gguf --port 9 --threads 2",
        "a.gguf --max-ctx=10 --port=9 --threads=2",
        "--max-ctx 10 --port 9 --threads 2 a.gguf",
        "--threads 2 --no-cors a.gguf --max-ctx 10 --port 9",
    ],
)
def test_the_first_block_begins_before_its_path(line: str) -> None:
    launch = parse(line)
    (model,) = launch.config.models
    assert (model.path, model.max_ctx, model.threads) == ("a.gguf", 10, 2)
    assert launch.config.listener.port == 9


def test_a_model_behind_a_bare_path_is_the_second_one() -> None:
    launch = parse("--load-balancing --max-ctx 3 a.gguf --model b.gguf --max-ctx 2")
    assert [(model.path, model.max_ctx) for model in launch.config.models] == [
        ("a.gguf", 3),
        ("b.gguf", 2),
    ]


def test_a_second_bare_path_is_refused() -> None:
    message = refusal_of("a.gguf b.gguf")
    assert "b.gguf is a second path in the first block" in message
    assert "--model PATH" in message
    assert "b.gguf is a second path" in refusal_of("--model a.gguf b.gguf")


def test_a_bare_path_in_a_later_block_is_refused_naming_the_block() -> None:
    message = refusal_of("a.gguf --model b.gguf --model-name second c.gguf")
    assert "c.gguf stands alone in a later block (model block 2 (second))" in message


@pytest.mark.parametrize("option", LISTENER, ids=by_name)
def test_a_listener_option_in_a_later_block_is_refused_naming_the_block(option: Option) -> None:
    words = ["a.gguf", "--model", "b.gguf", option.flag, *good_value(option)]
    message = refusal_of([*words, "--model-name", "ds4"])
    assert message.startswith(f"{option.flag} belongs to the first block ")
    assert "(model block 2 (ds4)): move it" in message


@pytest.mark.parametrize("option", LAUNCH, ids=by_name)
def test_a_launch_option_stands_in_any_block(option: Option) -> None:
    words = ["a.gguf", "--model", "b.gguf"]
    if option.name not in ("help", "version"):
        read_arguments([*words, option.flag, *good_value(option)])
        read_arguments([option.flag, *good_value(option), *words])


@pytest.mark.parametrize("option", TAKES_ONCE, ids=by_name)
def test_what_is_given_twice_in_a_block_is_refused(option: Option) -> None:
    once = [option.flag, *good_value(option)]
    message = refusal_of(["a.gguf", *once, *once])
    assert message.startswith(f"{option.flag} is given twice")
    assert ("(model block 1 (" in message) == option.scope.per_model


def test_the_same_option_may_stand_once_in_each_block() -> None:
    parse("--load-balancing a.gguf --max-ctx 5 --model b.gguf --max-ctx 5")


def test_a_launch_option_given_in_two_blocks_is_given_twice() -> None:
    message = refusal_of("--log-level info a.gguf --model b.gguf --log-level info")
    assert message == "--log-level is given twice: keep one"


def test_repeatable_options_add_up_in_order() -> None:
    launch = parse("a.gguf --alias x --api-key k1 --alias=y --api-key=k2 --api-key k1")
    assert launch.config.models[0].aliases == ("x", "y")
    assert launch.config.listener.api_keys == (b"k1", b"k2")


@pytest.mark.parametrize("option", WITH_VALUE, ids=by_name)
def test_an_option_without_its_value_is_refused(option: Option) -> None:
    assert refusal_of(["a.gguf", option.flag]).startswith(f"{option.flag} has no value")
    message = refusal_of(["a.gguf", option.flag, "--load-balancing"])
    assert message.startswith(f"{option.flag} has no value")
    assert f"{option.flag}=VALUE" in message


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.takes is None], ids=by_name
)
@pytest.mark.parametrize("value", ["", "true", "1"])
def test_a_flag_takes_no_value(option: Option, value: str) -> None:
    message = refusal_of(["a.gguf", f"{option.flag}={value}"])
    assert message.startswith(f"{option.flag} takes no value")


@pytest.mark.parametrize("option", WITH_VALUE, ids=by_name)
def test_a_value_may_follow_an_equals_sign(option: Option) -> None:
    (value,) = good_value(option)
    apart = read_arguments([option.flag, value])
    joined = read_arguments([f"{option.flag}={value}"])
    assert joined == apart


def test_only_the_first_equals_sign_divides() -> None:
    assert parse("--model=a=b.gguf").config.models[0].path == "a=b.gguf"


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused_with_its_range(name: str) -> None:
    option = BY_NAME[name]
    for text in OUT_OF_RANGE[name]:
        for words in ([option.flag, text], [f"{option.flag}={text}"]):
            message = refusal_of(["a.gguf", *words])
            assert message.startswith(f"{option.flag} {text} is "), message
            assert option.takes is not None
            assert message.endswith(f"write {option.takes.form}")


@pytest.mark.parametrize("name", OUT_OF_RANGE)
@pytest.mark.parametrize("text", ["", "x", "1_0", " 1", "1 ", "0x10", "--1", "\u0663", "9" * 5000])
def test_what_is_no_plain_number_is_refused(name: str, text: str) -> None:
    assert f"--{name}" in refusal_of(["a.gguf", f"--{name}={text}"])


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused_on_an_unused_block_too(name: str) -> None:
    if BY_NAME[name].scope.per_model:
        for text in OUT_OF_RANGE[name]:
            message = refusal_of(["a.gguf", "--model", "b.gguf", f"--{name}", text])
            assert "(model block 2 (b))" in message


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--max-ct", "--max-ctx"),
        ("--max-context", "--max-ctx"),
        ("--max_ctx", "--max-ctx"),
        ("--MAX-CTX", "--max-ctx"),
        ("-max-ctx", "--max-ctx"),
        ("--prot", "--port"),
        ("--load-balance", "--load-balancing"),
        ("--api-keys", "--api-key"),
        ("-h", "--help"),
        ("--hel", "--help"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_spelling(typed: str, meant: str) -> None:
    message = refusal_of(["a.gguf", typed, "5"])
    assert message == f"{typed} is no option (model block 1 (a)): did you mean {meant}?"


@pytest.mark.parametrize("option", OPTIONS, ids=by_name)
def test_abbreviations_are_refused(option: Option) -> None:
    short = option.flag[:-1]
    if short[2:] not in BY_NAME:
        assert f"{short} is no option" in refusal_of(["a.gguf", short])


def test_an_unknown_option_keeps_its_value_to_itself() -> None:
    assert "hunter2" not in refusal_of("a.gguf --api-kee=hunter2")
    assert "hunter2" not in refusal_of("--api-kee hunter2 a.gguf")


def test_an_endless_unknown_option_is_refused_at_once() -> None:
    assert len(refusal_of(["--" + "x" * 1_000_000])) < 300


@pytest.mark.parametrize(
    ("removed", "new"),
    [
        ("--primary-gpu", "--load-balancing-primary-gpu"),
        ("--load-balancing-next-model", "--model"),
        ("--next-model", "--model"),
    ],
)
def test_removed_spellings_name_the_new_one(removed: str, new: str) -> None:
    for words in ([removed, "hip:0"], [f"{removed}=hip:0"], [removed]):
        message = refusal_of(["a.gguf", *words])
        assert message.startswith(f"{removed} does not exist any more")
        assert f"write {new} " in message


@pytest.mark.parametrize("word", ["--", "-"])
def test_bare_dashes_are_refused(word: str) -> None:
    message = refusal_of(["--max-ctx", "5", word, "a.gguf"])
    assert message.startswith(f"{word} alone means nothing here")


def test_a_curve_takes_as_many_points_as_follow() -> None:
    parsed = read_arguments(
        ["--prefill-curve", "1000:0.5", "2000:0.25", "9000:.1", "a.gguf", "--port", "1"]
    )
    assert parsed.blocks[0].values["prefill-curve"].value == (
        (1000, 0.5),
        (2000, 0.25),
        (9000, 0.1),
    )
    assert parsed.blocks[0].path == "a.gguf"


@pytest.mark.parametrize(
    "points", ["1000", "a:b", "1000:0", "1000:1.5", "-1:0.5", "5:0.5 5:0.4", "9:0.5 8:0.4", "1:nan"]
)
def test_a_curve_out_of_form_is_refused(points: str) -> None:
    assert refusal_of(f"--prefill-curve {points} --model a.gguf").startswith("--prefill-curve ")


def test_the_first_mistake_is_the_one_reported() -> None:
    assert refusal_of("a.gguf --max-ctx 0 --bogus").startswith("--max-ctx 0 ")
    assert refusal_of("a.gguf --bogus --max-ctx 0").startswith("--bogus ")


def test_an_error_names_a_block_by_the_name_that_follows_it() -> None:
    message = refusal_of("a.gguf --model b.gguf --max-ctx 0 --model-name 'deep seek'")
    assert "(model block 2 (deep seek))" in message


@pytest.mark.parametrize("option", PER_MODEL, ids=by_name)
def test_model_options_are_read_on_unused_blocks(option: Option) -> None:
    if option.name == "model":
        return
    launch = parse(f"a.gguf --model b.gguf {option.flag} {' '.join(good_value(option))}")
    assert [model.name for model in launch.config.models] == ["a"]
    assert len(launch.warnings) == 1
    assert "model block 2 (" in launch.warnings[0]
