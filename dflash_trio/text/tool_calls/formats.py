"""Which formats there are, and which one a chat template asks its model for."""

from __future__ import annotations

from .deepseek import DeepSeek
from .gpt_oss import GptOss
from .hermes import Hermes
from .llama import Llama3Json
from .mistral import Mistral
from .pieces import ToolFormat
from .pythonic import Gemma, LlamaPythonic
from .qwen_xml import QwenXml

HERMES = Hermes()
_FORMATS: tuple[ToolFormat, ...] = (
    HERMES,
    QwenXml(),
    Llama3Json(),
    LlamaPythonic(),
    Mistral(),
    DeepSeek(),
    Gemma(),
    GptOss(),
)
FORMATS: dict[str, ToolFormat] = {each.name: each for each in _FORMATS}
"""By the names of ``--tool-parser``."""

_DEEPSEEK_FENCE = "```json"
_MARKERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "gpt-oss"),
    (("<｜tool▁call▁begin｜>",), "deepseek"),
    (("<function=", "<parameter="), "qwen-xml"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_start|>",), "llama-pythonic"),
    (("[func_name1(",), "llama-pythonic"),
    (("<|python_tag|>",), "llama3-json"),
    (('"parameters": dictionary of argument name',), "llama3-json"),
    (("tool_code",), "gemma"),
)
"""What a template's text holds, all of it, and the format that this means. The first that fits."""


def detect_format(template_source: str | None) -> ToolFormat:
    """The format that a chat template, given by its Jinja source, asks for. Templates that know no
    tools are given the Hermes form (see ``fallback``), so that is the answer for them."""
    source = template_source or ""
    for markers, name in _MARKERS:
        if all(marker in source for marker in markers):
            if name == "deepseek":
                return DeepSeek(fenced=_DEEPSEEK_FENCE in source)
            return FORMATS[name]
    return HERMES
