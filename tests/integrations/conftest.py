"""One server for all tests of a module that leave it as it was."""

import asyncio
from collections.abc import Iterator

import attrs
import httpx
import openai
import pytest

from kvpage import AsyncEngine
from kvpage.integrations.asgi import openai_app
from tests.engine.runners import PATIENCE_S
from tests.integrations.echo import echo_engine, serving


@attrs.frozen
class Served:
    """A server and the engine behind it."""

    url: str
    engine: AsyncEngine

    def client(self) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=3 * PATIENCE_S
        )


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An echo engine, served as `echo`."""
    engine = echo_engine()
    with serving(openai_app(engine)) as url:
        yield Served(url, engine)
    asyncio.run(engine.aclose())


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    """A client that knows nothing of OpenAI."""
    with httpx.Client(base_url=served.url, timeout=3 * PATIENCE_S) as client:
        yield client


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the echo engine."""
    with served.client() as client:
        yield client
