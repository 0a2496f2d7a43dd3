"""What HTTP costs: tokens a second in-process and through `openai_app` on a real server.

    python benchmarks/http_overhead.py

The workload W64 of `peers/`, all requests at once, streamed. In-process and HTTP run in turn,
A B A B, on one engine; the ratio is taken pair by pair. The server shares the event loop of this
program with a task that ticks every 10 ms, and the clients are a process of their own, as clients
are. Printed too: the 99th percentile of the gaps between ticks, which is how long the host's loop
was held up (or its thread waited for a core).
"""

import asyncio
import json
import socket
import statistics
import sys
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
import uvicorn

import kvpage
from kvpage.integrations.asgi import openai_app
from peers.workloads import Request, w64

TICK_S = 0.01


async def in_process(engine: kvpage.AsyncEngine, requests: list[Request]) -> float:
    """Seconds for all requests, submitted at once and read token by token."""

    async def complete(request: Request) -> None:
        params = kvpage.SamplingParams(
            temperature=0, max_tokens=request.num_tokens, ignore_eos=True
        )
        tokens = [token async for token in engine.generate(request.prompt, params)]
        assert len(tokens) == request.num_tokens

    started = perf_counter()
    await asyncio.gather(*(complete(request) for request in requests))
    return perf_counter() - started


async def over_http(url: str, requests: int, max_tokens: int) -> float:
    """Seconds that a process of clients takes for the same."""
    clients = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--requests", str(requests)),
        *("--max-tokens", str(max_tokens), "--clients-of", url),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await clients.communicate()
    assert clients.returncode == 0
    return float(output)


async def clients(url: str, requests: list[Request]) -> None:
    """Ask for everything at once, with as little work per token as can be."""
    bodies = [
        json.dumps(
            {
                "model": "model",
                "prompt": request.prompt,
                "max_tokens": request.num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for request in requests
    ]
    host, _, port = url.removeprefix("http://").partition(":")

    async def ask(body: bytes, num_tokens: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        answer = await reader.read()
        writer.close()
        assert b'"completion_tokens":%d,' % num_tokens in answer

    started = perf_counter()
    await asyncio.gather(
        *(ask(body, request.num_tokens) for body, request in zip(bodies, requests, strict=True))
    )
    print(perf_counter() - started)


async def tick(gaps: list[float]) -> None:
    """Note the time between ticks."""
    last = perf_counter()
    while True:
        await asyncio.sleep(TICK_S)
        now = perf_counter()
        gaps.append(now - last)
        last = now


def cut_workload(num_requests: int, max_tokens: int) -> list[Request]:
    """The workload with shorter answers, to try this program."""
    return [
        Request(request.prompt, min(request.num_tokens, max_tokens))
        for request in w64(0)[:num_requests]
    ]


async def compare(num_requests: int, max_tokens: int, pairs: int) -> None:
    """Run both in turn and print what came of it."""
    requests = cut_workload(num_requests, max_tokens)
    num_tokens = sum(request.num_tokens for request in requests)
    settings: dict[str, Any] = {"prefix_cache": False, "kv_memory": "32768 tokens"}
    rates: dict[str, list[float]] = {"in-process": [], "HTTP": []}
    gaps: dict[str, list[float]] = {name: [] for name in rates}
    async with kvpage.AsyncEngine.from_pretrained(max_num_seqs=64, **settings) as engine:
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            app = openai_app({"model": engine})
            config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None)
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            await in_process(engine, requests[:2])
            for _ in range(pairs):
                for name, measured in rates.items():
                    ticking = asyncio.create_task(tick(gaps[name]))
                    if name == "HTTP":
                        seconds = await over_http(url, num_requests, max_tokens)
                    else:
                        seconds = await in_process(engine, requests)
                    ticking.cancel()
                    measured.append(num_tokens / seconds)
            server.should_exit = True
            await serving
    print(f"{num_requests} requests, {num_tokens} output tokens, {pairs} runs of each")
    for name, values in rates.items():
        p99 = 1000 * float(np.percentile(gaps[name], 99))
        print(
            f"{name:10}  {statistics.median(values):7.1f} tokens/s, "
            f"99 % of the gaps between ticks of 10 ms below {p99:.1f} ms"
        )
    ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
    print(f"ratio       {statistics.median(ratios):7.2f}  {[round(x, 2) for x in ratios]}")


def main(
    requests: Annotated[int, typer.Option(help="How many of the 64 requests.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Cut longer answers.")] = 384,
    pairs: Annotated[int, typer.Option(help="Runs of each.")] = 3,
    clients_of: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare tokens a second in-process and over HTTP."""
    if clients_of:
        asyncio.run(clients(clients_of, cut_workload(requests, max_tokens)))
    else:
        asyncio.run(compare(requests, max_tokens, pairs))


if __name__ == "__main__":
    typer.run(main)
