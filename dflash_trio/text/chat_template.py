"""Messages to prompt, by the model's own Jinja template.

A prompt comes out as segments, control tokens apart from text: see ``control_tokens`` for how what
clients write is kept from becoming a control token, and ``template_sandbox`` for what bounds a
rendering. Everything here is synchronous and may take milliseconds for large prompts, so it
belongs on a thread, not on an event loop. A ``ChatTemplate`` holds no state of a rendering; several
threads may use one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

import attrs
import jinja2

from dflash_trio.text.control_tokens import (
    ControlTokens,
    Guard,
    Marking,
    Segment,
    TemplateWords,
    walk_strings,
)
from dflash_trio.text.render_meter import RenderLimit, RenderMeter
from dflash_trio.text.template_sandbox import (
    METER_VARIABLE,
    TemplateEnvironment,
    TemplateRaised,
    words_of,
)

_MESSAGE_LIMIT = 300  # characters
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


class TemplateError(Exception):
    """A chat template does not compile. The message is one line and names the model."""


class TemplateRefused(Exception):
    """A template cannot render this request. The message is one line, bounded and encodable."""


@attrs.frozen
class RenderedPrompt:
    """A prompt before tokenization."""

    segments: tuple[Segment, ...]
    """In order, none empty, no two texts in a row."""

    @property
    def text(self) -> str:
        """The whole prompt; control tokens and text that looks alike cannot be told apart in it."""
        return "".join(segment.text for segment in self.segments)


class ChatTemplate:
    """One model's compiled chat template."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        label: str,
        control_literals: Iterable[str] | ControlTokens = (),
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = 10.0,
        most_characters: int = 64 * 2**20,
    ) -> None:
        """Compile a template.

        Args:
            source: Jinja text.
            bos_token: its literal, for templates that write it; empty if there is none.
            eos_token: likewise.
            label: names the model in errors.
            control_literals: the vocabulary's control tokens, spelled out.
            now: local time, for templates that tell the model the date.
            clock: monotonic seconds, for the time limit.
            seconds: how long one rendering may take, plus one operation.
            most_characters: how much one rendering may write, text inside of macros included.

        Raises:
            TemplateError: the source is not a template.
        """
        environment = TemplateEnvironment()
        try:
            tree = environment.parse(source)
            spoken, written = words_of(tree)
            code = environment.compile(environment.metered(tree), name="chat template")
            self._template = environment.template_class.from_code(
                environment, code, environment.make_globals(None)
            )
        except jinja2.TemplateSyntaxError as error:
            line = _one_line(f"{error.message or 'syntax error'} (line {error.lineno})")
            raise TemplateError(f"{label}: bad chat template: {line}") from error
        except Exception as error:  # such as RecursionError, OverflowError, Python's SyntaxError
            line = _one_line(f"{type(error).__name__}: {error}")
            raise TemplateError(f"{label}: bad chat template: {line}") from error
        if isinstance(control_literals, ControlTokens):
            tokens = control_literals
        else:
            tokens = ControlTokens(control_literals)
        self.label = label
        """Names the model in errors."""
        self._spoken = frozenset(spoken)
        words = TemplateWords.of(
            spoken=spoken, written=[*written, bos_token, eos_token], source=source
        )
        self._guard = Guard(tokens, words)
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now
        self._clock = clock
        self._seconds = seconds
        self._most_characters = most_characters

    def mentions(self, word: str) -> bool:
        """Whether the template uses a variable, attribute or string constant of this name.

        Tells, for example, whether it does anything with ``tools`` or ``enable_thinking``.
        """
        return word in self._spoken

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> RenderedPrompt:
        """The prompt for a conversation.

        Args:
            messages: JSON-like, best after ``messages.normalise``. All strings in them are client
                text, but for ``role``, which must come from a closed set.
            add_generation_prompt: end the prompt with the opening of an assistant turn.
            continue_final: end it right after the content of the last message, an assistant's,
                blanks at its end included, with nothing closing the turn.
            tools: JSON-like, client text.
            extra: further variables of the client's. They cannot replace what the server sets,
                other than ``date_string`` and ``datetime``.

        Raises:
            TemplateRefused: the template raised an error, needed too much time or space, or did
                not show the content that was to be continued.
            ValueError: ``continue_final`` with ``add_generation_prompt``, or without a final
                assistant message whose content is a string.
        """
        if continue_final:
            if add_generation_prompt:
                raise ValueError("a continued turn has no generation prompt")
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
                raise ValueError("only the content of a final assistant message can be continued")
        try:
            turns, functions = (
                [dict(turn) for turn in messages],
                [dict(tool) for tool in tools or ()],
            )
            given = dict(extra or {})
            marking = self._guard.marking(walk_strings([turns, functions, given]))
            variables = self._variables(turns, functions, given, marking)
        except (ValueError, RecursionError) as error:
            raise TemplateRefused(_one_line(f"the messages cannot be rendered: {error}")) from error
        if continue_final:
            _append_marker(variables["messages"], marking.marker)
        variables["add_generation_prompt"] = add_generation_prompt
        variables[METER_VARIABLE] = RenderMeter(
            self._clock() + self._seconds, self._most_characters, self._clock
        )
        try:
            rendered = self._template.render(variables)
        except RenderLimit as error:
            raise TemplateRefused(str(error)) from error
        except TemplateRaised as error:
            raise TemplateRefused(
                _one_line(marking.restore(f"the chat template refused the messages: {error}"))
            ) from error
        except Exception as error:  # whatever a stranger's template can come up with
            reason = marking.restore(f"{type(error).__name__}: {error}")
            raise TemplateRefused(
                _one_line(f"the chat template failed on these messages: {reason}")
            ) from error
        if continue_final:
            end = rendered.rfind(marking.marker)
            if end < 0:
                raise TemplateRefused(
                    "the chat template does not show the end of the final assistant message, "
                    "so it cannot be continued"
                )
            rendered = rendered[:end].replace(marking.marker, "")
        return RenderedPrompt(marking.split(rendered))

    def _variables(
        self,
        messages: list[dict[str, object]],
        tools: list[dict[str, object]],
        extra: dict[str, object],
        marking: Marking,
    ) -> dict[str, object]:
        now = self._now()
        day, month = f"{now.day:02d}", _MONTHS[now.month - 1]
        reserved = self._template.globals.keys() | {METER_VARIABLE}
        return {
            # Month names as models know them, whatever the locale.
            "date_string": f"{day} {month} {now.year}",
            "datetime": f"{month} {day} {now.year}",
            **{
                name: marking.mark_all(value)
                for name, value in extra.items()
                if name not in reserved
            },
            "strftime_now": lambda form: self._now().strftime(form),
            "documents": marking.mark_all(extra.get("documents")),
            "messages": [
                {
                    key: value if key == "role" else marking.mark_all(value)
                    for key, value in message.items()
                }
                for message in messages
            ],
            "tools": marking.mark_all(tools) or None,
            **self._special,
        }


def _append_marker(messages: object, marker: str) -> None:
    assert isinstance(messages, list)
    messages[-1]["content"] += marker


def _one_line(text: str) -> str:
    """A text fit for an error message: printable, on one line, bounded, encodable."""
    encodable = text[: 4 * _MESSAGE_LIMIT].encode("utf-8", "replace").decode()
    printable = "".join(char if char.isprintable() else " " for char in encodable)
    line = " ".join(printable.split())
    return line if len(line) <= _MESSAGE_LIMIT else line[: _MESSAGE_LIMIT - 1] + "…"
