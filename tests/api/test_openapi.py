"""The server's description of itself is complete, and a live server behaves as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import attrs
import jsonschema
import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dflash_trio.api.access import AccessPolicy
from dflash_trio.api.app import DflashApp
from dflash_trio.api.field_schemas import describe, schema_of
from dflash_trio.api.openapi import OPERATIONS, Operation, openapi_document, plain_route
from dflash_trio.api.sampling_fields import LogitBias, SamplingFields, StopStrings
from dflash_trio.api.status_page import StatusPage
from dflash_trio.api.validation import FieldProblem, converter, in_range
from dflash_trio.routing.router import Router
from tests.support.http_client import request
from tests.support.running import running, scripted_process
from tests.support.scripted import scripted_config, scripted_load

EXAMPLES = 20
"""Requests for each operation, well-formed and again as many that are not."""


def routes() -> set[tuple[str, str]]:
    """Method and path, without ``/v1``, of everything that the application answers."""
    app = DflashApp(
        Router(queue_limit=0),
        lambda: pytest.fail("no status is wanted"),
        access=AccessPolicy((), local_only=False),
        max_body_bytes=1,
        stall_timeout=1,
    )
    found = set()
    for rule in app.url_map.iter_rules():
        path = plain_route(rule.rule)
        found |= {
            (method, path) for method in rule.methods or () if method not in ("HEAD", "OPTIONS")
        }
    return found


def test_every_route_is_described_and_nothing_else_is() -> None:
    described = {(each.method, each.path.removeprefix("/v1")) for each in OPERATIONS}
    assert described == routes()


def test_the_names_of_bodies_and_operations_are_unique() -> None:
    document = openapi_document(keyed=False)
    ids = [entry["operationId"] for path in document["paths"].values() for entry in path.values()]
    assert len(set(ids)) == len(ids) == len(OPERATIONS)


def test_every_schema_is_one() -> None:
    for schema in openapi_document(keyed=False)["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@attrs.frozen
class Inner:
    text: str
    flag: bool | None = None


@attrs.frozen
class Outer:
    inner: tuple[Inner, ...]
    number: float | None = attrs.field(default=None, validator=in_range(0, 2))
    above: int = attrs.field(default=1, validator=in_range(0, exclusive_low=True))


def test_fields_say_their_type_their_bounds_and_whether_they_are_needed() -> None:
    inner = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["text"],
    }
    assert schema_of(Outer) == {
        "type": "object",
        "properties": {
            "inner": {"type": "array", "items": inner},
            "number": {
                "anyOf": [{"type": "number"}, {"type": "null"}],
                "minimum": 0,
                "maximum": 2,
            },
            "above": {"type": "integer", "exclusiveMinimum": 0},
        },
        "required": ["inner"],
    }


@attrs.frozen
class Odd:
    inside: int


def test_a_type_with_a_hook_of_its_own_is_as_described_or_may_be_anything() -> None:
    converter.register_structure_hook(Odd, lambda value, _: Odd(value))
    assert schema_of(Odd) == {}
    describe(Odd, {"type": "integer"})
    assert schema_of(Odd) == {"type": "integer"}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (StopStrings, value)
        for value in (None, "x", "", [], ["x"], [""], [5], ["x"] * 65, 5, "x" * 4097)
    ]
    + [(LogitBias, value) for value in (None, {}, {"5": 100}, {"5": 101}, {"x": 1}, [], 5)]
    + [
        (SamplingFields, value)
        for value in ({"top_p": 1}, {"top_p": 1.1}, {"top_p": None}, {"seed": -2}, {"seed": "1"})
    ],
)
def test_what_is_described_is_what_is_taken(kind: Any, value: Any) -> None:
    try:
        converter.structure(value, kind)
        taken = True
    except (FieldProblem, ExceptionGroup):
        taken = False
    assert jsonschema.Draft202012Validator(schema_of(kind)).is_valid(value) is taken


async def test_with_keys_the_document_wants_one_and_says_so() -> None:
    async with running((scripted_config(), scripted_load()), api_keys=(b"k",)) as server:
        assert (await request(server.port, "GET", "/openapi.json")).status == 401
        document = (await request(server.port, "GET", "/openapi.json", **{"x-api-key": "k"})).json()
    assert document["security"] == [{"bearer": []}, {"apiKey": []}]
    assert document == openapi_document(keyed=True)
    async with running((scripted_config(), scripted_load())) as server:
        document = (await request(server.port, "GET", "/v1/openapi.json")).json()
    assert {} in document["security"]


# --------------------------------------------------------------------- against a live server

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [104, 105]},
    "/apply-template": CHAT,
}
"""A body for each route that has one."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = {"slots": 4, "max_ctx": 256, "answer": "Well."}
    with scripted_process(model) as server:
        trio.run(server.until_ready)
        yield server.url
        # What goes wrong behind a good answer is told nowhere else.
        assert "Traceback" not in server.log


def asking(operation: Operation, url: str, *, well_formed: bool) -> set[int]:
    """Ask for it in many ways and hold every answer against the document; the statuses seen."""
    schema = schemathesis.openapi.from_dict(openapi_document(keyed=False))
    mode = GenerationMode.POSITIVE if well_formed else GenerationMode.NEGATIVE
    described = schema[operation.path][operation.method]
    statuses = set()

    @given(described.as_strategy(generation_mode=mode), st.data())
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any, data: st.DataObject) -> None:
        if well_formed and isinstance(case.body, dict):
            # All fields at once are hardly ever right together: few of them, beside good ones.
            names = st.sampled_from(sorted(case.body) or [""])
            chosen = data.draw(st.lists(names, max_size=3, unique=True))
            few = {name: case.body[name] for name in chosen if name in case.body}
            case.body = {**few, **GOOD[operation.path]}
        if well_formed and data.draw(st.booleans()):
            if "name" in case.path_parameters:
                case.path_parameters["name"] = "scripted"
            if "response_id" in case.path_parameters:
                case.path_parameters["response_id"] = new_response(url)
            if "version" in case.path_parameters:
                case.path_parameters["version"] = StatusPage(keyed=False).version
                case.path_parameters["file"] = data.draw(st.sampled_from(["main.js", "style.css"]))
        response = case.call(base_url=url, timeout=30)
        statuses.add(response.status_code)
        case.validate_response(
            response,
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ],
        )

    ask()
    return statuses


def new_response(url: str) -> str:
    body = json.dumps({"input": "hi", "store": True}).encode()
    asked = Request(f"{url}/v1/responses", body, {"content-type": "application/json"})
    with urlopen(asked, timeout=30) as made:
        return str(json.load(made)["id"])


@pytest.mark.parametrize(
    "operation",
    # That one's answer has no end; tests of its own read it.
    [each for each in OPERATIONS if each.path != "/status/stream"],
    ids=lambda each: f"{each.method} {each.path}",
)
def test_a_live_server_answers_good_requests_as_described(operation: Operation, url: str) -> None:
    assert 200 in asking(operation, url, well_formed=True)


@pytest.mark.parametrize(
    "operation",
    # Without a body and a query there is nothing to get wrong.
    [each for each in OPERATIONS if each.bodies or each.query],
    ids=lambda each: f"{each.method} {each.path}",
)
def test_a_live_server_refuses_bad_requests_as_described(operation: Operation, url: str) -> None:
    assert asking(operation, url, well_formed=False) & {400, 404}
