"""Many clients, most of them badly behaved: nothing is lost, nothing leaks, nothing is a 500."""

import asyncio
import json
import random
import threading
from collections import Counter
from typing import Any

import anyio
import httpx
import pytest

from kvpage import AsyncEngine
from kvpage.integrations.asgi import openai_app
from tests.engine.runners import PATIENCE_S
from tests.integrations.echo import EchoRunner, echo_engine, serving

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Crowd:
    """Clients that ask, leave, read slowly and send garbage, by a seed.

    Attributes:
        seen: how many exchanges ended how.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self._url = url
        self._seed = seed

    async def run(self, num_clients: int, seconds: float) -> None:
        """All of them, until the time is up."""
        # uvicorn closes a connection that was idle for 5 s, and may do so just as a client writes.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=1)
        async with (
            httpx.AsyncClient(base_url=self._url, limits=limits, timeout=6 * PATIENCE_S) as client,
            anyio.create_task_group() as tasks,
        ):
            ends = anyio.current_time() + seconds
            for number in range(num_clients):
                tasks.start_soon(self._one, client, random.Random(self._seed + number), ends)

    async def _one(self, client: httpx.AsyncClient, rng: random.Random, ends: float) -> None:
        ways = (self._whole, self._stream, self._leave, self._leave_whole, self._garbage)
        while anyio.current_time() < ends:
            way = rng.choice(ways)
            self.seen[await way(client, rng)] += 1

    async def _whole(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        """A request that is served, and rightly, or told to come back."""
        body, expected = _request(rng)
        response = await client.post("/v1/completions", json=body)
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            return "busy"
        assert response.status_code == 200, response.text
        assert [choice["text"] for choice in response.json()["choices"]] == expected
        return "whole"

    async def _stream(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        """The same, streamed, to a reader who takes its time."""
        body, expected = _request(rng)
        texts = [""] * len(expected)
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as got:
            if got.status_code == 429:
                return "busy"
            assert got.status_code == 200
            async for line in got.aiter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    texts[choice["index"]] += choice["text"]
                    await anyio.sleep(rng.choice((0, 0, 0, 0.01)))
        assert line in {"", "data: [DONE]"}
        assert texts == expected
        return "streamed"

    async def _leave(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        """Leaves a stream after some events, or before the first."""
        body, _ = _request(rng)
        many = {**body, "max_tokens": 400, "stream": True}
        patience = rng.randrange(20)
        async with client.stream("POST", "/v1/completions", json=many) as got:
            async for _ in got.aiter_lines():
                patience -= 1
                if patience <= 0:
                    break
        return "left"

    async def _leave_whole(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        """Gives up waiting for an answer."""
        body, _ = _request(rng)
        with anyio.move_on_after(rng.random() / 20):
            await client.post("/v1/completions", json={**body, "max_tokens": 400})
        return "gave up"

    async def _garbage(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        """Sends what is no request."""
        body = rng.choice((b"", b"{", rng.randbytes(50), b'{"model":"echo"}', b"[1]" * 1000))
        path = rng.choice(("completions", "chat/completions", "responses"))
        response = await client.post(
            f"/v1/{path}", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text
        assert set(response.json()) == {"error"}
        return "refused"


def _request(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    """A request, and the texts that answer it."""
    letters = rng.sample(ALPHABET, rng.choice((1, 1, 1, 3)))
    n, max_tokens = rng.choice((1, 1, 2)), rng.randrange(1, 40)
    prompts = [letter * rng.randrange(1, 60) for letter in letters]
    expected = [_continued(letter, max_tokens) for letter in letters for _ in range(n)]
    body = {"model": "echo", "prompt": prompts, "n": n, "max_tokens": max_tokens}
    return body, expected


def _continued(letter: str, num_letters: int) -> str:
    begin = ALPHABET.index(letter) + 1
    return "".join(ALPHABET[(begin + i) % 26] for i in range(num_letters))


@pytest.mark.parametrize("allocator", ["fixed", "dynamic"])
def test_a_crowd(allocator: str) -> None:
    """A few seconds of 40 clients."""
    check_crowd(allocator, num_clients=40, seconds=2)


@pytest.mark.slow
def test_a_large_crowd() -> None:
    """Five minutes of 200 clients."""
    check_crowd("fixed", num_clients=200, seconds=300)


def check_crowd(allocator: str, *, num_clients: int, seconds: float) -> None:
    """Let a crowd in; afterwards everything is as it was before."""
    engine = echo_engine(
        EchoRunner(), allocator=allocator, max_waiting=64, when_busy="raise", max_num_seqs=32
    )
    threads = threading.active_count()
    with serving(openai_app(engine)) as url:
        crowd = Crowd(url, seed=1)
        asyncio.run(crowd.run(num_clients, seconds))
    assert threading.active_count() <= threads + 40  # anyio's workers, which it keeps
    assert {"whole", "streamed", "left", "gave up", "refused"} <= set(crowd.seen)
    asyncio.run(check_left(engine))


async def check_left(engine: AsyncEngine) -> None:
    """No request is open, no block is held, every request is accounted for, and it still works."""
    await engine.idle()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pool.used_blocks) == (0, 0, 0)
    assert stats.pool.free_blocks + stats.pool.cached_blocks == stats.pool.num_blocks
    assert stats.requests_failed == 0
    assert engine.health().open_requests == 0
    assert (await engine.complete("a")).text.startswith("bcd")
    await engine.aclose()
