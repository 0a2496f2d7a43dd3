"""One engine under several event loops and threads, several engines in one process, for long."""

import asyncio
import gc
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from kvpage import AsyncEngine, SamplingParams, TokenStream
from kvpage.testing import undisturbed
from tests.engine.conftest import Run
from tests.engine.runners import GEOMETRY, PATIENCE_S, GatedRunner
from tests.engine.scenes import BACKENDS, check_generates, engine_threads, fake_engine, scene


@contextmanager
def engine_of_the_host(**settings: Any) -> Iterator[AsyncEngine]:
    """An engine that no event loop knows of, closed by one at the end."""
    engine = fake_engine(**settings)
    try:
        yield engine
    finally:
        anyio.run(engine.aclose)


async def check_many(engine: AsyncEngine, number: int) -> None:
    """So many requests at once, of several lengths, all rightly served."""

    async def check_one(index: int) -> None:
        prompt, max_tokens = [index] * (1 + index % 7), 1 + index % 11
        completion = await engine.complete(prompt, SamplingParams(max_tokens=max_tokens))
        assert list(completion.token_ids) == undisturbed(prompt, max_tokens)

    async with anyio.create_task_group() as tasks:
        for index in range(number):
            tasks.start_soon(check_one, index)


def test_an_engine_may_be_built_before_any_event_loop(run: Run) -> None:
    """As a module-level object of a web app is."""
    with engine_of_the_host() as engine:
        run(lambda: check_generates(engine))


def test_an_engine_outlives_event_loops() -> None:
    """Successive loops of either kind use one engine."""
    with engine_of_the_host() as engine:
        for backend in (*BACKENDS, *BACKENDS):
            anyio.run(check_many, engine, 5, backend=backend)
        assert engine.stats().requests_finished == 20


def test_event_loops_in_several_threads_share_an_engine() -> None:
    """Asyncio and trio at once, in threads of their own, with a queue too short for all."""
    failures: list[BaseException] = []

    def use(engine: AsyncEngine, backend: str) -> None:
        try:
            anyio.run(check_many, engine, 25, backend=backend)
        except BaseException as error:
            failures.append(error)

    with engine_of_the_host(max_num_seqs=4, max_waiting=3) as engine:
        threads = [
            threading.Thread(target=use, args=(engine, backend), daemon=True)
            for backend in (*BACKENDS, *BACKENDS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        assert failures == []
        assert engine.stats().requests_finished == 100


def test_several_engines_live_side_by_side(run: Run) -> None:
    """Ids, pools and ends of one are nothing to the other."""

    async def main() -> None:
        one, other = fake_engine(), fake_engine()
        async with one, other, one.generate([1, 2], request_id="same"):
            await check_generates(other, "same")
            await one.aclose()
            await check_many(other, 5)

    run(main)


def test_five_engines_one_after_another_leave_nothing(run: Run) -> None:
    """Threads and runners of closed engines are gone."""

    async def main() -> None:
        for _ in range(5):
            runner = GatedRunner()
            async with fake_engine(runner) as engine:
                await check_many(engine, 3)
            assert runner.closed
            assert engine_threads() == []

    run(main)


# -- for long --------------------------------------------------------------------------------------


async def read_one(stream: TokenStream) -> None:
    await anext(stream)


async def leave_by_break(engine: AsyncEngine) -> None:
    async for _ in engine.generate([1, 2, 3]):
        break


async def leave_by_aclose(engine: AsyncEngine) -> None:
    stream = engine.generate([1, 2, 3])
    await read_one(stream)
    await stream.aclose()


async def leave_by_with(engine: AsyncEngine) -> None:
    async with engine.generate("text") as stream:
        await read_one(stream)


async def leave_by_cancellation(engine: AsyncEngine) -> None:
    with anyio.CancelScope() as scope:
        async for _ in engine.generate([1, 2, 3]):
            scope.cancel()


async def leave_by_timeout(engine: AsyncEngine) -> None:
    with anyio.move_on_after(None) as scope:
        async for _ in engine.generate([1, 2, 3]):
            scope.deadline = anyio.current_time()


async def leave_by_garbage(engine: AsyncEngine) -> None:
    stream = engine.generate([1, 2, 3])
    await read_one(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)


async def leave_at_the_end(engine: AsyncEngine) -> None:
    await engine.complete([1, 2, 3], SamplingParams(max_tokens=1))


WAYS: tuple[Callable[[AsyncEngine], Awaitable[None]], ...] = (
    leave_by_break,
    leave_by_aclose,
    leave_by_with,
    leave_by_cancellation,
    leave_by_timeout,
    leave_by_garbage,
    leave_at_the_end,
)


def number_of_our_objects() -> int:
    """Live objects of kvpage's classes."""
    gc.collect()
    return sum(str(type(thing).__module__).startswith("kvpage") for thing in gc.get_objects())


def test_five_hundred_rounds_leave_everything_flat(run: Run) -> None:
    """Start, read one token, leave in any way: no block, task, thread or object stays."""
    ways = random.Random(0).choices(WAYS, k=500)

    async def main() -> None:
        async with scene() as at:
            for way in WAYS:
                await way(at.engine)
            await at.engine.idle()
            objects, threads = number_of_our_objects(), threading.active_count()
            for way in ways:
                await way(at.engine)
            gc.collect()
            await at.engine.idle()
            stats = at.engine.stats()
            assert stats.pool.used_blocks == stats.num_running == stats.num_waiting == 0
            assert stats.pool.free_blocks + stats.pool.cached_blocks == GEOMETRY.num_blocks
            assert stats.requests_cancelled + stats.requests_finished == 500 + len(WAYS)
            # The event loop's worker threads are anyio's; it may have started another one.
            assert threading.active_count() <= threads + 2
            # What is published in the prefix cache may grow by a block here and there.
            assert number_of_our_objects() <= objects + GEOMETRY.num_blocks

    run(main)


def test_leaving_leaves_no_asyncio_task() -> None:
    """The streams make no tasks of their own."""

    async def main() -> None:
        async with scene() as at:
            for way in WAYS * 3:
                await way(at.engine)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
