"""The four routes that generate, for tests of what is promised on all of them.

``DIALECTS`` of the shutdown check read the answers: they are written for any server, so they say
what a client says, and not what our encoders think of themselves.
"""

from __future__ import annotations

import json
from typing import Any

from attrs import frozen

from dflash_trio.testing.dialects import DIALECTS, Dialect, events
from dflash_trio.testing.dialects import Answer as Read
from tests.support.http_client import Answer


@frozen
class Route:
    """One generating route: how to ask there, and how to read what comes."""

    name: str

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.name]

    @property
    def path(self) -> str:
        return self.dialect.path

    @property
    def has_template(self) -> bool:
        return self.name != "completions"

    @property
    def limit(self) -> str:
        """The field that bounds an answer."""
        return "max_output_tokens" if self.name == "responses" else "max_tokens"

    def body(self, content: str = "hi", **fields: Any) -> dict[str, Any]:
        """A request whose prompt is what ``PLAIN_TEMPLATE`` makes of ``content``, on every route.

        ``limit`` stands for the route's own field.
        """
        limit = fields.pop("limit", 100 if self.name == "messages" else None)
        if limit is not None:
            fields[self.limit] = limit
        match self.name:
            case "responses":
                return {"input": content, **fields}
            case "completions":
                return {"prompt": f"{content}\n>", **fields}
        return {"messages": [{"role": "user", "content": content}], **fields}

    def raw(self, content: str = "hi", **fields: Any) -> bytes:
        return json.dumps(self.body(content, **fields)).encode()

    def read(self, answer: Answer, *, stream: bool = False) -> Read:
        """A good answer, whole or streamed: complete, with nothing wrong in it."""
        assert answer.status == 200, answer.text
        assert answer.complete
        read = self.dialect.read(answer.body, stream=stream)
        assert read.problem is None, read.problem
        assert read.terminal
        return read

    def model(self, answer: Answer, *, stream: bool = False) -> str:
        """Who answered, as the body says it; the header must say the same."""
        if not stream:
            model = answer.json()["model"]
        else:
            first = json.loads(next(events(answer.body))[1])
            model = (first.get("message") or first.get("response") or first)["model"]
        assert answer.headers["x-dflash-model"] == model
        return str(model)

    def usage(self, answer: Answer) -> dict[str, Any]:
        """Of a whole answer, in chat completions' words for counts."""
        usage = answer.json()["usage"]
        names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
        return {names.get(name, name): value for name, value in usage.items()}

    def error(self, answer: Answer) -> str:
        """What an error says, in this route's own shape: its code, or Anthropic's type for it."""
        body = answer.json()
        assert answer.headers["content-type"] == "application/json"
        assert answer.complete
        if self.name == "messages":
            assert set(body) == {"type", "error", "request_id"}
            assert body["type"] == "error"
            assert set(body["error"]) == {"type", "message"}
            assert body["request_id"] == answer.headers["request-id"]
            return str(body["error"]["type"])
        return str(answer.error["code"])

    def message(self, answer: Answer) -> str:
        return str(answer.json()["error"]["message"])

    def word(self, code: str) -> str:
        """How this route names what OpenAI's APIs call ``code``."""
        if self.name != "messages":
            return code
        return {
            "context_length_exceeded": "invalid_request_error",
            "None": "invalid_request_error",
            "engine_failed": "api_error",
        }.get(code, "overloaded_error")


ROUTES = tuple(map(Route, DIALECTS))
