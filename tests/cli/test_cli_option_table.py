"""The table of options is complete, and every row of it holds together."""

from __future__ import annotations

import attrs
import pytest

from dflash_trio.cli.model_options import TOOL_PARSERS
from dflash_trio.cli.option import Option, Scope
from dflash_trio.cli.option_table import BY_NAME, OPTIONS, REMOVED
from dflash_trio.config import (
    EFFORTS,
    ListenerConfig,
    ModelConfig,
    SamplingDefaults,
    ServerConfig,
)
from dflash_trio.text.tool_calls.formats import FORMATS
from tests.cli import cli_cases

CONTRACT = {
    Scope.LAUNCH: """
        --load-balancing --load-balancing-primary-gpu --config --check --list-devices
        --log-format --log-level --version --help
    """,
    Scope.LISTENER: """
        --host --port --routing-queue-limit --api-key --api-key-file --cors-origin --no-cors
        --drain-timeout --client-stall-timeout --max-body-bytes --max-connections
        --tls-cert --tls-key
    """,
    Scope.MODEL: """
        --model --model-name --alias --target-device --max-ctx --max-concurrency
        --kv-pool-tokens --decode-headroom --cache-type-k --cache-type-v --flash-attn
        --fa-window --chunk --threads --gpu-layers --cpu-moe --no-mmap --mlock
        --rope-freq-base --rope-freq-scale --chat-template-file --model-card
        --default-max-tokens --hard-limit-reply-budget --think-max-tokens
        --reasoning-effort-low --reasoning-effort-medium --reasoning-effort-high
        --reasoning-effort-x-high --reasoning-effort-max --thinking --tool-parser
        --temperature --top-p --top-k --min-p --repeat-penalty --seed
        --prefix-cache-slots --prefill-cache-slots --disk-prefix-cache
        --draft --draft-device --draft-max --ddtree --ddtree-budget --lazy-draft
        --on-sigterm --ds4-fused-decode --ds4-expert-top-k --ds4-prefill
    """,
    Scope.SINGLE_MODEL: """
        --kvflash --kvflash-policy --kvflash-tau --spark --spark-vram --spark-slots
        --prefill-compression --prefill-threshold --prefill-keep-ratio --prefill-curve
        --prefill-drafter --prefill-skip-park
        --draft-ipc-bin --draft-ipc-work-dir --draft-ipc-ring-cap
        --target-devices --target-layer-split --peer-access
    """,
}

LATER = """
    --kvflash --kvflash-policy --kvflash-tau --spark --spark-vram --spark-slots
    --prefill-compression --prefill-threshold --prefill-keep-ratio --prefill-curve
    --prefill-drafter --prefill-skip-park
    --draft-ipc-bin --draft-ipc-work-dir --draft-ipc-ring-cap
"""

# Not copied into a field by name, because the launch is assembled from them by hand.
BY_HAND = {
    *("load-balancing", "load-balancing-primary-gpu", "config", "check", "list-devices"),
    *("version", "help", "api-key", "api-key-file", "no-cors", "model", "model-name"),
}


@pytest.mark.parametrize("scope", list(Scope))
def test_the_table_is_the_contract(scope: Scope) -> None:
    own = [option.flag for option in OPTIONS if option.scope is scope]
    assert sorted(own) == sorted(CONTRACT[scope].split())


def test_no_name_stands_twice_or_is_a_removed_one() -> None:
    assert len(BY_NAME) == len(OPTIONS)
    assert not set(BY_NAME) & set(REMOVED)


def test_what_is_not_available_yet_is_exactly_this() -> None:
    assert {option.flag for option in cli_cases.UNAVAILABLE} == set(LATER.split())
    assert {option.name: option.only_value for option in cli_cases.ONE_VALUE} == {
        "fa-window": "0",
    }


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_nothing_available_is_accepted_and_ignored(option: Option) -> None:
    classes = {
        Scope.LAUNCH: ServerConfig,
        Scope.LISTENER: ListenerConfig,
        Scope.MODEL: ModelConfig,
        Scope.SINGLE_MODEL: ModelConfig,
    }
    if option.field:
        owner: type = classes[option.scope]
        name = option.field
        if name.startswith("sampling."):
            owner, name = SamplingDefaults, name.removeprefix("sampling.")
        elif name.startswith("reasoning_efforts."):
            assert name.removeprefix("reasoning_efforts.") in EFFORTS
            name = "reasoning_efforts"
        assert name in {field.name for field in attrs.fields(owner)}
        assert option.available
    else:
        later = not option.available or option.only_value
        assert later or option.name in BY_HAND


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_row_says_what_it_does_in_one_sentence(option: Option) -> None:
    assert option.help.endswith(".")
    assert option.help[0].isupper()
    assert option.default


def test_every_number_has_a_range_that_the_tests_know() -> None:
    numbers = {
        option.name for option in OPTIONS if option.takes is not None and int in option.takes.toml
    }
    assert numbers == set(cli_cases.OUT_OF_RANGE)


def test_a_tool_parser_is_one_of_the_formats_of_tool_calls() -> None:
    assert sorted(TOOL_PARSERS) == sorted(FORMATS)
