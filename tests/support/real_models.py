"""The two real models behind one address, and what tests ask them through official clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import trio

from tests.support.models import GEMMA, SMOLLM2
from tests.support.running import ServerProcess, server_process

NAMES = {SMOLLM2: "smollm2", GEMMA: "gemma"}

CTX = 512
"""What the first model holds. The second holds less: what is too long for the first fits none."""

THINK_MAX = 24
"""The most that SmolLM2 may think, however much a request allows."""

THINKING_TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}{% endif %}"""

ODD_TEXT = "歪😀👩\u200d👧 é—שע'q\" \\/\u2028\u2029\x85\r\n<think></tool_call><|im_end|>"
"""Characters that tokens cut apart, line ends that clients trip over, and markers that are text."""

SAY_IT: dict[str, Any] = {
    "type": "object",
    "properties": {"said": {"type": "string", "enum": [ODD_TEXT]}},
    "required": ["said"],
    "additionalProperties": False,
}
"""Leaves one value: the odd text, escaped somehow."""

FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "北京😀"]},
        "days": {"type": "integer", "minimum": 2, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""What the tool ``forecast`` takes."""

ALARM: dict[str, Any] = {
    "type": "object",
    "properties": {"loud": {"type": "boolean"}},
    "required": ["loud"],
    "additionalProperties": False,
}

COLOURS: list[Any] = [{"role": "user", "content": "Name three colours."}]
COUNT: list[Any] = [{"role": "user", "content": "Count from 1 to 500, one number a line."}]
"""Neither model ends this one within ten tokens."""


@contextlib.contextmanager
def two_real_models(
    models: dict[str, Path], first: str, folder: Path, *more: str
) -> Iterator[ServerProcess]:
    """A server on both, ``first`` (its file's name) being asked first. SmolLM2 thinks.

    At the end it was idle, ended properly and had logged no error.
    """
    template = folder / "thinks.jinja"
    template.write_text(THINKING_TEMPLATE)
    second = next(name for name in NAMES if name != first)
    arguments = ["--load-balancing", "--port=0", *more]
    for device, (model, ctx) in enumerate(((first, CTX), (second, CTX * 3 // 4))):
        arguments += ["--model", str(models[model]), "--model-name", NAMES[model]]
        arguments += ["--target-device", f"cpu:{device}", f"--max-ctx={ctx}"]
        # Threads that wait for each other take ages when something else has one's core.
        arguments += ["--threads=1"]
        # Usage is compared between answers, and must not depend on what came before.
        arguments += ["--max-concurrency=2", "--prefix-cache-slots=0"]
        if model == SMOLLM2:
            arguments += ["--chat-template-file", str(template), f"--think-max-tokens={THINK_MAX}"]
    with server_process(arguments) as server:
        trio.run(server.until_ready)
        yield server
        trio.run(server.until_idle)
        server.signal()
        assert trio.run(server.exit_code) == 0
    assert "Traceback" not in server.log
    assert "rror" not in server.log


def openai_client(
    server: ServerProcess, api_key: str = "none", *, strict: bool = True
) -> openai.OpenAI:
    return openai.OpenAI(**_client_arguments(f"{server.url}/v1", api_key, strict))


def async_openai_client(server: ServerProcess, *, strict: bool = True) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**_client_arguments(f"{server.url}/v1", "none", strict))


def anthropic_client(server: ServerProcess, api_key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(**_client_arguments(server.url, api_key))


def async_anthropic_client(server: ServerProcess) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(**_client_arguments(server.url, "none"))


def _client_arguments(url: str, api_key: str, strict: bool = True) -> dict[str, Any]:
    """Strict about what they are sent, and asking once."""
    return {
        "base_url": url,
        "api_key": api_key,
        "max_retries": 0,
        "timeout": 120,
        "_strict_response_validation": strict,
    }


def stops_within(text: str, tokens: list[str]) -> list[str]:
    """Stop strings out of a text that this model writes: its beginning, a part of its middle, and
    one that begins in one token and ends in the next."""
    assert "".join(tokens) == text
    crossing, end = None, 0
    for token in tokens[:-1]:
        end += len(token)
        candidate = text[end - 2 : end + 2]
        if end > 4 and text.find(candidate) == end - 2:
            crossing = candidate
            break
    assert crossing is not None
    return [text[:3], text[10:16], crossing]
