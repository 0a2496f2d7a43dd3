"""The OpenAPI document, and a server that keeps to it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode

from kvpage.blocks import PoolGeometry
from kvpage.integrations.asgi import openai_app
from kvpage.integrations.openai.document import openapi_document
from tests.integrations.echo import echo_engine, serving


@pytest.fixture(scope="module")
def short() -> Iterator[str]:
    """A server whose answers are short, since nobody reads them."""
    engine = echo_engine(geometry=PoolGeometry(num_blocks=256, block_size=16, max_model_len=64))
    with serving(openai_app(engine)) as url:
        yield url
    asyncio.run(engine.aclose())


SCHEMA = schemathesis.openapi.from_dict(openapi_document(["echo"]))
OPERATIONS = [
    (method.upper(), path, mode)
    for path, methods in openapi_document(["echo"])["paths"].items()
    for method in methods
    for mode in GenerationMode
    if method == "post" or mode == GenerationMode.POSITIVE  # a GET has nothing to be wrong
]

# What is right by the schema may still be too long, or contradict itself.
EXCLUDED: Any = [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_requests(short: str, method: str, path: str, mode: GenerationMode) -> None:
    """By the document and against it: statuses, shapes and content types are as it says."""
    check(short, method, path, mode, max_examples=5)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_many_requests(short: str, method: str, path: str, mode: GenerationMode) -> None:
    """The same, longer."""
    check(short, method, path, mode, max_examples=500)


def check(url: str, method: str, path: str, mode: GenerationMode, *, max_examples: int) -> None:
    @hypothesis.settings(max_examples=max_examples, deadline=None)
    @hypothesis.given(SCHEMA[path][method].as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        case.call_and_validate(base_url=url, excluded_checks=EXCLUDED)

    call()


def test_the_document_names_the_models(http: httpx.Client) -> None:
    """As the only ones that a request may ask for."""
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "ResponseRequest"):
        assert schemas[name]["properties"]["model"] == {"enum": ["echo"]}
