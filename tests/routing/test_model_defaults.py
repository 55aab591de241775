"""Flag over card over family over built-in; nothing beyond what there is; and who said so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trio.config import EFFORTS, ModelCard, ModelConfig, SamplingDefaults
from dflash_trio.routing.model_defaults import SAMPLING_NAMES, ModelDefaults, resolve_defaults
from tests.support.http_client import request
from tests.support.running import running
from tests.support.scripted import PLAIN_TEMPLATE, scripted_config, scripted_load

DOCS = Path(__file__).parent.parent.parent / "docs"


def config(**fields: Any) -> ModelConfig:
    return ModelConfig("/m.gguf", "m", 0, **fields)


def resolved(
    room: int = 100_000, max_ctx: int | None = None, family: ModelCard | None = None, **fields: Any
) -> ModelDefaults:
    return resolve_defaults(config(**fields), room=room, max_ctx=max_ctx or room, family=family)


# What is built in


def test_with_nothing_said_everything_is_built_in() -> None:
    defaults = resolved()
    assert defaults.sampling == SamplingDefaults()
    assert (defaults.default_max_tokens, defaults.hard_limit_reply_budget) == (16_000, 4096)
    assert defaults.think_max_tokens == 16_000 - 4096
    assert (defaults.thinking, defaults.tool_parser) == ("auto", None)
    assert set(defaults.sources.values()) == {"built-in"}


def test_on_a_small_model_the_room_and_half_the_context_bound_it() -> None:
    defaults = resolved(room=600, max_ctx=1000)
    assert (defaults.default_max_tokens, defaults.hard_limit_reply_budget) == (600, 500)
    assert defaults.think_max_tokens == 300


def test_every_tier_has_its_share_of_the_thinking() -> None:
    assert resolved(think_max_tokens=1001).efforts == {
        "low": 125,
        "medium": 500,
        "high": 1001,
        "x-high": 1001,
        "max": 1001,
    }


def test_what_follows_from_a_given_number_is_still_built_in() -> None:
    defaults = resolved(default_max_tokens=2048, hard_limit_reply_budget=1024)
    assert defaults.think_max_tokens == 1024
    assert defaults.sources["default_max_tokens"] == "flag"
    assert defaults.sources["think_max_tokens"] == "built-in"
    assert defaults.sources["reasoning_efforts.low"] == "built-in"


def test_a_reply_budget_above_the_reply_limit_leaves_half_for_thinking() -> None:
    defaults = resolved(default_max_tokens=100, hard_limit_reply_budget=200)
    assert defaults.think_max_tokens == 50
    assert set(defaults.efforts.values()) == {6, 25, 50}


# Who decides

CARD = ModelCard(
    "c",
    sampling=SamplingDefaults(temperature=0.1, top_k=1),
    default_max_tokens=1000,
    hard_limit_reply_budget=100,
    think_max_tokens=800,
    reasoning_efforts={"low": 10, "x-high": 700},
    thinking="on",
    tool_parser="hermes",
    given=frozenset({"sampling.temperature", "sampling.top_k", "sampling.min_p"}),
)


def test_the_card_decides_what_no_flag_does() -> None:
    defaults = resolved(card=CARD)
    assert defaults.sampling == SamplingDefaults(temperature=0.1, top_k=1)
    assert (defaults.default_max_tokens, defaults.hard_limit_reply_budget) == (1000, 100)
    assert (defaults.think_max_tokens, defaults.thinking) == (800, "on")
    assert defaults.tool_parser == "hermes"
    assert defaults.efforts == {"low": 10, "medium": 400, "high": 800, "x-high": 700, "max": 800}
    by_card = {name for name, source in defaults.sources.items() if source == "card"}
    assert by_card == {
        *("sampling.temperature", "sampling.top_k", "sampling.min_p", "default_max_tokens"),
        *("hard_limit_reply_budget", "think_max_tokens", "thinking", "tool_parser"),
        *("reasoning_efforts.low", "reasoning_efforts.x-high"),
    }


def test_a_flag_decides_over_the_card_value_by_value() -> None:
    defaults = resolved(
        card=CARD,
        sampling=SamplingDefaults(top_k=7),
        hard_limit_reply_budget=0,
        reasoning_efforts={"low": 0},
        thinking="off",
        tool_parser="gemma",
    )
    assert (defaults.sampling.top_k, defaults.sampling.temperature) == (7, 0.1)
    assert (defaults.hard_limit_reply_budget, defaults.default_max_tokens) == (0, 1000)
    assert (defaults.efforts["low"], defaults.efforts["x-high"]) == (0, 700)
    assert (defaults.thinking, defaults.tool_parser) == ("off", "gemma")
    sources = defaults.sources
    assert (sources["sampling.top_k"], sources["sampling.temperature"]) == ("flag", "card")
    assert (sources["reasoning_efforts.low"], sources["hard_limit_reply_budget"]) == (
        "flag",
        "flag",
    )


@pytest.mark.parametrize(
    ("name", "card", "built_in"),
    [
        ("sampling.temperature", CARD, 0.8),
        ("sampling.top_k", CARD, 40),
        (
            "sampling.seed",
            ModelCard("c", sampling=SamplingDefaults(seed=5), given=frozenset({"sampling.seed"})),
            None,
        ),
        ("thinking", CARD, "auto"),
    ],
)
def test_a_flag_that_repeats_the_built_in_value_still_beats_the_card(
    name: str, card: ModelCard, built_in: object
) -> None:
    defaults = resolved(card=card, given=frozenset({name}))
    group, _, key = name.rpartition(".")
    assert getattr(defaults.sampling if group else defaults, key) == built_in
    assert defaults.sources[name] == "flag"


def test_the_family_speaks_after_the_card_and_before_the_built_in_values() -> None:
    family = ModelCard(
        "", sampling=SamplingDefaults(top_k=20, min_p=0.0), thinking="off", think_max_tokens=5
    )
    defaults = resolved(card=CARD, family=family)
    assert (defaults.sampling.top_k, defaults.think_max_tokens) == (1, 800)
    defaults = resolved(family=family)
    assert (defaults.sampling.top_k, defaults.sampling.min_p) == (20, 0.0)
    assert (defaults.sources["sampling.min_p"], defaults.thinking) == ("family", "off")
    assert defaults.sources["sampling.temperature"] == "built-in"


async def test_props_shows_every_value_with_its_source_as_its_schema_says() -> None:
    model = scripted_config("m", card=CARD, think_max_tokens=60, default_max_tokens=10**6)
    # The card turns thinking on, so the template must know of it.
    load = scripted_load(max_ctx=512, template=PLAIN_TEMPLATE + "{# </think> #}")
    async with running((model, load)) as server:
        props = (await request(server.port, "GET", "/props")).json()
    schema = json.loads((DOCS / "schemas" / "props.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(props)
    (shown,) = props["models"]
    assert shown["defaults"]["top_k"] == {"value": 1, "source": "card"}
    limits = shown["limits"]
    assert limits["default_max_tokens"] == {"value": 512, "source": "flag"}
    assert limits["hard_limit_reply_budget"] == {"value": 100, "source": "card"}
    assert limits["think_max_tokens"] == {"value": 60, "source": "flag"}
    assert limits["reasoning_effort_low"] == {"value": 10, "source": "card"}
    assert limits["reasoning_effort_medium"] == {"value": 30, "source": "built-in"}
    assert limits["reasoning_effort_x_high"] == {"value": 60, "source": "card"}
    assert limits["thinking"] == {"value": "on", "source": "card"}
    assert limits["tool_parser"] == {"value": "hermes", "source": "card"}


# Too much


@pytest.mark.parametrize("by", ["flag", "card"])
def test_what_is_beyond_the_room_is_cut_and_keeps_its_source(by: str) -> None:
    said: dict[str, Any] = {
        "default_max_tokens": 10**6,
        "hard_limit_reply_budget": 10**6,
        "think_max_tokens": 10**6,
        "reasoning_efforts": {"low": 10**6},
    }
    defaults = resolved(
        room=300, max_ctx=400, **(said if by == "flag" else {"card": ModelCard("c", **said)})
    )
    assert defaults.default_max_tokens == 300
    assert defaults.hard_limit_reply_budget == 300
    assert defaults.think_max_tokens == 300
    assert defaults.efforts["low"] == 300
    assert defaults.sources["default_max_tokens"] == by
    assert defaults.sources["reasoning_efforts.low"] == by


def test_no_tier_is_above_the_most_that_a_reply_may_think() -> None:
    defaults = resolved(think_max_tokens=50, card=ModelCard("c", reasoning_efforts={"max": 90}))
    assert defaults.efforts["max"] == 50


TOKENS = st.none() | st.integers(0, 2**24)
CARDS = st.builds(
    ModelCard,
    path=st.just("c"),
    default_max_tokens=st.none() | st.integers(1, 2**24),
    hard_limit_reply_budget=TOKENS,
    think_max_tokens=TOKENS,
    reasoning_efforts=st.dictionaries(st.sampled_from(EFFORTS), st.integers(0, 2**24)),
)


@given(
    card=st.none() | CARDS,
    budget=TOKENS,
    most=TOKENS,
    max_ctx=st.integers(1, 2**20),
    pool=st.integers(1, 2**20),
)
def test_whatever_is_said_every_number_fits_and_has_a_source(
    card: ModelCard | None, budget: int | None, most: int | None, max_ctx: int, pool: int
) -> None:
    room = min(max_ctx, pool)
    defaults = resolved(
        room, max_ctx, card=card, hard_limit_reply_budget=budget, think_max_tokens=most
    )
    assert 1 <= defaults.default_max_tokens <= room
    assert 0 <= defaults.hard_limit_reply_budget <= room
    assert 0 <= defaults.think_max_tokens <= room
    assert tuple(defaults.efforts) == EFFORTS
    assert all(0 <= tokens <= defaults.think_max_tokens for tokens in defaults.efforts.values())
    assert set(defaults.sources) == {
        *(f"sampling.{name}" for name in SAMPLING_NAMES),
        *(f"reasoning_efforts.{effort}" for effort in EFFORTS),
        *("default_max_tokens", "hard_limit_reply_budget", "think_max_tokens"),
        *("thinking", "tool_parser"),
    }
    assert len(defaults.of_sampling()) + len(defaults.of_limits()) == len(defaults.sources)
