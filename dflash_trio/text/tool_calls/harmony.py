"""The channels of gpt-oss's output, told apart as it comes.

A model of this family writes messages: a header with a channel and perhaps a recipient, then
text. ``analysis`` is thinking, ``final`` the answer, and ``commentary`` to ``functions.NAME`` the
arguments of a call; ``commentary`` to nobody is said to the user before a call.

Who reads them:

* OpenAI's own parser (``openai_harmony.StreamableParser``), where the model's vocabulary is the one
  it knows, ``o200k_harmony``: see ``load_encoding``. It raises on a message out of order;
* the model's control tokens alone, for other vocabularies (fine-tunes that added tokens, the
  short vocabularies of test models), and from the first message that the library refuses. These
  are followed from the start, so the change loses nothing.
"""

from __future__ import annotations

import base64
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ...generation.events import CONTENT, REASONING, TOOL_PREFIX

# The library takes a while to import, and only these models need it: it is imported where it is
# used.
if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding  # type: ignore[import-untyped]

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
CONTROLS = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN})
"""Control tokens that are the format's own, which the engine would otherwise hide."""

_FOLDER_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
_FILE = "o200k_base.tiktoken"
_RANKS = 199_998
"""Tokens of the base vocabulary; control tokens come behind them."""
_FUNCTIONS = "functions."
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*([^\s<]*)")
_LITERALS = re.compile(f"({'|'.join(map(re.escape, sorted(CONTROLS)))})")
_TO = "to="
_BLANKS = 64
"""So many characters that are no header yet are the beginning of an answer."""
_RECIPIENT = re.compile(r"(?:^|\s|>)to=([^\s<]+)")


@frozen
class Header:
    """What a message's header says."""

    channel: str | None
    recipient: str | None

    @property
    def tool(self) -> str | None:
        """The tool that the message calls. One of no function of ours goes by its whole name, so
        that the client decides about it."""
        if self.recipient in (None, "all", "user", "assistant"):
            return None
        return self.recipient.removeprefix(_FUNCTIONS) or None

    @property
    def output(self) -> str:
        """The channel of ``generation.events`` that the message's text belongs to."""
        if self.tool is not None:
            return TOOL_PREFIX + self.tool
        return REASONING if self.channel == "analysis" else CONTENT


def parse_header(text: str) -> Header:
    """Reads what stands before ``<|message|>``, control tokens by their literals."""
    channel, recipient = _CHANNEL_NAME.search(text), _RECIPIENT.search(text)
    return Header(channel and channel[1], recipient and recipient[1])


def load_encoding(vocabulary: Iterable[bytes]) -> HarmonyEncoding | None:
    """The library's encoding, if it is the vocabulary of the model: its tokens in their order.

    The library would download the vocabulary. Instead it is given the model's own as a file, whose
    hash it checks, so that what it reads are the tokens that the model writes. The environment
    variable that names the file's folder stays set for the rest of the process, though the folder
    is gone then: so the library never goes to the network, whoever asks it. Loaded by two threads
    at once, one of them may get ``None``.

    ``None``: another vocabulary. Raises OSError if no file can be written. Takes about half a
    second and belongs on the thread that loads the model.
    """
    from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding

    with tempfile.TemporaryDirectory(prefix="dflash-harmony-") as folder:
        lines = (
            base64.b64encode(token) + b" %d\n" % rank
            for rank, token in enumerate(islice(vocabulary, _RANKS))
        )
        Path(folder, _FILE).write_bytes(b"".join(lines))
        os.environ[_FOLDER_VARIABLE] = folder
        try:
            return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        except HarmonyError:
            return None


class HarmonySplitter:
    """Tells one answer's channels apart, from behind a prompt that ended in
    ``<|start|>assistant``."""

    def __init__(
        self,
        *,
        starts_open: bool = False,
        controls: Mapping[int, str] | None = None,
        encoding: HarmonyEncoding | None = None,
    ) -> None:
        """``starts_open``: the prompt went on until inside a message of thinking.

        ``controls``: the model's control tokens of the format, by id: a literal then counts as one
        only where its token came. ``None``: literals count where they come whole in one push,
        which they do not if the model writes one letter by letter.

        ``encoding``: of ``load_encoding``; then each push is of one token.
        """
        self._by_literals = _LiteralSplitter(controls, REASONING if starts_open else None)
        self._by_library = (
            _LibrarySplitter(encoding) if encoding is not None and not starts_open else None
        )

    @property
    def thinking(self) -> bool:
        """Inside a message of thinking. Not so before its header is complete."""
        return self._by_literals.output == REASONING

    def push(self, text: str, token: int) -> list[tuple[str, str]]:
        """What a token says: (channel, text) in order, no text empty. A call that ends without
        arguments has those of an empty object.

        ``text``: what the token made known, control tokens by their literals; text that an earlier
        token held back may come before.
        """
        found = self._by_literals.push(text, token)
        if self._by_library is not None:
            in_message = self._by_literals.output is not None
            if self._by_literals.in_order and self._by_library.push(token, in_message=in_message):
                found = self._by_library.found
            else:
                self._by_library = None
        return found

    def finish(self) -> list[tuple[str, str]]:
        """The answer has ended. A header that was left incomplete says nothing."""
        return self._by_literals.finish()


class _LibrarySplitter:
    """Follows OpenAI's parser."""

    def __init__(self, encoding: HarmonyEncoding) -> None:
        from openai_harmony import HarmonyError, Role, StreamableParser

        self._error: type[Exception] = HarmonyError
        self._parser: Any = StreamableParser(encoding, Role.ASSISTANT)
        self._in_message = False
        self._tool = ""
        """The channel of a call that has no arguments yet."""
        self.found: list[tuple[str, str]] = []
        """What the last token said."""

    def push(self, token: int, *, in_message: bool) -> bool:
        """False: the parser refuses the token.

        ``in_message``: the token is in a message or is the end of its header. The parser's own
        state would tell, but asking for it copies all of the message, at each token.
        """
        if token < 0:
            return False  # bytes that were held back; the control tokens' reader has them
        parser, self.found = self._parser, []
        was_in_message = self._in_message
        try:
            parser.process(token)
        except self._error:
            return False
        if not in_message:
            if self._tool:
                self.found.append((self._tool, "{}"))
            self._tool = ""
        else:
            output = Header(parser.current_channel, parser.current_recipient).output
            if delta := parser.last_content_delta:
                self.found.append((output, delta))
                self._tool = ""
            elif not was_in_message and output.startswith(TOOL_PREFIX):
                self._tool = output
        self._in_message = in_message
        return True


class _LiteralSplitter:
    """Follows the control tokens alone."""

    def __init__(self, controls: Mapping[int, str] | None, output: str | None) -> None:
        self._controls = controls
        self._header: list[str] = []
        self._empty = True
        self._at_start = output is None
        """Nothing has come that a header has: the model may answer without any."""
        self.output = output
        """The channel of the message that is being written; ``None``: a header is, or nothing."""
        self.in_order = True
        """All control tokens came where they belong."""

    def push(self, text: str, token: int) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for part, is_control in self._split(text, token):
            if is_control:
                self._control(part, found)
            elif self.output is None:
                self._header.append(part)
                if self._at_start:
                    self._start(found)
            else:
                self._empty = False
                found.append((self.output, part))
        return found

    def finish(self) -> list[tuple[str, str]]:
        text = "".join(self._header)
        return [(CONTENT, text)] if self._at_start and text else []

    def _start(self, found: list[tuple[str, str]]) -> None:
        """Whether what has come without a control token is no header's beginning, but an answer."""
        text = "".join(self._header)
        begins = text.lstrip()[: len(_TO)]
        if _TO.startswith(begins) and len(text) < _BLANKS:
            self._at_start = begins != _TO
            return
        self.output, self.in_order, self._at_start, self._empty = CONTENT, False, False, False
        self._header.clear()
        found.append((CONTENT, text))

    def _split(self, text: str, token: int) -> Iterator[tuple[str, bool]]:
        if self._controls is None:
            parts = _LITERALS.split(text)
            yield from ((part, bool(at % 2)) for at, part in enumerate(parts) if part)
            return
        control = self._controls.get(token, "")
        if plain := text.removesuffix(control):
            yield plain, False
        if control:
            yield control, True

    def _control(self, control: str, found: list[tuple[str, str]]) -> None:
        self._at_start = False
        if self.output is None:
            if control == MESSAGE:
                self.output = parse_header("".join(self._header)).output
                self._header.clear()
                self._empty = True
            elif control in (START, END, CALL, RETURN):
                self._header.clear()
            else:
                self._header.append(control)
            return
        if control in (MESSAGE, CONSTRAIN):
            self.in_order = False
            return
        if self._empty and self.output.startswith(TOOL_PREFIX):
            found.append((self.output, "{}"))
        self.output = None
        if control in (START, CHANNEL):
            # A message that was not ended: the next one's header begins.
            self.in_order = False
            self._header = [control] if control == CHANNEL else []
