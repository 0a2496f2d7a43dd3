"""The end of an engine: at once, after draining, by accident, with the process."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import anyio
import pytest

from kvpage import AsyncEngine, EngineClosed, SamplingParams, TokenStream
from kvpage.engine import OpeningEngine
from kvpage.testing import undisturbed
from tests.engine.conftest import Run
from tests.engine.runners import PATIENCE_S, GatedRunner
from tests.engine.scenes import check_generates, engine_threads, fake_engine, scene, until

PROMPT = [1, 2, 3]
PROMPTLY_S = 8.0
"""A process that waits for something takes `PATIENCE_S`; this much, only one on a busy machine."""


async def expect_closed(stream: TokenStream) -> None:
    """Read `stream`; it ends by `EngineClosed`."""
    with pytest.raises(EngineClosed, match="the engine was closed"):
        async for _ in stream:
            pass


async def ids_of(stream: TokenStream) -> list[int]:
    return [token.id async for token in stream]


@asynccontextmanager
async def draining(engine: AsyncEngine) -> AsyncGenerator[None]:
    """`engine` drains from here on, while nothing that it does has ended."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(engine.aclose, drain=True))
        await anyio.wait_all_tasks_blocked()
        yield


def test_closing_ends_every_open_stream(run: Run) -> None:
    """Streams that decode, and that queue, all end by `EngineClosed`."""

    async def main() -> None:
        async with scene(free_steps=1, max_num_seqs=2) as at, anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(expect_closed, at.engine.generate(PROMPT))
            await at.runner.gate.held()
            tasks.start_soon(at.engine.aclose)
            await anyio.wait_all_tasks_blocked()
            at.let_go()

    run(main)


def test_a_step_in_progress_is_delivered_before_the_end(run: Run) -> None:
    """Closing waits for the step in progress; a stream that this step finishes is complete."""

    async def main() -> None:
        async with scene(free_steps=1) as at, anyio.create_task_group() as tasks:
            stream = await at.engine.generate(PROMPT, SamplingParams(max_tokens=2)).__aenter__()
            await at.runner.gate.held()
            tasks.start_soon(at.engine.aclose)
            await anyio.wait_all_tasks_blocked()
            at.let_go()
            assert await ids_of(stream) == undisturbed(PROMPT, 2)

    run(main)


def test_a_closed_engine_gives_its_memory_back(run: Run) -> None:
    """After `aclose` the runner is closed, the thread has ended, and no block is used."""

    async def main() -> None:
        runner = GatedRunner()
        engine = fake_engine(runner)
        stream = await engine.generate(PROMPT).__aenter__()
        await engine.aclose()
        assert runner.closed
        assert engine_threads() == []
        assert engine.stats().pool.used_blocks == 0
        await expect_closed(stream)

    run(main)


def test_nothing_works_after_the_end_and_all_of_it_says_so(run: Run) -> None:
    """`generate` and `complete` raise `EngineClosed`; `idle`, `stats`, `aclose` just return."""

    async def main() -> None:
        engine = fake_engine()
        await engine.aclose()
        await expect_closed(engine.generate(PROMPT))
        with pytest.raises(EngineClosed):
            await engine.complete(PROMPT)
        with pytest.raises(EngineClosed):
            await engine.generate(PROMPT).__aenter__()
        await engine.idle()
        await engine.aclose()
        await engine.aclose(drain=True)
        assert engine.stats().num_running == 0

    run(main)


def test_closing_from_several_tasks_at_once(run: Run) -> None:
    """All of them return once the engine has ended."""

    async def main() -> None:
        async with scene(free_steps=1) as at, anyio.create_task_group() as tasks:
            tasks.start_soon(expect_closed, at.engine.generate(PROMPT))
            await at.runner.gate.held()
            for drain in (False, True, False):
                tasks.start_soon(partial(at.engine.aclose, drain=drain))
            await anyio.wait_all_tasks_blocked()
            at.let_go()

    run(main)


def test_draining_finishes_what_is_open(run: Run) -> None:
    """Running and queued requests are complete when a draining `aclose` returns."""

    async def main() -> None:
        engine = fake_engine(max_num_seqs=1)
        params = SamplingParams(max_tokens=5)
        streams = [await engine.generate(PROMPT, params).__aenter__() for _ in range(3)]
        await engine.aclose(drain=True)
        for stream in streams:
            assert await ids_of(stream) == undisturbed(PROMPT, 5)

    run(main)


def test_draining_admits_nobody(run: Run) -> None:
    """A request that comes while the engine drains is refused, and does not prolong it."""

    async def main() -> None:
        async with scene(free_steps=0) as at:
            params = SamplingParams(max_tokens=5)
            stream = await at.engine.generate(PROMPT, params).__aenter__()
            async with draining(at.engine):
                late = await at.engine.generate(PROMPT).__aenter__()
                at.let_go()
                await expect_closed(late)
            assert await ids_of(stream) == undisturbed(PROMPT, 5)

    run(main)


def test_draining_refuses_who_waits_for_admission(run: Run) -> None:
    """Requests at the entrance were not accepted yet; they are told at once."""

    async def main() -> None:
        async with scene(free_steps=0, max_num_seqs=1, max_waiting=1) as at:
            params = SamplingParams(max_tokens=5)
            first, second = at.engine.generate(PROMPT, params), at.engine.generate(PROMPT, params)
            async with first, second, anyio.create_task_group() as tasks:
                tasks.start_soon(expect_closed, at.engine.generate(PROMPT))
                await until(lambda: len(at.engine._gate._waiters) == 1)
                async with draining(at.engine):
                    at.let_go()
                assert len(await ids_of(first)) == len(await ids_of(second)) == 5

    run(main)


def test_a_cancelled_drain_closes_at_once(run: Run) -> None:
    """Who gives up draining gets an engine that ends after its step in progress."""

    async def main() -> None:
        async with scene(free_steps=1) as at, anyio.create_task_group() as tasks:
            stream = await at.engine.generate(PROMPT).__aenter__()
            await at.runner.gate.held()
            with anyio.move_on_after(None) as patience:
                async with draining(at.engine):
                    patience.cancel()
            tasks.start_soon(expect_closed, stream)
            at.let_go()

    run(main)


def test_leaving_the_with_block_by_an_exception_closes(run: Run) -> None:
    """The exception passes, the engine is closed."""

    async def main() -> None:
        engine = fake_engine()
        try:
            async with engine:
                raise ZeroDivisionError
        except ZeroDivisionError:
            await expect_closed(engine.generate(PROMPT))

    run(main)


def test_an_engine_that_is_dropped_ends_by_itself(run: Run) -> None:
    """Without `aclose`, garbage collection ends the thread and closes the runner."""

    async def main() -> None:
        runner = GatedRunner()
        engine = fake_engine(runner)
        await check_generates(engine)
        del engine
        gc.collect()
        await until(lambda: runner.closed and not engine_threads())

    run(main)


def test_opening_gives_a_started_engine(run: Run) -> None:
    """What `from_pretrained` returns can be awaited, or entered with `async with`."""

    async def main() -> None:
        async with OpeningEngine(fake_engine) as engine:
            await check_generates(engine)
        await expect_closed(engine.generate(PROMPT))
        engine = await OpeningEngine(fake_engine)
        await check_generates(engine)
        await engine.aclose()

    run(main)


def test_an_engine_whose_opening_was_cancelled_does_not_stay(run: Run) -> None:
    """Loading cannot be interrupted, but its result is closed as soon as it is there."""
    may_load, runner = threading.Event(), GatedRunner()

    def load() -> AsyncEngine:
        assert may_load.wait(PATIENCE_S)
        return fake_engine(runner)

    async def main() -> None:
        with anyio.move_on_after(None) as patience:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(OpeningEngine(load).__aenter__)
                await anyio.wait_all_tasks_blocked()
                patience.cancel()
        may_load.set()
        await until(lambda: runner.closed)

    run(main)


def test_an_event_loop_closed_with_open_streams_frees_them() -> None:
    """Streams of a loop that was closed without cancelling its tasks are found and cancelled."""

    async def open_streams() -> list[TokenStream]:
        return [await engine.generate(PROMPT).__aenter__() for _ in range(2)]

    runner = GatedRunner(free_steps=0)
    engine = fake_engine(runner)
    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(open_streams())
    loop.close()
    runner.gate.open()
    anyio.run(engine.idle)
    assert engine.stats().requests_cancelled == len(kept)
    anyio.run(engine.aclose)


PROGRAM = """
import asyncio, signal, sys
import kvpage
from kvpage.request import EngineModel
from kvpage.testing import FakeRunner

geometry = kvpage.PoolGeometry(num_blocks=40_000, block_size=16, max_model_len=500_000)
engine = kvpage.AsyncEngine.from_runner(FakeRunner(geometry), geometry, EngineModel("fake", 251))

# A shell starts what it puts in the background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

async def main():
    stream = engine.generate([1, 2, 3])
    async for token in stream:
        if token.index == 3:
            print("generating", flush=True)
            {then}

{launch}
"""


@pytest.mark.parametrize("launch", ["asyncio.run(main())", "import trio; trio.run(main)"])
@pytest.mark.parametrize("then", ["return", "sys.exit(0)"])
def test_a_process_ends_promptly_with_a_live_engine(launch: str, then: str) -> None:
    """A host that forgets `aclose` exits as if there were no engine, with nothing on stderr."""
    with program(then, launch) as process:
        started = time.monotonic()
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert time.monotonic() - started < PROMPTLY_S


@pytest.mark.parametrize("launch", ["asyncio.run(main())", "import trio; trio.run(main)"])
def test_ctrl_c_ends_a_process_promptly(launch: str) -> None:
    """SIGINT during generation ends the process by `KeyboardInterrupt`, as without an engine."""
    with program("pass", launch) as process:
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - started < PROMPTLY_S
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT


@contextmanager
def program(then: str, launch: str) -> "Iterator[subprocess.Popen[str]]":
    """A process that generates; what becomes of it does not outlive the test."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(then=then, launch=launch)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "generating\n"
            yield process
        finally:
            process.kill()
