"""Rounds of everything at once, each made from one number.

A round is an engine of random settings over a pool that is too small, visited from several event
loops in threads of their own. Visitors submit random requests and read them to the end, slowly,
late, in part or not at all; in some rounds the allocator raises and lies, steps fail, the engine is
closed or breaks. Whatever happens, a visitor may see only what its request generates alone, or a
failure that the round injected.

The number decides what is asked and what goes wrong at which call. The order in which threads come
to it is the machine's; so a round that failed is worth playing a few times::

    python -c "from tests.engine.chaos import play; play(1234)"
"""

import contextlib
import gc
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from random import Random
from typing import Any, Literal

import anyio
import anyio.lowlevel
import attrs

from kvpage import (
    AllocatorFault,
    AsyncEngine,
    EngineBroken,
    EngineBusy,
    EngineClosed,
    Extent,
    Grant,
    OutgrewPool,
    OutOfBlocks,
    PoolGeometry,
    RequestFailed,
    SamplingParams,
    SequenceId,
    StepFailed,
    Token,
    TokenStream,
)
from kvpage.allocators.base import Allocator, Trimmable
from kvpage.allocators.contiguous import ContiguousAllocator
from kvpage.allocators.dynamic import DynamicAllocator
from kvpage.allocators.fixed import FixedAllocator
from kvpage.blocks import AllocatorStatistics, BlockId
from kvpage.plan import StepPlan, StepResult
from kvpage.testing import FakeRunner, undisturbed
from tests.engine.runners import CharacterTokenizer
from tests.engine.scenes import BACKENDS, check_ledger, fake_engine

LONGEST = 96
"""Tokens of the longest sequence."""

VISITORS = 8
"""Tasks of each event loop."""

VISITS = 6
"""Requests of each task, one after another."""

STUCK_S = 120.0
"""A round that takes longer hangs. It takes a second or so."""

STRATEGIES: tuple[Callable[[PoolGeometry], Allocator], ...] = (
    FixedAllocator,
    DynamicAllocator,
    partial(DynamicAllocator, min_block=4, max_extent=8),
    partial(ContiguousAllocator, reserve="request"),
)

PREEMPTIONS: tuple[dict[str, Any], ...] = (
    {"preempt": "recompute"},
    {"preempt": "swap"},
    {"preempt": "swap", "swap_memory": "6 blocks"},
)


class Injected(Exception):  # noqa: N818  (reads as what it is)
    """What a round makes go wrong."""


# -- what goes wrong -------------------------------------------------------------------------------

LIES: tuple[Any, ...] = (
    None,
    Grant(),
    Grant((Extent(BlockId(-1), 1),)),
    Grant((Extent(BlockId(10**6), 1),)),
    Grant((Extent(BlockId(0), 10**9),)),
    Grant((Extent(BlockId(0), 1), Extent(BlockId(0), 1))),
    Grant((), ((BlockId(0), BlockId(0)),)),
    Grant((7,)),  # type: ignore[arg-type]
)


class Mischief:
    """An allocator that raises and lies now and then, over one that does neither.

    What it was told of a lie never reaches the one below, which so keeps its books right.

    Args:
        inner: chooses the places.
        rng: decides when.
        share: of the calls that go wrong.
    """

    def __init__(self, inner: Allocator, rng: Random, share: float) -> None:
        self.sharing = inner.sharing
        self.share = share
        self._inner = inner
        self._rng = rng
        self._live: set[SequenceId] = set()
        self._lent: set[BlockId] = set()

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        if self._goes_wrong():
            return self._do_wrong(num_tokens)
        grant = self._inner.admit(
            seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens
        )
        self._live.add(seq)
        return self._noted(grant)

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        if self._goes_wrong():
            return self._do_wrong(num_tokens)
        return self._noted(self._inner.extend(seq, num_tokens))

    def trim(self, seq: SequenceId, num_tokens: int) -> Iterable[BlockId]:
        if not isinstance(self._inner, Trimmable):
            return ()
        if self._goes_wrong():
            raise Injected("in trim")
        blocks = tuple(self._inner.trim(seq, num_tokens))
        self._lent -= set(blocks)
        return blocks

    def free(self, blocks: Iterable[BlockId]) -> None:
        own = [block for block in blocks if block in self._lent]
        self._lent -= set(own)
        self._inner.free(own)
        if self._goes_wrong():
            raise Injected("in free")

    def finish(self, seq: SequenceId) -> None:
        if seq in self._live:
            self._live.remove(seq)
            self._inner.finish(seq)
        if self._goes_wrong():
            raise Injected("in finish")

    def statistics(self) -> AllocatorStatistics:
        return self._inner.statistics()

    def _goes_wrong(self) -> bool:
        return self._rng.random() < self.share

    def _do_wrong(self, num_tokens: int) -> Grant:
        match self._rng.randrange(3):
            case 0:
                raise Injected("in the allocator")
            case 1:
                raise OutOfBlocks(num_tokens, 0)
        lie: Grant = self._rng.choice(LIES)
        return lie

    def _noted(self, grant: Grant) -> Grant:
        for extent in grant.extents:
            self._lent.update(BlockId(b) for b in range(extent.first_block, extent.end))
        self._lent.update(to for _, to in grant.moves)
        return grant


class MischievousRunner:
    """A fake runner whose steps fail now and then, before or after they computed.

    Args:
        geometry: the pool.
        rng: decides when.
        share: of the steps that go wrong.
        breaks_after: steps until one ends the engine; None: none does.
    """

    def __init__(
        self, geometry: PoolGeometry, rng: Random, share: float, breaks_after: int | None
    ) -> None:
        self.share = share
        self.closed = False
        self._rng = rng
        self._steps_left = breaks_after
        self._fake = FakeRunner(geometry)

    def execute(self, plan: StepPlan) -> StepResult:
        wrong = self._rng.randrange(3) if self._rng.random() < self.share else None
        if wrong == 0:
            raise Injected("before the step")
        result = self._fake.execute(plan)
        if wrong == 1:
            raise Injected("after the step")
        self._break_down()
        if wrong == 2 and len(result.token_ids):
            place = self._rng.randrange(len(result.token_ids))
            return StepResult(result.token_ids, failures={place: _failure_of_a_row()})
        return result

    def close(self) -> None:
        self.closed = True
        self._fake.close()

    def _break_down(self) -> None:
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left < 0:
                raise KeyboardInterrupt("the engine breaks")


def _failure_of_a_row() -> StepFailed:
    failure = StepFailed("no token")
    failure.__cause__ = Injected("in a row")
    return failure


# -- what is asked ---------------------------------------------------------------------------------


@attrs.frozen
class Ask:
    """A request, and what it generates when nothing disturbs it.

    Attributes:
        prompt: text or token ids.
        params: with `n` and perhaps ends.
        priority: lower runs first.
        token_ids: of each of its outputs.
        text: of each of its outputs.
    """

    prompt: str | list[int]
    params: SamplingParams
    priority: int
    token_ids: list[int]
    text: str

    @classmethod
    def at_random(cls, rng: Random, geometry: PoolGeometry) -> "Ask":
        """Prompts have few different beginnings, and lengths around multiples of the block size."""
        longest = min(geometry.num_slots, LONGEST - 1)
        near = geometry.block_size * rng.randrange(1, 6) + rng.choice((-1, 0, 1))
        num_tokens = max(1, min(longest, rng.choice((near, rng.randrange(1, 60)))))
        start, own = rng.choice((0, 100)), rng.randrange(251)
        ids = [(start + i) % 251 for i in range(num_tokens - 1)] + [own]
        max_tokens = rng.randrange(1, min(40, LONGEST - num_tokens) + 1)
        stop_ids = tuple(range(0, 251, 20)) if rng.random() < 0.2 else ()
        output = undisturbed(ids, max_tokens, stop_token_ids=stop_ids)
        text = CharacterTokenizer().decode(output)
        stop: tuple[str, ...] = ()
        if rng.random() < 0.3:
            first = rng.randrange(len(text))
            stop = (text[first : first + rng.randrange(1, 4)], "never")
            begin = text.index(stop[0])
            output, text = output[: begin + len(stop[0])], text[:begin]
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 3)),
            max_tokens=max_tokens,
            seed=rng.choice((None, 5)),
            stop=stop,
            stop_token_ids=stop_ids,
        )
        prompt = "".join(map(chr, ids)) if rng.random() < 0.2 else ids
        return cls(prompt, params, rng.choice((0, 0, 0, 1, -1)), output, text)

    def stream(self, engine: AsyncEngine) -> TokenStream:
        """Its stream, not submitted yet."""
        return engine.generate(self.prompt, self.params, priority=self.priority)


class Reading:
    """What a visitor has read of its request, compared token by token."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._tokens: list[list[Token]] = [[] for _ in range(ask.params.n)]

    def add(self, token: Token) -> None:
        """It is the next one of its choice."""
        of_choice = self._tokens[token.choice]
        assert token.index == len(of_choice)
        assert token.id == self._ask.token_ids[token.index]
        of_choice.append(token)

    def check_complete(self) -> None:
        """Every choice has come to its own end."""
        for of_choice in self._tokens:
            assert [token.id for token in of_choice] == self._ask.token_ids
            assert "".join(token.text for token in of_choice) == self._ask.text
            ends = [token.finish_reason for token in of_choice if token.finish_reason]
            assert len(ends) == 1


# -- how it is read --------------------------------------------------------------------------------

Finished = bool
Way = Callable[[AsyncEngine, Ask, Random], Awaitable[Finished]]


async def linger(rng: Random, most: int) -> None:
    """Let others run for a while."""
    for _ in range(rng.randrange(most)):
        await anyio.lowlevel.checkpoint()


async def read_all(engine: AsyncEngine, ask: Ask, rng: Random) -> Finished:
    return await read_with_rests(ask, ask.stream(engine), rng, rest=1)


async def read_slowly(engine: AsyncEngine, ask: Ask, rng: Random) -> Finished:
    return await read_with_rests(ask, ask.stream(engine), rng, rest=10)


async def read_late(engine: AsyncEngine, ask: Ask, rng: Random) -> Finished:
    async with ask.stream(engine) as stream:
        await linger(rng, 300)
        return await read_with_rests(ask, stream, rng, rest=1)


async def read_with_rests(ask: Ask, stream: TokenStream, rng: Random, *, rest: int) -> Finished:
    reading = Reading(ask)
    async for token in stream:
        reading.add(token)
        await linger(rng, rest)
    reading.check_complete()
    return True


async def break_out(engine: AsyncEngine, ask: Ask, rng: Random) -> Finished:
    reading, enough = Reading(ask), rng.randrange(1, 10)
    async for token in ask.stream(engine):
        reading.add(token)
        enough -= 1
        if not enough:
            break
    return False


async def never_read(engine: AsyncEngine, ask: Ask, rng: Random) -> Finished:
    async with ask.stream(engine):
        await linger(rng, 100)
    return False


async def drop(engine: AsyncEngine, ask: Ask, rng: Random) -> Finished:
    cycle: list[object] = [await ask.stream(engine).__aenter__()]
    cycle.append(cycle)
    await linger(rng, 50)
    return False


async def be_cancelled(engine: AsyncEngine, ask: Ask, rng: Random) -> Finished:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_unless_failing, engine, ask, rng)
        await linger(rng, 60)
        tasks.cancel_scope.cancel()
    return False


async def be_closed_by_another_task(engine: AsyncEngine, ask: Ask, rng: Random) -> Finished:
    stream = ask.stream(engine)

    async def read() -> None:
        reading = Reading(ask)
        with contextlib.suppress(RequestFailed, EngineClosed, EngineBroken, EngineBusy):
            async for token in stream:
                reading.add(token)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await linger(rng, 60)
        await stream.aclose()
    return False


async def time_out(engine: AsyncEngine, ask: Ask, rng: Random) -> Finished:
    with anyio.move_on_after(rng.random() / 100):
        await read_unless_failing(engine, ask, rng)
    return False


async def read_unless_failing(engine: AsyncEngine, ask: Ask, rng: Random) -> None:
    with contextlib.suppress(RequestFailed, EngineClosed, EngineBroken, EngineBusy):
        await read_all(engine, ask, rng)


WAYS: tuple[Way, ...] = (
    read_all,
    read_all,
    read_all,
    read_slowly,
    read_late,
    break_out,
    never_read,
    drop,
    be_cancelled,
    be_closed_by_another_task,
    time_out,
)


# -- a round ---------------------------------------------------------------------------------------

Ending = Literal["idle", "close", "drain", "break"]


class Round:
    """One engine, its visitors and its mishaps.

    Attributes:
        seed: makes the round.
        outcomes: how many visits came to which end.
    """

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        self.seed = seed
        self.outcomes: Counter[str] = Counter()
        self._geometry = PoolGeometry(rng.randrange(8, 40), rng.choice((1, 3, 4, 8)), LONGEST)
        self._ending: Ending = rng.choice(("idle", "idle", "idle", "close", "drain", "break"))
        self._mishaps = rng.choice((0.0, 0.01))
        self._runner = MischievousRunner(
            self._geometry,
            Random(f"{seed} runner"),
            self._mishaps,
            rng.randrange(200) if self._ending == "break" else None,
        )
        self._visits_before_the_end = rng.randrange(len(BACKENDS) * VISITORS * VISITS)
        self._time_to_end = threading.Event()
        self._failures: list[BaseException] = []
        strategy = rng.choice(STRATEGIES)
        self._engine = fake_engine(
            self._runner,
            geometry=self._geometry,
            tokenizer=CharacterTokenizer(),
            allocator=lambda geometry: self._mischievous(strategy(geometry)),
            max_num_seqs=rng.choice((1, 3, 6)),
            max_batch_tokens=rng.choice((1, 7, 16, 256)),
            max_waiting=rng.choice((1, 3, 100)),
            when_busy=rng.choice(("wait", "wait", "raise")),
            prefix_cache=rng.choice((True, False)),
            **rng.choice(PREEMPTIONS),
        )

    def play(self) -> None:
        """Visit, end, and count.

        Raises:
            AssertionError: somebody saw what it should not have, or something is left over.
        """
        visitors = [
            threading.Thread(target=self._run_loop, args=(index, backend), daemon=True)
            for index, backend in enumerate((*BACKENDS, BACKENDS[0]))
        ]
        for thread in visitors:
            thread.start()
        if self._ending in {"close", "drain"}:
            assert self._time_to_end.wait(STUCK_S), f"round {self.seed} hangs before its end"
            anyio.run(partial(self._engine.aclose, drain=self._ending == "drain"))
        for thread in visitors:
            thread.join(STUCK_S)
            assert not thread.is_alive(), f"round {self.seed} hangs"
        if self._failures:
            raise AssertionError(f"round {self.seed} failed") from self._failures[0]
        self._check_the_end()

    def _mischievous(self, inner: Allocator) -> Mischief:
        self._allocator = Mischief(inner, Random(f"{self.seed} allocator"), self._mishaps)
        return self._allocator

    # -- visits

    def _run_loop(self, index: int, backend: str) -> None:
        try:
            anyio.run(self._visit_together, index, backend=backend)
        except BaseException as failure:
            self._failures.append(failure)
            self._time_to_end.set()

    async def _visit_together(self, index: int) -> None:
        tasks_before = len(anyio.get_running_tasks())
        async with anyio.create_task_group() as tasks:
            for visitor in range(VISITORS):
                tasks.start_soon(self._visit, Random(f"{self.seed} {index} {visitor}"))
        gc.collect()  # of streams that were dropped
        assert len(anyio.get_running_tasks()) == tasks_before

    async def _visit(self, rng: Random) -> None:
        for _ in range(VISITS):
            ask, way = Ask.at_random(rng, self._geometry), rng.choice(WAYS)
            self.outcomes[await self._outcome(ask, way, rng)] += 1
            if self.outcomes.total() >= self._visits_before_the_end:
                self._time_to_end.set()

    async def _outcome(self, ask: Ask, way: Way, rng: Random) -> str:
        try:
            return "finished" if await way(self._engine, ask, rng) else "left"
        except EngineBusy:
            assert self._engine.config.when_busy == "raise"
            return "refused"
        except EngineClosed:
            assert self._ending in {"close", "drain"}
            return "closed"
        except EngineBroken:
            assert self._ending == "break"
            return "broken"
        except RequestFailed as failure:
            self._check_injected(ask, failure)
            return "failed"

    def _check_injected(self, ask: Ask, failure: RequestFailed) -> None:
        if isinstance(failure, OutgrewPool):
            most = len(ask.prompt) + (ask.params.max_tokens or 0)
            assert self._mishaps or most > self._geometry.num_slots, f"{failure} of {ask}"
            return
        assert self._mishaps, f"nothing was injected, but {failure!r}"
        assert isinstance(failure, AllocatorFault | StepFailed)
        assert isinstance(failure, AllocatorFault) or isinstance(failure.__cause__, Injected)

    # -- the end

    def _check_the_end(self) -> None:
        self._allocator.share = self._runner.share = 0.0
        gc.collect()
        anyio.run(self._end)
        assert self._runner.closed
        stats = self._engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.pool.used_blocks) == (0, 0, 0)
        assert stats.pool.free_blocks + stats.pool.cached_blocks == stats.pool.num_blocks
        assert self._allocator.statistics().free_blocks == stats.pool.free_blocks
        check_ledger(self._engine)
        assert self.outcomes.total() == (len(BACKENDS) + 1) * VISITORS * VISITS
        assert stats.requests_finished >= self.outcomes["finished"]
        assert stats.requests_failed >= self.outcomes["failed"]

    async def _end(self) -> None:
        if self._ending == "idle":
            await self._engine.idle()
            await self._check_serves()
        await self._engine.aclose()

    async def _check_serves(self) -> None:
        """With the mishaps over, every row is there, and every request is served."""
        params = SamplingParams(max_tokens=2)
        rows = min(self._engine.config.max_num_seqs, self._engine.config.max_waiting)
        streams = [await self._engine.generate([1], params).__aenter__() for _ in range(rows)]
        for stream in streams:
            assert [token.id async for token in stream] == undisturbed([1], 2)


def play(seed: int) -> Counter[str]:
    """Play one round; says how many visits came to which end."""
    log = logging.getLogger("kvpage")
    level = log.level
    log.setLevel(logging.CRITICAL)  # thousands of mishaps
    try:
        one = Round(seed)
        one.play()
    finally:
        log.setLevel(level)  # not by its attribute: loggers remember what is enabled
    return one.outcomes
