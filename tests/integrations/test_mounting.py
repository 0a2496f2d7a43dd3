"""The same app inside of other people's programs, on both event loops."""

from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest
from starlette.types import ASGIApp

from kvpage.integrations.asgi import openai_app
from kvpage.sequence import NO_ADAPTER
from tests.engine.scenes import BACKENDS
from tests.integrations.echo import EchoRunner, echo_engine

CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "Hello"}]}


def in_starlette(mounted: ASGIApp) -> Any:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    return Starlette(routes=[Mount("/llm", mounted)])


def in_fastapi(mounted: ASGIApp) -> Any:
    from fastapi import FastAPI

    app = FastAPI()
    app.mount("/llm", mounted)
    return app


def in_litestar(mounted: ASGIApp) -> Any:
    from litestar import Litestar, asgi

    return Litestar([asgi("/llm", is_mount=True, copy_scope=True)(mounted)])


def in_django(mounted: ASGIApp) -> Any:
    """As in a project's `asgi.py`: by path, before Django sees the request."""
    from django.conf import settings
    from django.core.asgi import get_asgi_application

    if not settings.configured:
        # One process has one Django: the URLs are those of the example, should its test come later.
        settings.configure(SECRET_KEY="for tests", ALLOWED_HOSTS=["*"], ROOT_URLCONF="django_app")
    return by_path(mounted, get_asgi_application())


def in_quart(mounted: ASGIApp) -> Any:
    """Around the app that Quart is, as its documentation has it for middleware."""
    from quart import Quart

    app = Quart("host")
    app.asgi_app = by_path(mounted, app.asgi_app)  # type: ignore[method-assign]
    return app


def by_path(mounted: ASGIApp, host: Any) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith("/llm/"):
            await mounted({**scope, "root_path": "/llm"}, receive, send)
        else:
            await host(scope, receive, send)

    return app


@pytest.mark.parametrize("host", [in_starlette, in_fastapi, in_litestar, in_quart, in_django])
async def test_inside_of_a_host(host: Callable[[ASGIApp], Any]) -> None:
    """Answers, whole and streamed, and errors are its own; the host closes the engine."""
    async with echo_engine() as engine:
        await check(host(openai_app(engine)))


async def check(app: Any) -> None:
    """Under `/llm`, all is as it should be."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test/llm") as client:
        whole = await client.post("/v1/chat/completions", json=CHAT)
        assert whole.json()["choices"][0]["message"]["content"] == "Hello"
        streamed = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert streamed.text.endswith("data: [DONE]\n\n")
        refused = await client.post("/v1/chat/completions", json={**CHAT, "n": 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        nowhere = await client.get("/v1/nowhere")
        assert (nowhere.status_code, set(nowhere.json())) == (404, {"error"})
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_either_event_loop(backend: str) -> None:
    """Its tasks are anyio's."""

    async def main() -> None:
        async with echo_engine() as engine:
            app = openai_app(engine)
            assert await exchange(app, CHAT) == (200, b"Hello")
            assert (await exchange(app, {**CHAT, "stream": True}))[0] == 200

    anyio.run(main, backend=backend)


async def exchange(app: Any, body: dict[str, Any]) -> tuple[int, bytes]:
    """One request without any HTTP library (httpx's own transport knows asyncio only)."""
    import json

    sent: list[Any] = []
    incoming = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await anyio.sleep_forever()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent)
    if content.startswith(b"{"):
        content = json.loads(content)["choices"][0]["message"]["content"].encode()
    return sent[0]["status"], content


async def test_several_engines() -> None:
    """By their names; one may go by two."""
    async with echo_engine() as one, echo_engine() as two:
        app = openai_app({"a": one, "b": two, "alias": one})
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for model in ("a", "b", "alias", "alias"):
                answer = await client.post("/v1/chat/completions", json={**CHAT, "model": model})
                assert answer.json()["model"] == model
            listed = (await client.get("/v1/models")).json()["data"]
            metrics = (await client.get("/metrics")).text
        assert [model["id"] for model in listed] == ["a", "b", "alias"]
        assert (one.stats().requests_finished, two.stats().requests_finished) == (3, 1)
        assert 'kvpage_requests_total{model="a",outcome="finished"} 3.0' in metrics
        assert 'model="alias"' not in metrics


async def test_the_app_leaves_the_engine_open() -> None:
    """It is the host's; so is every thread and task."""
    async with echo_engine() as engine:
        import threading

        before = threading.active_count()
        openai_app(engine)
        assert threading.active_count() == before
        await check(in_starlette(openai_app(engine)))
        assert engine.health().state == "running"


async def test_adapters_are_models_of_their_own() -> None:
    """By their names, but for one that a model has already."""
    runner = EchoRunner()
    engine = echo_engine(runner, adapters=("polite", "echo"))
    transport = httpx.ASGITransport(openai_app(engine))
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://host") as client:
        models = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model.get("parent")) for model in models] == [
            ("echo", None),
            ("polite", "echo"),
        ]
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert runner.adapters <= {NO_ADAPTER}
        polite = await client.post("/v1/chat/completions", json={**CHAT, "model": "polite"})
        assert polite.json()["model"] == "polite"
        assert runner.adapters >= {0}
