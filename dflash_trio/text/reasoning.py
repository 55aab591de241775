"""What of a model's output is thinking, and what is its answer, per model family.

A model that thinks writes a block of it before its answer, between two markers. Some templates open
the block in the prompt already. What is between the markers is thinking; the markers and the blanks
beside them belong to neither. A marker later in the answer is text.
"""

from __future__ import annotations

from attrs import frozen

from ..generation.events import CONTENT, REASONING


@frozen
class ReasoningFormat:
    """How a family of models marks its thinking."""

    name: str
    start: str
    end: str
    close: str
    """What the engine says in the model's place to close the block."""
    resume: str = ""
    """What it says after the model has closed the block and before an answer under a grammar."""

    @property
    def literals(self) -> frozenset[str]:
        """What of it may be control tokens, which would otherwise not show in the output."""
        return frozenset({self.start, self.end})


def _tags(name: str, start: str, end: str) -> ReasoningFormat:
    return ReasoningFormat(name, start, end, f"\n{end}\n\n")


THINK = _tags("think", "<think>", "</think>")
HARMONY = ReasoningFormat(
    "gpt-oss",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|start|>assistant<|channel|>final<|message|>",
)
FORMATS: dict[str, ReasoningFormat] = {
    f.name: f
    for f in (
        THINK,
        _tags("seed", "<seed:think>", "</seed:think>"),
        _tags("mistral", "[THINK]", "[/THINK]"),
        _tags("command", "<|START_THINKING|>", "<|END_THINKING|>"),
        HARMONY,
    )
}


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """The format that a chat template's source speaks of; ``None`` for models that do not think."""
    if "<|channel|>" in template and "<|start|>" in template:
        return HARMONY
    tags = (form for form in FORMATS.values() if form is not HARMONY)
    return next((form for form in tags if form.start in template or form.end in template), None)


class ThinkSplitter:
    """For formats with a start and an end marker. ``starts_open``: the prompt has opened the
    block."""

    def __init__(self, form: ReasoningFormat, *, starts_open: bool) -> None:
        self._form = form
        # The states are the methods that read the text: before the answer has begun, inside the
        # block, after it.
        self._read = self._inside if starts_open else self._before
        self._held = ""
        # Blanks beside the markers are dropped as long as nothing else has come.
        self._at_start = True

    @property
    def thinking(self) -> bool:
        return self._read == self._inside

    def push(self, text: str, token: int) -> list[tuple[str, str]]:
        if self._read == self._plain:
            return [(CONTENT, text)] if text else []
        self._held += text
        out: list[tuple[str, str]] = []
        while True:
            read = self._read
            read(out)
            if self._read == read:
                return out

    def finish(self) -> list[tuple[str, str]]:
        held, self._held = self._held, ""
        if self.thinking:
            # A marker that did not come to its end is text; blanks at the end are not.
            held = (held.lstrip() if self._at_start else held).rstrip()
            return [(REASONING, held)] if held else []
        return [(CONTENT, held)] if held and self._read != self._after else []

    def _before(self, out: list[tuple[str, str]]) -> None:
        text = self._held.lstrip()
        if text.startswith(self._form.start):
            self._held = text[len(self._form.start) :]
            self._read = self._inside
        elif not self._form.start.startswith(text):
            self._go_plain(out)

    def _inside(self, out: list[tuple[str, str]]) -> None:
        if self._at_start:
            self._held = self._held.lstrip()
            if not self._held:
                return
        thought, end, rest = self._held.partition(self._form.end)
        if end:
            thought = thought.rstrip()
            self._held = rest
            self._read = self._after
        else:
            keep = _held_back(self._held, self._form.end)
            thought, self._held = self._held[:keep], self._held[keep:]
        if thought:
            self._at_start = False
            out.append((REASONING, thought))

    def _after(self, out: list[tuple[str, str]]) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._go_plain(out)

    def _go_plain(self, out: list[tuple[str, str]]) -> None:
        if self._held:
            out.append((CONTENT, self._held))
        self._held = ""
        self._read = self._plain

    def _plain(self, out: list[tuple[str, str]]) -> None:
        pass


def _held_back(text: str, marker: str) -> int:
    """Where the end of a text begins that may still turn out to be blanks and a marker."""
    length = next(
        (n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0
    )
    return len(text[: len(text) - length].rstrip())
