"""Clients that leave: their blocks are free before the engine's next step."""

import socket
from typing import Any

import anyio
import httpx
import pytest

from kvpage.integrations.asgi import openai_app
from tests.engine.runners import PATIENCE_S
from tests.integrations.echo import EchoRunner, cancelled, echo_engine, serving

BODIES: dict[str, dict[str, Any]] = {
    "completions": {"model": "echo", "prompt": "ab", "max_tokens": 400},
    "chat/completions": {"model": "echo", "messages": [{"role": "user", "content": "a" * 300}]},
    "responses": {"model": "echo", "input": "a" * 300},
}


async def left(engine: Any) -> bool:
    """Is nothing open, and nothing held?"""
    await engine.idle()
    stats = engine.stats()
    return (stats.pool.used_blocks, stats.requests_cancelled) == (0, 1)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_who_leaves_while_the_model_works_frees_the_blocks(path: str, stream: bool) -> None:
    """The step that runs is the last one that computes for them."""
    runner = EchoRunner(free_steps=3)
    engine = echo_engine(runner)
    with serving(openai_app(engine)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            request = client.build_request(
                "POST", f"/v1/{path}", json={**BODIES[path], "stream": stream}
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_send, client, request)
                await runner.gate.held()
                tasks.cancel_scope.cancel()
        await cancelled(engine, runner)
    assert await left(engine)
    await engine.aclose()


async def _send(client: httpx.AsyncClient, request: httpx.Request) -> None:
    response = await client.send(request, stream=True)
    try:
        async for _ in response.aiter_bytes():
            pass
    finally:
        await response.aclose()


async def test_who_leaves_while_waiting_is_forgotten() -> None:
    """The request has not begun; its place in the queue is free."""
    runner = EchoRunner(free_steps=0)
    engine = echo_engine(runner, max_num_seqs=1)
    with serving(openai_app(engine)) as url:
        async with engine.generate("ab") as running, httpx.AsyncClient(base_url=url) as client:
            await runner.gate.held()
            with anyio.move_on_after(0.5):
                await client.post("/v1/completions", json=BODIES["completions"])
            await client.aclose()
            runner.gate.open()
            async for _ in running:
                if engine.stats().requests_cancelled:
                    break
    await engine.idle()
    assert engine.stats().requests_cancelled == 2
    assert engine.stats().pool.used_blocks == 0
    await engine.aclose()


async def test_who_sends_half_a_body_holds_nothing() -> None:
    """The engine never hears of it, and the server goes on."""
    engine = echo_engine()
    with serving(openai_app(engine)) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
        async with httpx.AsyncClient(base_url=url) as client:
            answer = await client.post("/v1/completions", json=BODIES["completions"])
    assert answer.status_code == 200
    assert engine.stats().requests_finished == 1
    await engine.aclose()


async def test_a_reader_that_never_reads_does_not_stop_the_others() -> None:
    """Its tokens wait for it, the others get theirs."""
    engine = echo_engine()
    with serving(openai_app(engine)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            body = {**BODIES["completions"], "stream": True, "n": 16}
            request = client.build_request("POST", "/v1/completions", json=body)
            silent = await client.send(request, stream=True)
            answer = await client.post("/v1/completions", json=BODIES["completions"])
            assert answer.json()["usage"]["completion_tokens"] == 400
            await silent.aclose()
    assert (await left(engine)) or engine.stats().requests_finished == 2
    await engine.aclose()
