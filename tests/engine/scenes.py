"""An engine over a fake runner, and what a test of leaving and ending wants to know of it."""

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import attrs

from kvpage import AsyncEngine, Completion, SamplingParams
from kvpage.blocks import PoolGeometry
from kvpage.engine_thread import MapBlocks
from kvpage.grammar import Grammars
from kvpage.plan import Runner
from kvpage.request import EngineModel
from kvpage.testing import undisturbed
from tests.engine.runners import (
    GEOMETRY,
    PATIENCE_S,
    VOCAB_SIZE,
    CharacterTokenizer,
    GatedRunner,
)

BACKENDS = ("asyncio", "trio")


def fake_engine(
    runner: Runner | None = None,
    *,
    geometry: PoolGeometry = GEOMETRY,
    tokenizer: Any = None,
    grammars: Grammars | None = None,
    **settings: Any,
) -> AsyncEngine:
    """An engine over `runner`, or over one that never waits."""
    model = EngineModel("fake", VOCAB_SIZE, tokenizer=tokenizer)
    if grammars is not None:
        model = attrs.evolve(model, grammars=grammars)
    return AsyncEngine.from_runner(runner or GatedRunner(geometry), geometry, model, **settings)


@attrs.frozen
class Scene:
    """An engine whose steps and prompts can be held."""

    engine: AsyncEngine
    runner: GatedRunner
    tokenizer: CharacterTokenizer

    def let_go(self) -> None:
        """Hold nothing any more."""
        self.runner.gate.open()
        self.tokenizer.gate.open()


@asynccontextmanager
async def scene(
    runner: GatedRunner | None = None,
    *,
    free_steps: int | None = None,
    free_prompts: int | None = None,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """An engine that holds its steps and prompts after so many; closed at the end."""
    held_runner = runner or GatedRunner(free_steps=free_steps)
    tokenizer = CharacterTokenizer(free_prompts=free_prompts)
    engine = fake_engine(held_runner, tokenizer=tokenizer, **settings)
    held = Scene(engine, held_runner, tokenizer)
    try:
        with anyio.fail_after(PATIENCE_S):
            yield held
    finally:
        held.let_go()
        await engine.aclose()


def engine_threads() -> list[threading.Thread]:
    """The threads of all live engines of this process."""
    return [thread for thread in threading.enumerate() if thread.name == "kvpage-engine"]


async def until(condition: Callable[[], bool]) -> None:
    """Poll, where nothing else tells when another task or thread got somewhere."""
    with anyio.fail_after(PATIENCE_S):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def asked(engine: AsyncEngine) -> None:
    """Wait until there is a message for the engine thread, which something else holds."""
    await until(lambda: not engine._thread._inbox.empty())


@contextmanager
def held(engine: AsyncEngine) -> Iterator[None]:
    """Keep an engine from its next step: whatever is submitted meanwhile meets in that one."""
    let_go = threading.Event()
    engine._thread.post(MapBlocks(lambda _image: check_opened(let_go)))
    try:
        yield
    finally:
        let_go.set()


def check_opened(event: threading.Event) -> None:
    """Wait for another thread."""
    assert event.wait(PATIENCE_S)


async def complete_all(
    engine: AsyncEngine, calls: Sequence[Callable[[], Awaitable[Completion]]]
) -> list[Completion]:
    """Call `engine.complete` several times at once; none begins before all are submitted.

    Nothing else may be open, or that may stand for one of them.
    """
    found: dict[int, Completion] = {}

    async def complete(number: int) -> None:
        found[number] = await calls[number]()

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            with held(engine):
                for number in range(len(calls)):
                    tasks.start_soon(complete, number)
                await until(lambda: engine.health().open_requests >= len(calls))
        await engine.idle()
    return [found[number] for number in range(len(calls))]


async def check_nothing_left(engine: AsyncEngine, request_id: str) -> None:
    """No request, no block is left of `request_id`, and its id can be used again."""
    await engine.idle()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pool.used_blocks) == (0, 0, 0)
    assert stats.pool.free_blocks + stats.pool.cached_blocks == stats.pool.num_blocks
    await check_generates(engine, request_id)


async def check_generates(engine: AsyncEngine, request_id: str | None = None) -> None:
    """The engine serves a new request, and rightly."""
    prompt = [5, 6, 7, 8, 9]
    completion = await engine.complete(prompt, SamplingParams(max_tokens=6), request_id=request_id)
    assert list(completion.token_ids) == undisturbed(prompt, 6)


async def check_full_house(engine: AsyncEngine) -> None:
    """Every row of the batch is there for somebody: no request that ended still has one."""
    params = SamplingParams(max_tokens=2)
    streams = [
        await engine.generate([1], params).__aenter__() for _ in range(engine.config.max_num_seqs)
    ]
    for stream in streams:
        assert [token.id async for token in stream] == undisturbed([1], 2)
    await engine.idle()


def check_ledger(engine: AsyncEngine) -> None:
    """Recount the blocks of an engine that is idle, or closed."""
    engine._thread._scheduler._blocks.verify()
