"""What grammars are compiled for: one suite for the scripted vocabulary and for real ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trio.engine.model_runner import EngineError, ModelRunner, Vocabulary
from dflash_trio.engine.scripted_runner import ScriptedRunner
from dflash_trio.generation.constraint import TokenMatcher
from dflash_trio.generation.request import OutputConstraint
from dflash_trio.text.structured import compile_grammar, grammar_source
from tests.engine.test_runner_contract import load_llama
from tests.support.http_client import PATIENCE

REAL = [pytest.param(name, marks=pytest.mark.real) for name in ("smollm2", "gemma")]
TEXT = 'naïve 歪😀👩‍👩‍👧 \u2028 "\\ <|im_end|><end_of_turn>'


def make_runner(name: str, request: pytest.FixtureRequest) -> ModelRunner:
    if name == "scripted":
        return ScriptedRunner()
    path: Path = request.getfixturevalue(name)
    return load_llama(path, slots=1)


@pytest.fixture(scope="module", params=["scripted", *REAL])
def vocabulary(request: pytest.FixtureRequest) -> Iterator[Vocabulary]:
    runner = make_runner(request.param, request)
    yield runner.vocabulary
    runner.close()


@pytest.fixture(params=["scripted", *REAL])
def own_runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    runner = make_runner(request.param, request)
    yield runner
    runner.close()


def matcher_of(vocabulary: Vocabulary, kind: Any, source: Any) -> TokenMatcher:
    source = grammar_source(OutputConstraint(kind, source))
    return compile_grammar(vocabulary.guide_tokenizer(), source).new_matcher()


def allowed(vocabulary: Vocabulary, matcher: TokenMatcher) -> set[int]:
    mask = matcher.mask()
    assert len(mask) == (vocabulary.size + 31) // 32 * 4
    return {t for t in range(8 * len(mask)) if mask[t // 8] >> t % 8 & 1}


def forced(text: str) -> dict[str, Any]:
    return {"const": {"x": text}}


@pytest.mark.parametrize("choose", [min, max, lambda tokens: sorted(tokens)[len(tokens) // 2]])
def test_a_mask_allows_the_tokens_that_begin_a_forced_text_and_no_others(
    vocabulary: Vocabulary, choose: Callable[[set[int]], int]
) -> None:
    matcher = matcher_of(vocabulary, "json_schema", forced(TEXT))
    left = json.dumps({"x": TEXT}, ensure_ascii=False).encode()
    pieces = [vocabulary.piece(token) for token in range(vocabulary.size)]
    while left:
        assert not matcher.finished
        tokens = allowed(vocabulary, matcher)
        assert tokens == {t for t, piece in enumerate(pieces) if piece and left.startswith(piece)}
        token = choose(tokens)
        matcher.accept(token)
        left = left[len(pieces[token]) :]
    assert matcher.finished
    assert allowed(vocabulary, matcher) == vocabulary.eog_tokens


def test_the_models_own_tokens_of_a_forced_text_are_among_the_allowed(
    vocabulary: Vocabulary,
) -> None:
    matcher = matcher_of(vocabulary, "json_schema", forced(TEXT))
    for token in vocabulary.tokenize(json.dumps({"x": TEXT}, ensure_ascii=False)):
        assert token in allowed(vocabulary, matcher)
        matcher.accept(token)
    assert matcher.finished


def test_every_end_token_and_no_other_control_token_is_allowed_where_an_answer_may_end(
    vocabulary: Vocabulary,
) -> None:
    matcher = matcher_of(vocabulary, "regex", "(?s:.*)")
    tokens = allowed(vocabulary, matcher)
    assert tokens & set(vocabulary.control_tokens.values()) == vocabulary.eog_tokens
    matcher = matcher_of(vocabulary, "json_object", None)
    assert not allowed(vocabulary, matcher) & vocabulary.eog_tokens


def test_it_is_made_once_whoever_asks(own_runner: ModelRunner) -> None:
    made: list[Any] = []

    def ask() -> None:
        made.append(own_runner.vocabulary.guide_tokenizer())

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(made) == 3
    assert made[0] is made[1] is made[2]
    assert made[0].vocab_size == own_runner.vocabulary.size
    assert set(made[0].eos_tokens) == own_runner.vocabulary.eog_tokens


def test_what_was_compiled_works_on_when_the_model_is_gone_and_nothing_new_is_made(
    own_runner: ModelRunner,
) -> None:
    vocabulary = own_runner.vocabulary
    before = {token: vocabulary.piece(token) for token in range(vocabulary.size)}
    guide = vocabulary.guide_tokenizer()
    # A part of its own in a client's grammar, whose forced text llguidance tokenizes.
    nested = 'start: "say " inner\ninner: %lark {\nstart: "a forced text of several tokens"\n}'
    source = grammar_source(OutputConstraint("lark", nested))
    grammar = compile_grammar(guide, source)
    own_runner.close()
    with pytest.raises(EngineError):
        vocabulary.guide_tokenizer()
    for compiled in (grammar, compile_grammar(guide, source)):
        matcher, said = compiled.new_matcher(), b""
        while not matcher.finished:
            token = max(allowed(vocabulary, matcher))
            matcher.accept(token)
            said += before[token]
        assert said == b"say a forced text of several tokens"


def test_unloading_while_it_is_made_is_an_answer_or_an_error(own_runner: ModelRunner) -> None:
    vocabulary, outcome = own_runner.vocabulary, []
    begun = threading.Event()

    def ask() -> None:
        begun.set()
        try:
            outcome.append(vocabulary.guide_tokenizer().vocab_size)
        except EngineError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(PATIENCE)
    own_runner.close()
    thread.join(PATIENCE)
    assert outcome in ([vocabulary.size], ["the model is no longer loaded"])
