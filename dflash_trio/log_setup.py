"""Logging for a server's operator: one line each on stderr, for people or for machines.

Everything that is logged comes through here, by structlog or by the standard library, and leaves as
one line, whatever a client wrote into it: nothing that ends a line or commands a terminal gets
through. A line that cannot be written is lost; whoever logged it never hears of it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog

from .console import complain

Entry = MutableMapping[str, Any]


def set_up_logging(style: Literal["console", "json"], level: str) -> None:
    """Send the project's log lines to stderr. Other libraries' come from warnings up."""
    render = render_json if style == "json" else render_console
    handler = StderrHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[_describe, structlog.processors.format_exc_info, render]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("dflash_trio").setLevel(level.upper())


class StderrHandler(logging.Handler):
    """Writes each line to standard error by one system call, with nothing left in a buffer.

    A stream that is closed, gone, full or cannot spell a character never raises: what cannot be
    spelled is escaped, and what cannot be written is lost.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:
            line = f"a log line of {record.name} could not be written: {type(error).__name__}"
        complain(f"{line}\n")


def _describe(_logger: Any, _method: str, event: Entry) -> Entry:
    """An entry in our words, in the order in which it is read: structlog's own is by name."""
    record: logging.LogRecord = event.pop("_record")
    event.pop("_from_structlog")
    return {
        "time": record.created,
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": event.pop("event"),
        **event,
    }


def render_json(_logger: Any, _method: str, entry: Entry) -> str:
    """One JSON object in ASCII: time (ISO 8601, UTC), level, logger, message, what else there is,
    and the traceback."""
    seconds, milliseconds = divmod(int(entry["time"] * 1000), 1000)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    shown = {**entry, "time": f"{stamp}.{milliseconds:03}Z"}
    if (traceback := shown.pop("exception", None)) is not None:
        shown["traceback"] = traceback
    # JSON leaves DEL as it is, which some terminals obey.
    return json.dumps(shown, ensure_ascii=True, default=str).replace("\x7f", "\\u007f")


def render_console(_logger: Any, _method: str, entry: Entry) -> str:
    """``time LEVEL message name=value ...``; values that are ``None`` are left out. A traceback
    follows line by line, each behind a bar that no entry begins with."""
    rest = dict(entry)
    stamp = time.strftime("%H:%M:%S", time.localtime(rest.pop("time")))
    level, message = rest.pop("level").upper(), printable(str(rest.pop("message")))
    del rest["logger"]
    traceback = rest.pop("exception", None)
    words = [f"{stamp} {level:<7} {message}"]
    words += [f"{name}={_value(value)}" for name, value in rest.items() if value is not None]
    lines = [" ".join(words)]
    if traceback is not None:
        lines += [f"    | {printable(line)}" for line in traceback.split("\n")]
    return "\n".join(lines)


def _value(value: Any) -> str:
    text = printable(str(value))
    return text if text and not set(text) & set(' "=') else json.dumps(text, ensure_ascii=False)


def printable(text: str) -> str:
    """The text with everything escaped that is not to be seen: line ends, terminal commands,
    direction marks, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )
