"""What one model makes of a request: its prompt, its limits, its refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from dflash_trio.config import ModelCard, SamplingDefaults
from dflash_trio.engine.admission import Fit, KVLedger
from dflash_trio.engine.client import EngineClient
from dflash_trio.engine.model_runner import ModelInfo
from dflash_trio.engine.scripted_runner import BOS, EOG, VOCAB_SIZE, ScriptedVocabulary
from dflash_trio.generation.errors import InvalidRequest
from dflash_trio.generation.request import GenerationRequest, SamplingOverrides
from dflash_trio.generation.status import Default
from dflash_trio.routing.model_defaults import DEFAULT_MAX_TOKENS
from dflash_trio.routing.served_model import ServedModel
from dflash_trio.text.chat_template import TemplateError
from tests.support.scripted import PLAIN_TEMPLATE, scripted_config

from .bench import REFUSING_TEMPLATE, never_loaded


def served(
    template: str | None = PLAIN_TEMPLATE,
    *,
    vocabulary: ScriptedVocabulary | None = None,
    max_ctx: int = 1000,
    pool: int | None = None,
    headroom: int = 128,
    architecture: str = "scripted",
    template_source: str | None = None,
    **config: object,
) -> ServedModel:
    vocabulary = vocabulary or ScriptedVocabulary()
    return ServedModel(
        scripted_config("it", **config),
        EngineClient("it", never_loaded),
        info=ModelInfo(architecture, "", max_ctx, VOCAB_SIZE, template, "cpu:0", 1, 0),
        vocabulary=vocabulary,
        ledger=KVLedger(slots=4, pool=pool or max_ctx, max_ctx=max_ctx, decode_headroom=headroom),
        template_source=template_source,
    )


def says(content: str = "hello", **changes: Any) -> GenerationRequest:
    message: Mapping[str, Any] = {"role": "user", "content": content}
    return GenerationRequest(messages=(message,), body_bytes=100, **changes)


def vocabulary(**attributes: Any) -> ScriptedVocabulary:
    found = ScriptedVocabulary()
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


# ------------------------------------------------------------------------------- BOS and literals


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_there_is_exactly_one_bos_however_many_the_template_writes(written: int) -> None:
    model = served("{{ bos_token }}" * written + PLAIN_TEMPLATE)
    assert model.tokenize_chat(says("hi")) == (BOS, *b"hi\n>")


def test_a_bos_spelled_out_by_the_template_counts_as_one() -> None:
    assert served("<|begin|>" + PLAIN_TEMPLATE).tokenize_chat(says("hi")) == (BOS, *b"hi\n>")


def test_a_model_trained_without_bos_gets_one_only_from_its_template() -> None:
    without = vocabulary(adds_bos=False)
    assert served(vocabulary=without).tokenize_chat(says("hi")) == tuple(b"hi\n>")
    model = served("{{ bos_token }}" + PLAIN_TEMPLATE, vocabulary=without)
    assert model.tokenize_chat(says("hi")) == (BOS, *b"hi\n>")


def test_a_vocabulary_without_bos_gets_none() -> None:
    model = served("{{ bos_token }}" + PLAIN_TEMPLATE, vocabulary=vocabulary(bos=None))
    assert model.tokenize_chat(says("hi")) == tuple(b"hi\n>")


def test_an_empty_prompt_is_a_bos_alone_or_refused_where_there_is_none() -> None:
    assert served("").tokenize_chat(says()) == (BOS,)
    assert served("", vocabulary=vocabulary(adds_bos=False)).tokenize_chat(says()) == (BOS,)
    with pytest.raises(InvalidRequest, match="empty prompt") as caught:
        served("", vocabulary=vocabulary(bos=None)).tokenize_chat(says())
    assert caught.value.param == "messages"


@pytest.mark.parametrize("literal", ["<|end|>", "<|begin|>"])
def test_a_control_literal_in_a_clients_text_stays_text(literal: str) -> None:
    model = served("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    tokens = model.tokenize_chat(says(f"a{literal}b"))
    assert tokens == (BOS, *f"a{literal}b".encode(), EOG)


def test_a_client_cannot_begin_a_prompt_with_a_bos_of_its_own() -> None:
    model = served("{{ messages[0].content }}", vocabulary=vocabulary(adds_bos=False))
    assert model.tokenize_chat(says("<|begin|>x")) == tuple(b"<|begin|>x")


# ------------------------------------------------------------------------------------- refusals


def test_a_template_that_refuses_makes_an_invalid_request_that_names_the_model() -> None:
    with pytest.raises(InvalidRequest, match=r"it refuses .* no system turns") as caught:
        served(REFUSING_TEMPLATE).prepare(says())
    assert caught.value.param == "messages"


def test_a_template_that_fails_makes_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest):
        served("{{ messages[7].content }}").prepare(says())


def test_a_template_that_does_not_compile_is_an_error_of_the_model_not_of_a_request() -> None:
    with pytest.raises(TemplateError, match="it"):
        served("{% for %}")


def test_a_closed_vocabulary_makes_an_invalid_request_not_a_crash() -> None:
    closed = vocabulary(closed=True)
    with pytest.raises(InvalidRequest, match="cannot tokenize"):
        served(vocabulary=closed).prepare(says())


@pytest.mark.parametrize("token", [VOCAB_SIZE, VOCAB_SIZE + 1, 10**9, -1])
def test_a_bias_outside_the_vocabulary_is_refused_by_name(token: int) -> None:
    request = says(sampling=SamplingOverrides(logit_bias=((0, 1.0), (token, 1.0))))
    with pytest.raises(InvalidRequest, match=str(token)) as caught:
        served().prepare(request)
    assert caught.value.param == "logit_bias"


def test_a_bias_on_the_last_token_is_fine() -> None:
    bias = ((0, 1.0), (VOCAB_SIZE - 1, -100.0))
    prepared = served().prepare(says(sampling=SamplingOverrides(logit_bias=bias)))
    assert prepared.sampling.logit_bias == bias


# ----------------------------------------------------------------------------------- max_tokens


def test_max_tokens_is_the_requests_own() -> None:
    assert served(default_max_tokens=7).prepare(says(max_tokens=5)).max_tokens == 5


def test_without_one_it_is_the_models_default() -> None:
    assert served(default_max_tokens=7).prepare(says()).max_tokens == 7


@pytest.mark.parametrize(
    ("max_ctx", "pool", "expected"),
    [(1000, 1000, 1000), (1000, 600, 600), (50_000, 100_000, DEFAULT_MAX_TOKENS)],
)
def test_without_any_it_is_the_room_or_16000(max_ctx: int, pool: int, expected: int) -> None:
    assert served(max_ctx=max_ctx, pool=pool).prepare(says()).max_tokens == expected


def test_a_huge_number_is_cut_to_the_room() -> None:
    assert served(max_ctx=1000).prepare(says(max_tokens=10**12)).max_tokens == 1000


@pytest.mark.parametrize(("prompt", "fit"), [(872, Fit.FULL), (873, Fit.TIGHT), (1000, Fit.NONE)])
def test_the_cut_does_not_hide_that_there_is_less_than_the_usual_headroom(
    prompt: int, fit: Fit
) -> None:
    model = served(max_ctx=1000, headroom=128)
    prepared = model.prepare(says("x" * (prompt - 3), max_tokens=500))
    assert prepared.prompt_tokens == prompt
    assert model.ledger.fit(prompt, prepared.max_tokens) is fit


def test_the_cut_leaves_a_headroom_beyond_the_room_visible() -> None:
    model = served(max_ctx=100, headroom=128)
    prepared = model.prepare(says(max_tokens=500))
    assert model.ledger.fit(prepared.prompt_tokens, prepared.max_tokens) is Fit.TIGHT


# ------------------------------------------------------------------------- stop strings, the rest


def test_a_built_in_templates_turn_end_is_a_stop_string_when_it_is_no_token() -> None:
    prepared = served(None).prepare(says(stop=("END",)))
    assert (prepared.stop, prepared.turn_ends) == (("END",), ("<|im_end|>",))
    gemma = served(None, architecture="gemma3")
    assert gemma.prepare(says()).turn_ends == ("<end_of_turn>",)


def test_a_cards_turn_ends_end_answers_too() -> None:
    model = served(card=ModelCard("c", turn_ends=("\nUser:",)))
    assert model.prepare(says(stop=("END",))).turn_ends == ("\nUser:",)


def test_a_built_in_templates_turn_end_that_is_a_token_needs_no_stop_string() -> None:
    knows = vocabulary(control_tokens={"<|im_end|>": EOG, "<|begin|>": BOS})
    assert served(None, vocabulary=knows).prepare(says()).turn_ends == ()


def test_the_files_and_the_operators_templates_add_no_stop_strings() -> None:
    assert served(PLAIN_TEMPLATE).prepare(says()).turn_ends == ()
    assert served(None, template_source=PLAIN_TEMPLATE).prepare(says()).turn_ends == ()


def test_the_operators_template_comes_before_the_files_and_that_before_the_built_in() -> None:
    operators = served("file", template_source="mine", chat_template_file="/t.jinja")
    assert bytes(operators.tokenize_chat(says())[1:]) == b"mine"
    assert operators.template_origin == "file /t.jinja"
    assert served("file").template_origin == "model file"
    assert served(None).template_origin == "built-in chatml"


def test_open_sampling_fields_take_the_models_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.1, top_k=3, seed=5)
    sampling = served(sampling=defaults).prepare(says()).sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.1, 3, 5)
    given = SamplingOverrides(temperature=0.0, seed=-1)
    sampling = served(sampling=defaults).prepare(says(sampling=given)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.0, 3, None)


def test_a_models_card_fills_what_its_operator_and_the_request_leave_open() -> None:
    card = ModelCard(
        "c", sampling=SamplingDefaults(temperature=0.1, top_k=3), default_max_tokens=20
    )
    model = served(card=card, sampling=SamplingDefaults(top_k=5))
    prepared = model.prepare(says())
    assert (prepared.sampling.temperature, prepared.sampling.top_k) == (0.1, 5)
    assert prepared.max_tokens == 20
    properties = model.properties()
    assert properties.sampling["temperature"] == Default(0.1, "card")
    assert properties.sampling["top_k"] == Default(5, "flag")
    assert properties.limits["default_max_tokens"] == Default(20, "card")
    assert properties.limits["reasoning_effort_x_high"] == Default(10, "built-in")


def test_everything_else_is_passed_on() -> None:
    prepared = served().prepare(says(n=3, ignore_eos=True))
    assert (prepared.n, prepared.ignore_eos) == (3, True)


def test_a_final_assistant_turn_is_continued_not_answered() -> None:
    request = attrs.evolve(
        says(), messages=({"role": "assistant", "content": "so far"},), continue_final=True
    )
    assert served().tokenize_chat(request) == (BOS, *b"so far")


def test_the_status_counts_reservations_by_phase() -> None:
    status = served().status(1, ["decode", "decode", "reserved"])
    assert status.in_flight == {"reserved": 1, "prefill": 0, "decode": 2, "draining": 0}
    assert (status.name, status.priority, status.drains) == ("it", 1, True)
    assert not status.healthy  # never loaded
