"""Prints the largest gaps, in ms, between ticks of 10 ms while an engine loads and works.

And how long `tokenizers` takes for the vocabulary, in the one call that holds the interpreter lock.
"""

import asyncio
import contextlib
import json
import time
from pathlib import Path

from tokenizers import Tokenizer

import kvpage

TICK_S = 0.01
MEGABYTE = "The quick brown fox jumps over the lazy dog. " * 23_000


async def tick(gaps: list[float]) -> None:
    last = time.perf_counter()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now


async def main() -> None:
    gaps: list[float] = []
    worst: dict[str, float] = {}

    def ended(phase: str) -> None:
        worst[phase] = round(1000 * max(gaps), 1)
        gaps.clear()

    ticking = asyncio.create_task(tick(gaps))
    params = kvpage.SamplingParams(max_tokens=20, temperature=0)
    async with kvpage.AsyncEngine.from_pretrained(kv_memory="4096 tokens") as engine:
        ended("load")
        await asyncio.gather(*[engine.complete(f"Story number {i}", params) for i in range(8)])
        ended("generate")
        with contextlib.suppress(kvpage.RequestTooLong):
            await engine.complete(MEGABYTE)
        ended("tokenise")
    ticking.cancel()
    file = Path(engine.model.tokenizer.name_or_path) / "tokenizer.json"
    began = time.perf_counter()
    Tokenizer.from_file(str(file))
    worst["vocabulary"] = round(1000 * (time.perf_counter() - began), 1)
    print(json.dumps(worst))


asyncio.run(main())
