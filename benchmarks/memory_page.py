"""What a viewer of the memory page costs: steps with and without one, and one look at the pool.

    python benchmarks/memory_page.py                # a runner that computes nothing, 100,000 blocks
    python benchmarks/memory_page.py --model        # the embedded default model

With and without a viewer run in turn, A B A B, on one engine that is kept busy; the ratio is taken
pair by pair. The viewer reads the stream over a real connection in this process.
The runner that computes nothing is the worst case: every microsecond is the engine's own.
"""

import asyncio
import contextlib
import socket
import statistics
import time
from typing import Annotated, Any

import numpy as np
import typer
import uvicorn

import kvpage
from kvpage.blocks import PoolGeometry
from kvpage.integrations.memory import memory_app
from kvpage.integrations.memory.changes import changes, snapshot
from kvpage.plan import StepPlan, StepResult
from kvpage.request import EngineModel

LOOKS = 200


class Nothing:
    """Takes `step_s` for a step and computes no model."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def execute(self, plan: StepPlan) -> StepResult:
        if self._step_s:
            time.sleep(self._step_s)
        return StepResult(np.full(len(plan.sample_rows), 7, np.int64))

    def close(self) -> None:
        pass


def fake_engine(num_blocks: int, num_seqs: int, step_s: float) -> kvpage.AsyncEngine:
    geometry = PoolGeometry(num_blocks, 16, 4096)
    model = EngineModel("nothing", 32_000, ())
    return kvpage.AsyncEngine.from_runner(
        Nothing(step_s), geometry, model, max_num_seqs=num_seqs, max_batch_tokens=4096
    )


async def keep_busy(engine: kvpage.AsyncEngine, seed: int) -> None:
    """A request after the other."""
    rng = np.random.default_rng(seed)
    while True:
        prompt = rng.integers(0, 1000, int(rng.integers(50, 1000))).tolist()
        params = kvpage.SamplingParams(max_tokens=int(rng.integers(50, 500)), ignore_eos=True)
        await engine.complete(prompt, params)


async def view(port: int, heard: list[int]) -> None:
    """Read the stream; notes the length of what comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
    with contextlib.closing(writer):
        while chunk := await reader.read(2**16):
            heard.append(len(chunk))


async def tokens_a_second(engine: kvpage.AsyncEngine, seconds: float) -> float:
    started, before = time.perf_counter(), engine.stats().output_tokens
    await asyncio.sleep(seconds)
    return (engine.stats().output_tokens - before) / (time.perf_counter() - started)


async def cost_of_a_look(engine: kvpage.AsyncEngine) -> None:
    """Seconds to take an image in the engine thread, and to tell changes from it."""
    thread = engine._thread
    taken, told = [], []
    image = await engine.block_image()
    for _ in range(LOOKS):
        started = time.thread_time()
        thread._block_image()  # what the engine thread does; here alone, and so with no switch
        taken.append(time.thread_time() - started)
        later = await engine.block_image()
        started = time.thread_time()
        changes(image, later)
        told.append(time.thread_time() - started)
        image = later
    started = time.thread_time()
    snapshot(image)
    first = time.thread_time() - started
    print(
        f"one look, {len(image.sequences)} sequences, {image.geometry.num_blocks:,} blocks: "
        f"{1e6 * statistics.median(taken):.0f} us in the engine thread, "
        f"{1e6 * statistics.median(told):.0f} us to tell changes, "
        f"{1e6 * first:.0f} us for a first snapshot"
    )


async def compare(engine: kvpage.AsyncEngine, num_seqs: int, seconds: float, pairs: int) -> None:
    """Print tokens a second with and without a viewer."""
    config = uvicorn.Config(memory_app(engine), lifespan="off", ws="none", log_config=None)
    server = uvicorn.Server(config)
    rates: dict[str, list[float]] = {"nobody": [], "a viewer": []}
    heard: list[int] = []
    async with engine, asyncio.TaskGroup() as tasks:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = tasks.create_task(server.serve(sockets=[listener]))
            busy = [tasks.create_task(keep_busy(engine, seed)) for seed in range(num_seqs)]
            await asyncio.sleep(seconds)
            for _ in range(pairs):
                rates["nobody"].append(await tokens_a_second(engine, seconds))
                viewer = tasks.create_task(view(listener.getsockname()[1], heard))
                rates["a viewer"].append(await tokens_a_second(engine, seconds))
                viewer.cancel()
            await cost_of_a_look(engine)
            server.should_exit = True
            await serving
        for task in busy:
            task.cancel()
    for name, values in rates.items():
        print(f"{name:9} {statistics.median(values):9.0f} output tokens/s")
    ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
    print(f"ratio     {statistics.median(ratios):9.3f}  {[round(x, 3) for x in ratios]}")
    print(f"stream    {sum(heard) / (pairs * seconds) / 1024:9.1f} KiB/s to the viewer")


async def run(model: bool, num_seqs: int, num_blocks: int, step_ms: float, **how: Any) -> None:
    if model:
        opening = kvpage.AsyncEngine.from_pretrained(max_num_seqs=num_seqs)
        await compare(await opening, num_seqs, **how)
    else:
        await compare(fake_engine(num_blocks, num_seqs, step_ms / 1000), num_seqs, **how)


def main(
    model: Annotated[bool, typer.Option("--model", help="The default model.")] = False,
    num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 64,
    num_blocks: Annotated[int, typer.Option(help="Of the pool, without a model.")] = 100_000,
    step_ms: Annotated[float, typer.Option(help="Of a step, without a model.")] = 5.0,
    seconds: Annotated[float, typer.Option(help="Of each run.")] = 10.0,
    pairs: Annotated[int, typer.Option(help="Runs of each.")] = 5,
) -> None:
    """Compare tokens a second with and without a viewer."""
    asyncio.run(run(model, num_seqs, num_blocks, step_ms, seconds=seconds, pairs=pairs))


if __name__ == "__main__":
    typer.run(main)
