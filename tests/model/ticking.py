"""Prints the largest gap, in ms, between ticks of 10 ms while an engine loads and works."""

import asyncio
import time

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
    ticking = asyncio.create_task(tick(gaps))
    params = kvpage.SamplingParams(max_tokens=20, temperature=0)
    async with kvpage.AsyncEngine.from_pretrained(kv_memory="4096 tokens") as engine:
        print("load", round(max(gaps) * 1000), len(gaps))
        worst = max(gaps)
        gaps.clear()
        await asyncio.gather(*[engine.complete(f"Story number {i}", params) for i in range(8)])
        print("generate", round(max(gaps) * 1000), len(gaps))
        worst = max(worst, *gaps)
        gaps.clear()
        try:
            await engine.complete(MEGABYTE)
        except kvpage.RequestTooLong as refused:
            print(refused)
        print("tokenise", round(max(gaps) * 1000), len(gaps))
    ticking.cancel()
    print(max(worst, *gaps) * 1000)


asyncio.run(main())
