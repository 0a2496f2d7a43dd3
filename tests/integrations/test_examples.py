"""The programs in `examples/apps`, under uvicorn on loopback, with clients that leave."""

import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from kvpage import AsyncEngine
from tests.engine.runners import PATIENCE_S
from tests.engine.scenes import BACKENDS
from tests.integrations.echo import EchoRunner, cancelled, echo_engine, serving

FOLDER = Path(__file__).parents[2] / "examples" / "apps"
ENDLESS = "ab"
"""The echo engine continues it with the alphabet, over and over."""


def example(name: str) -> Any:
    """A program, imported as its readers would."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Litestar and Django look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def runner() -> EchoRunner:
    """Three steps, and no more until the test lets it."""
    return EchoRunner(free_steps=3)


def test_each_is_short() -> None:
    """Under 60 lines, with all that it needs."""
    programs = [*FOLDER.glob("*.py")]
    assert programs
    assert {p.name: n for p in programs if (n := len(p.read_text().splitlines())) >= 60} == {}


LONG_ANSWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fastapi_app": ("GET", "/story", {"params": {"opening": ENDLESS, "max_tokens": 400}}),
    "starlette_app": ("POST", "/stream", {"content": ENDLESS}),
    **{
        name: (
            "POST",
            "/llm/v1/completions",
            {"json": {"model": model, "prompt": ENDLESS, "max_tokens": 400, "stream": True}},
        )
        for name, model in (
            ("litestar_app", "echo"),
            ("django_app", "echo"),
            ("chat_page", "chat"),
        )
    },
}


@pytest.mark.parametrize("name", LONG_ANSWERS)
async def test_a_client_that_leaves_frees_its_blocks(name: str, runner: EchoRunner) -> None:
    """It reads a little and closes the connection; the next client is served."""
    method, path, body = LONG_ANSWERS[name]
    engine = echo_engine(runner)
    with serving(example(name).make_app(engine), lifespan="on") as url:
        async with (
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
            client.stream(method, path, **body) as answer,
        ):
            assert answer.status_code == 200
            await anext(answer.aiter_bytes())
        await cancelled(engine, runner)
        assert engine.stats().pool.used_blocks == 0
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            whole = await client.request(method, path, **body)
        assert "yzabcdef" in whole.text.replace("\n", "") or "DONE" in whole.text
    assert engine.health().state == "closed"


async def test_starlette_answers_in_time_or_not_at_all(runner: EchoRunner) -> None:
    """A whole answer; after its seconds 503, and the blocks are back."""
    module = example("starlette_app")
    engine = echo_engine(runner)
    runner.gate.open()
    with serving(module.make_app(engine), lifespan="on") as url:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            assert (await client.post("/answer", content="Hello")).text == "Hello\n"
            too_long = await client.post("/answer", content="a" * 600)
            assert (too_long.status_code, "512" in too_long.text) == (400, True)
            module.SECONDS = 0
            assert (await client.post("/answer", content="Hello")).status_code == 503
            await engine.idle()
            assert engine.stats().pool.used_blocks == 0


@pytest.mark.parametrize("name", ["litestar_app", "django_app"])
async def test_the_program_has_pages_of_its_own(name: str) -> None:
    """The mount takes only its own path."""
    with serving(example(name).make_app(echo_engine()), lifespan="on") as url:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            assert (await client.get("/")).text == "The models are at /llm/v1."
            assert (await client.get("/llm/v1/models")).json()["data"][0]["id"] == "echo"


async def test_openai_s_client_talks_to_the_mount() -> None:
    """The example of a client with the example of a server."""
    with serving(example("fastapi_app").make_app(echo_engine()), lifespan="on") as url:
        answer = example("openai_client").answer
        texts = await anyio.to_thread.run_sync(lambda: [*answer(f"{url}/llm/v1", "Hello")])
        assert "".join(texts) == "Hello"


@asynccontextmanager
async def tcp_server(engine: AsyncEngine) -> AsyncIterator[int]:
    """The TCP server of the examples; yields its port."""
    serve: Callable[..., Any] = example("anyio_server").serve
    async with anyio.create_task_group() as tasks:
        yield await tasks.start(serve, engine, 0)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tcp_server(backend: str, runner: EchoRunner) -> None:
    """Lines are continued; a client that leaves frees its blocks; a bad line is told why."""

    async def main() -> None:
        engine = echo_engine(runner)
        async with tcp_server(engine) as port:
            async with await anyio.connect_tcp("127.0.0.1", port) as client:
                await client.send(b"ab\n")
                assert await client.receive() == b"c"
            await cancelled(engine, runner)
            async with await anyio.connect_tcp("127.0.0.1", port) as client:
                await client.send(b"ab\n")
                with anyio.fail_after(PATIENCE_S):
                    text = b""
                    while not text.endswith(b"\n"):
                        text += await client.receive()
                assert len(text) == 401
            async with await anyio.connect_tcp("127.0.0.1", port) as client:
                await client.send(b"a" * 600 + b"\n")
                assert b"512" in await client.receive()
        assert engine.health().state == "closed"

    anyio.run(main, backend=backend)
