"""A configuration file says what the command line says, and names its own mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trio.cli.config_file import read_config_file
from dflash_trio.cli.option import Option, Scope
from tests.cli.cli_cases import LISTENER, PER_MODEL, UNAVAILABLE, good_value, parse, refusal_of


def by_name(option: Option) -> str:
    return option.name


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "dflash.toml"


def refusal_in(file: Path, text: str, more: str = "") -> str:
    file.write_text(text)
    return refusal_of(f"--config {file} {more}")


def toml_of(option: Option) -> str:
    words = good_value(option)
    if not words:
        return "true"
    if option.is_list:
        return f'["{words[0]}"]'
    assert option.takes is not None
    quoted = str in option.takes.toml
    return f'"{words[0]}"' if quoted else words[0]


def test_a_file_gives_the_same_configuration_as_the_command_line(file: Path) -> None:
    file.write_text(
        """
        load-balancing = true
        load-balancing-primary-gpu = "hip:1"
        log-level = "debug"
        [listener]
        port = 9
        api-key = ["k1", "k2"]
        drain-timeout = 3
        no-cors = true
        [[model]]
        model = "a.gguf"
        alias = ["x", "y"]
        mlock = true
        no-mmap = false
        temperature = 1
        seed = -1
        [[model]]
        model = "b.gguf"
        model-name = "bee"
        target-device = "hip:1"
        rope-freq-base = 1e6
        """
    )
    from_file = parse(f"--config {file}")
    from_line = parse(
        """--load-balancing --load-balancing-primary-gpu hip:1 --log-level debug --port 9
        --api-key k1 --api-key k2 --drain-timeout 3 --no-cors
        --model a.gguf --alias x --alias y --mlock --temperature 1 --seed -1
        --model b.gguf --model-name bee --target-device hip:1 --rope-freq-base 1e6"""
    )
    assert from_file == from_line


@pytest.mark.parametrize("option", PER_MODEL, ids=by_name)
def test_every_model_option_may_stand_in_a_model_table(option: Option, file: Path) -> None:
    text = '[[model]]\nmodel = "a.gguf"\n[[model]]\n'
    if option.name != "model":
        text += 'model = "b.gguf"\n'
    file.write_text(text + f"{option.name} = {toml_of(option)}\n")
    assert option.name in read_config_file(str(file)).blocks[1].values
    parse(f"--config {file}")


@pytest.mark.parametrize("option", LISTENER, ids=by_name)
def test_every_listener_option_may_stand_in_the_listener_table(option: Option, file: Path) -> None:
    file.write_text(f"[listener]\n{option.name} = {toml_of(option)}\n")
    assert option.name in read_config_file(str(file)).listener


@pytest.mark.parametrize("option", UNAVAILABLE, ids=by_name)
def test_what_is_not_available_yet_is_refused_with_its_table(option: Option, file: Path) -> None:
    table = '[[model]]\nmodel = "a.gguf"\n' if option.scope.per_model else "[listener]\n"
    message = refusal_in(file, table + f"{option.name} = {toml_of(option)}\n")
    assert message.startswith(f"{option.name} is not available yet (")
    name = "[[model]]" if option.scope.per_model else "[listener]"
    assert f"{name} of {file})" in message


def test_the_command_line_overrides_scalars_and_adds_to_lists(file: Path) -> None:
    file.write_text(
        'log-level = "debug"\n[listener]\nport = 9\nhost = "::"\napi-key = ["k1"]\n'
        '[[model]]\nmodel = "a.gguf"\n[[model]]\nmodel = "b.gguf"\n'
    )
    config = parse(f"--port 10 --config {file} --api-key k2 --load-balancing").config
    assert (config.listener.port, config.listener.host) == (10, "::")
    assert config.listener.api_keys == (b"k1", b"k2")
    assert config.log_level == "debug"
    assert config.load_balancing


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--max-ctx 5", "--max-ctx"),
        ("--model b.gguf", "--model"),
        ("b.gguf", "the model's path"),
        ("--kvflash auto", "--kvflash"),
    ],
)
def test_a_model_option_beside_a_file_is_refused(file: Path, words: str, named: str) -> None:
    message = refusal_in(file, '[[model]]\nmodel = "a.gguf"\n', words)
    assert message.startswith(f"{named} cannot stand beside --config")
    assert str(file) in message


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("prot = 1", "prot is no option (top level of ", "did you mean port?"),
        ("load_balancing = true", "load_balancing is no option", "did you mean load-balancing?"),
        ("port = 1", "port has no place here (top level of ", "[listener]"),
        ("max-ctx = 1", "max-ctx has no place here (top level of ", "[[model]]"),
        ("[listner]\nport = 1", "listner is no option", "did you mean listener?"),
        ("[listener]\nmax-ctx = 1", "max-ctx has no place here ([listener] of ", "[[model]]"),
        ("[listener]\nlog-level = 1", "log-level has no place here", "top level"),
        ("[listener]\nprot = 1", "prot is no option ([listener] of ", "did you mean port?"),
        ("help = true", "help belongs to the command line", "remove it"),
        ('config = "x"', "config belongs to the command line", "remove it"),
        ("check = true", "check belongs to the command line", "remove it"),
        ('primary-gpu = "hip:0"', "primary-gpu does not exist any more", "write load-balancing-p"),
        ('next-model = "x"', "next-model does not exist any more", "write [[model]]"),
        ("listener = 3", "listener is no table", "[listener]"),
        ("[[listener]]", "listener is no table", "[listener]"),
        ("[model]", "model is no array of tables", "[[model]]"),
        ('model = "a.gguf"', "model is no array of tables", "[[model]]"),
        ("model = [3]", "model is no array of tables", "[[model]]"),
        ("[[model]]", "the model's path is missing (model block 1, [[model]] of ", "model = "),
        ('[[model]]\npath = "x"', "path is no option (model block 1, ", "did you mean model?"),
        (
            '[[model]]\nmodel = "a.gguf"\n[[model]]\nmodel = "b.gguf"\nmax_ctx = 1',
            "max_ctx is no option (model block 2 (b), [[model]] of ",
            "did you mean max-ctx?",
        ),
        ('[[model]]\n--alias = ["x"]', "--alias is no option", "did you mean alias?"),
        ("load-balancing = 1", "load-balancing is an integer", "write true or false"),
        ('load-balancing = "on"', "load-balancing is a string", "write true or false"),
        ("log-level = true", "log-level is true or false", "write a string"),
        ("[listener]\nport = true", "port is true or false", "write an integer"),
        ("[listener]\nport = 1.0", "port is a float", "write an integer"),
        ('[listener]\nport = "1"', "port is a string", "write an integer"),
        ("[listener]\nport = 70000", "port 70000 is out of range ([listener] of", "0 to 65535"),
        ("[listener]\nport = 0x" + "f" * 9000, "port 1000000000", "0 to 65535"),
        ("[listener]\ndrain-timeout = nan", "drain-timeout nan is not a finite", "a number"),
        ("[listener]\ndrain-timeout = inf", "drain-timeout inf is not a finite", "a number"),
        ('[listener]\napi-key = "k"', "api-key is a string", "write an array"),
        ("[listener]\napi-key = [1]", "api-key has an integer in its array", "of strings"),
        ("[listener]\nhost = 2020-01-01", "host is a date or time", "write a string"),
        ("[listener.host]", "host is a table", "write a string"),
        ("a = ", "is not TOML, Invalid value (at the end, line 1)", "correct that line"),
        ("\n\n[x\n", "(at line 3, column", "correct that line"),
        ("port = 1\nport = 2", "is not TOML", "correct that line"),
        ("a = " + "9" * 5000, "cannot be read as TOML", "huge number"),
        ("a = " + "[" * 5000, "cannot be read as TOML", "deep nesting"),
    ],
)
def test_a_mistake_is_named_with_its_place(
    file: Path, text: str, problem: str, remedy: str
) -> None:
    message = refusal_in(file, text)
    assert problem in message
    assert remedy in message
    assert str(file) in message


def test_a_file_that_is_not_utf_8_is_refused_with_its_line(file: Path) -> None:
    file.write_bytes(b"# fine\n# \xff\n")
    assert refusal_of(f"--config {file}").startswith(f"{file} is not UTF-8 at line 2")


def test_an_empty_file_names_no_model(file: Path) -> None:
    assert "no model is given" in refusal_in(file, "")


def test_flags_that_are_false_and_empty_arrays_are_not_given(file: Path) -> None:
    file.write_text(
        'load-balancing = false\n[listener]\napi-key = []\n[[model]]\nmodel = "a.gguf"\n'
        "ddtree = false\n"
    )
    config = parse(f"--config {file}").config
    assert not config.load_balancing
    assert config.listener.api_keys == ()


def test_a_file_has_every_option_of_its_tables_and_no_other() -> None:
    from dflash_trio.cli.option_table import OPTIONS

    left_out = {option.name for option in OPTIONS if not option.in_file}
    assert left_out == {"config", "check", "list-devices", "version", "help"}
    assert all(option.scope is Scope.LAUNCH for option in OPTIONS if not option.in_file)
