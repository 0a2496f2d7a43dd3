"""What an engine says of its health, from loading to its end."""

import threading
import time

import anyio
import anyio.to_thread
import pytest

from kvpage import AsyncEngine, EngineBroken, EngineHealth, SamplingParams
from kvpage.engine import OpeningEngine
from tests.engine.conftest import Run
from tests.engine.scenes import fake_engine, scene, until
from tests.engine.test_faults import TalkativeRunner

PROMPT = [1, 2, 3]


def test_an_idle_engine_is_running_and_waits_for_nothing(run: Run) -> None:
    """Before, between and after requests."""

    async def main() -> None:
        async with fake_engine() as engine:
            await engine.idle()
            assert engine.health() == EngineHealth("running")
            await engine.complete(PROMPT, SamplingParams(max_tokens=3))
            await engine.idle()
            assert engine.health() == EngineHealth("running")
        assert engine.health() == EngineHealth("closed")

    run(main)


def test_a_step_that_hangs_shows(run: Run) -> None:
    """The time without progress grows while it lasts, and any thread can ask."""

    async def main() -> None:
        async with scene(free_steps=1) as at, at.engine.generate(PROMPT):
            await at.runner.gate.held()
            first = await anyio.to_thread.run_sync(at.engine.health)
            second = at.engine.health()
            assert (first.state, first.open_requests) == ("running", 1)
            assert 0 < first.since_progress_s < second.since_progress_s

    run(main)


def test_a_finished_step_is_progress(run: Run) -> None:
    """The clock starts anew with each one."""

    async def main() -> None:
        async with scene(free_steps=0) as at, at.engine.generate(PROMPT):
            await at.runner.gate.held()
            before = time.perf_counter()
            at.runner.gate.allow()
            await until(lambda: at.engine.stats().steps == 1)
            assert at.engine.health().since_progress_s < time.perf_counter() - before

    run(main)


def test_requests_that_wait_for_a_place_are_open(run: Run) -> None:
    """Those in the batch, in the queue, and before it."""

    async def main() -> None:
        async with scene(free_steps=0, max_num_seqs=1, max_waiting=1) as at:
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(at.engine.complete, PROMPT, SamplingParams(max_tokens=1))
                await until(lambda: at.engine.health().open_requests == 4)
                at.let_go()
            await at.engine.idle()
            assert at.engine.health().open_requests == 0

    run(main)


def test_a_draining_engine_says_so(run: Run) -> None:
    """From the step after the call until its last request has ended."""

    async def main() -> None:
        async with scene(free_steps=0) as at, anyio.create_task_group() as tasks:
            tasks.start_soon(at.engine.complete, PROMPT, SamplingParams(max_tokens=60))
            await at.runner.gate.held()
            tasks.start_soon(lambda: at.engine.aclose(drain=True))
            while at.engine.health().state != "draining":
                at.runner.gate.allow()
                await at.runner.gate.held()
            at.let_go()
            await until(lambda: at.engine.health().state == "closed")

    run(main)


def test_a_broken_engine_gives_its_cause(run: Run) -> None:
    """Also after it was closed."""

    async def main() -> None:
        async with scene(TalkativeRunner()) as at:
            with pytest.raises(EngineBroken) as broken:
                await at.engine.complete(PROMPT)
        health = at.engine.health()
        assert (health.state, health.open_requests, health.since_progress_s) == ("broken", 0, 0.0)
        assert health.cause is broken.value.__cause__

    run(main)


def test_an_engine_that_is_being_loaded_is_starting(run: Run) -> None:
    """What `from_pretrained` returns can be asked before, while and after it loads."""

    async def main() -> None:
        loading = threading.Event()

        def load() -> AsyncEngine:
            loading.wait()
            return fake_engine()

        opening = OpeningEngine(load)
        assert opening.health() == EngineHealth("starting")

        async def let_load() -> None:
            assert opening.health() == EngineHealth("starting")
            loading.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_load)
            async with opening:
                assert opening.health() == EngineHealth("running")
        assert opening.health() == EngineHealth("closed")

    run(main)


def test_an_engine_that_cannot_be_loaded_is_broken(run: Run) -> None:
    """With what stopped it."""

    async def main() -> None:
        error = LookupError("no such model")

        def load() -> AsyncEngine:
            raise error

        opening = OpeningEngine(load)
        with pytest.raises(LookupError):
            await opening
        assert opening.health() == EngineHealth("broken", cause=error)

    run(main)
