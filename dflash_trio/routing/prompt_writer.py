"""PromptWriter: a request as one model's template writes it, and what its answer will look like.

Templates differ in what they know: some take tools, some do not; some open a block of thinking,
some leave that to the model, some can be told not to. What the template does not do is done here,
around it. Pure and thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import frozen

from ..engine.model_runner import Vocabulary
from ..generation.channels import ChannelSplitter
from ..generation.errors import InvalidRequest
from ..generation.request import GenerationRequest, Tool
from ..text.chat_template import ChatTemplate, RenderedPrompt, TemplateRefused
from ..text.control_tokens import ControlTokens, Segment
from ..text.messages import normalise
from ..text.reasoning import HARMONY, ReasoningFormat, ThinkSplitter, detect_reasoning
from ..text.tool_calls.fallback import messages_with_tools
from ..text.tool_calls.formats import FORMATS, detect_format
from ..text.tool_calls.harmony import CONTROLS, HarmonySplitter, load_encoding
from ..text.tool_calls.pieces import ToolFormat
from .model_defaults import ModelDefaults

# Variables by which templates let thinking be turned on and off.
_SWITCHES = ("enable_thinking", "thinking")
_FINAL = "<|channel|>final<|message|>"
_NEXT_MESSAGE = "<|end|><|start|>assistant"


@frozen
class WrittenPrompt:
    """A prompt, and what it has already begun for the model."""

    rendered: RenderedPrompt
    thinking_open: bool
    """It ends inside a block of thinking."""
    tells_thinking: bool
    """The answer may still consist of thinking and content. False: it is content alone."""


class PromptWriter:
    """One model's template with its vocabulary. ``template_source`` was compiled to ``template``.

    Raises ValueError for defaults that the template cannot meet.
    """

    def __init__(
        self,
        name: str,
        template: ChatTemplate,
        template_source: str,
        tokens: ControlTokens,
        defaults: ModelDefaults,
        vocabulary: Vocabulary,
    ) -> None:
        self._name = name
        self._template = template
        self._tokens = tokens
        self._defaults = defaults
        self.reasoning: ReasoningFormat | None = detect_reasoning(template_source)
        """How it thinks; ``None``: it does not."""
        self.tool_format: ToolFormat = (
            FORMATS[defaults.tool_parser]
            if defaults.tool_parser is not None
            else detect_format(template_source)
        )
        self._knows_tools = template.mentions("tools")
        if self.reasoning is HARMONY:
            ids = vocabulary.control_tokens
            self._new_harmony = partial(
                HarmonySplitter,
                controls={ids[literal]: literal for literal in CONTROLS if literal in ids},
                encoding=load_encoding(map(vocabulary.piece, range(vocabulary.size))),
            )
        if defaults.thinking == "on" and self.reasoning is None:
            raise ValueError(
                "thinking is set to on, but the chat template knows no thinking: leave it out"
            )

    def write(self, request: GenerationRequest) -> WrittenPrompt:
        """Raises InvalidRequest if the template refuses the request."""
        tools = offered_tools(request)
        messages: Sequence[Mapping[str, object]] = normalise(request.messages)
        if not self._knows_tools:
            # Also without tools on offer: calls and results of earlier turns must show.
            messages = messages_with_tools(messages, tools)
        enabled = self._thinking_enabled(request)
        try:
            rendered = self._template.render(
                messages,
                add_generation_prompt=not request.continue_final,
                continue_final=request.continue_final,
                tools=[_as_template_tool(tool) for tool in tools] if self._knows_tools else None,
                extra=self._variables(request, enabled),
            )
        except TemplateRefused as error:
            raise InvalidRequest(
                f"The chat template of {self._name} refuses this conversation: {error}",
                param="messages",
            ) from error
        return self._with_thinking(rendered, request, enabled)

    def segments(self, text: str) -> tuple[Segment, ...]:
        """Text of the server's own, its control tokens apart."""
        return tuple(Segment(part, control) for part, control in self._tokens.split(text))

    def new_splitter(self, written: WrittenPrompt) -> Callable[[], ChannelSplitter]:
        """What makes the reader of an answer to this prompt. Only for models that think."""
        assert self.reasoning is not None
        if self.reasoning is HARMONY:
            return partial(self._new_harmony, starts_open=written.thinking_open)
        return partial(ThinkSplitter, self.reasoning, starts_open=written.thinking_open)

    def closing(self, request: GenerationRequest) -> tuple[str, str]:
        """What the engine says to close the thinking, and what it says when the model has closed it
        by itself before an answer under a grammar. Only for models that think."""
        form = self.reasoning
        assert form is not None
        if form is HARMONY and offered_tools(request) and request.constraint is None:
            # What follows may be a call and not the final channel: that is the model's choice, or
            # its grammar's.
            return _NEXT_MESSAGE, ""
        return form.close, form.resume

    def _thinking_enabled(self, request: GenerationRequest) -> bool | None:
        if request.thinking.enabled is not None:
            return request.thinking.enabled
        return {"on": True, "off": False, "auto": None}[self._defaults.thinking]

    def _variables(self, request: GenerationRequest, enabled: bool | None) -> dict[str, Any]:
        variables = dict(request.template_arguments)
        if self.reasoning is None:
            return variables
        if enabled is not None:
            variables |= {name: enabled for name in _SWITCHES if self._template.mentions(name)}
        effort = request.thinking.effort
        if effort is not None and self._template.mentions("reasoning_effort"):
            # Templates know three; what is above them is the most they can say.
            variables["reasoning_effort"] = effort if effort in ("low", "medium") else "high"
        return variables

    def _with_thinking(
        self, rendered: RenderedPrompt, request: GenerationRequest, enabled: bool | None
    ) -> WrittenPrompt:
        form = self.reasoning
        if form is None:
            return WrittenPrompt(rendered, thinking_open=False, tells_thinking=False)
        if form is HARMONY:
            return self._with_channels(rendered, request, enabled)
        is_open = _is_open(rendered.text, form, continued=request.continue_final)
        if request.continue_final:
            return WrittenPrompt(rendered, thinking_open=is_open, tells_thinking=is_open)
        if enabled is False:
            if is_open:
                rendered = self._extended(rendered, form.close)
            return WrittenPrompt(rendered, thinking_open=False, tells_thinking=False)
        if enabled and not is_open:
            # A template that was told to and did not leaves it to the model to begin: the same
            # for a model that would, and what was asked for with one that might not.
            rendered, is_open = self._extended(rendered, f"{form.start}\n"), True
        return WrittenPrompt(rendered, thinking_open=is_open, tells_thinking=True)

    def _with_channels(
        self, rendered: RenderedPrompt, request: GenerationRequest, enabled: bool | None
    ) -> WrittenPrompt:
        """For gpt-oss, whose answers say of each part what it is."""
        if request.continue_final:
            return WrittenPrompt(rendered, thinking_open=False, tells_thinking=False)
        if enabled is False and not offered_tools(request):
            rendered = self._extended(rendered, _FINAL)
            return WrittenPrompt(rendered, thinking_open=False, tells_thinking=False)
        if request.constraint is not None:
            # The grammar is of the final channel's text, so the thinking must come before it and
            # nothing else can.
            rendered = self._extended(rendered, HARMONY.start)
            return WrittenPrompt(rendered, thinking_open=True, tells_thinking=True)
        return WrittenPrompt(rendered, thinking_open=False, tells_thinking=True)

    def _extended(self, rendered: RenderedPrompt, text: str) -> RenderedPrompt:
        return RenderedPrompt((*rendered.segments, *self.segments(text)))


def offered_tools(request: GenerationRequest) -> tuple[Tool, ...]:
    """The tools that the model is told of."""
    return () if request.tool_choice.mode == "none" else request.tools


def shown_literals(literals: Iterable[str], vocabulary: Vocabulary) -> dict[int, bytes]:
    """Those of some literals that are control tokens, for ``PreparedPrompt.shown_tokens``."""
    tokens = vocabulary.control_tokens
    return {tokens[literal]: literal.encode() for literal in literals if literal in tokens}


def _as_template_tool(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _is_open(text: str, form: ReasoningFormat, *, continued: bool) -> bool:
    """Whether a prompt ends inside a block of thinking."""
    start = text.rfind(form.start)
    if start < 0 or text.rfind(form.end) > start:
        return False
    # A prompt that asks for an answer opens the block with its last words. In a turn that is
    # continued there may be thoughts already; an earlier turn's block would have been closed.
    return continued or not text[start + len(form.start) :].strip()
