"""The domain's errors, in no API's shape. Dialects turn them into status codes and bodies."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


class GenerationError(Exception):
    """A request that gets no answer. ``str()`` is one sentence for people."""


class InvalidRequest(GenerationError):
    """The request itself is wrong, whatever the server's state.

    ``param`` names the field (``messages[1].content``); ``code`` is an API-neutral word.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@frozen
class ModelRoom:
    """How much one model could take, for the error that says nothing fits."""

    name: str
    prompt_tokens: int | None
    """In that model's tokenizer; ``None`` when the request was refused uncounted."""
    room: int
    """min(max context, KV pool), in tokens."""


class PromptTooLong(GenerationError):
    """Fits no model: prompt tokens and each model's room are in the message."""

    def __init__(self, rooms: Sequence[ModelRoom], *, body: tuple[int, int] | None = None) -> None:
        """``body``: (bytes sent, bytes allowed) when the size alone decided."""
        shown = "; ".join(
            f"{room.name}: {room.prompt_tokens} prompt tokens, room {room.room}"
            if room.prompt_tokens is not None
            else f"{room.name}: room {room.room}"
            for room in rooms
        )
        if body is not None:
            super().__init__(
                f"The request is too long: {body[0]} bytes, and no loaded model can hold more "
                f"than {body[1]} bytes of text ({shown}). Shorten the conversation."
            )
        else:
            super().__init__(
                "The prompt is too long for every loaded model "
                f"({shown}; one token of room is needed for the answer). "
                "Shorten the conversation."
            )
        self.rooms = tuple(rooms)


class QueueFull(GenerationError):
    """Every model that fits is busy, and the waiting queue is at its limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            "Every model that fits this request is busy and the waiting queue is full "
            f"({limit} waiting at most). Try again shortly."
            if limit
            else "Every model that fits this request is busy and this server keeps no waiting "
            "queue. Try again shortly."
        )


class PreparationFull(GenerationError):
    """Too many bytes of request bodies are held already."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The server already holds {limit // 2**20} MiB of request bodies that wait to be "
            "prepared. Try again shortly."
        )


class Draining(GenerationError):
    """The server is shutting down and takes no new work."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down and takes no new requests.")


class Loading(GenerationError):
    """The models are not loaded yet."""

    def __init__(self) -> None:
        super().__init__("The models are still loading. Try again in a few seconds.")


class EngineFailed(GenerationError):
    """The engine died, or could not go on with this request."""


class ModelNotNamed(InvalidRequest):
    """Several models are loaded, and what was asked depends on which one is meant."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            "model: is required here, since several models are loaded and each has its own "
            f"tokenizer: {', '.join(names)}.",
            param="model",
        )


class UnknownModel(GenerationError):
    """No loaded model has this name, and the name matters."""

    def __init__(self, shown_name: str, names: Sequence[str]) -> None:
        """``shown_name``: what was asked for, in a form fit for a message."""
        super().__init__(
            f"No loaded model is called {shown_name}. Loaded: {', '.join(names)}; "
            "aliases count as names."
        )


class Unhealthy(GenerationError):
    """Only models whose engine is unhealthy could take this request."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"The only models that could take this request are not healthy: {', '.join(names)}."
        )
