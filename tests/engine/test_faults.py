"""A step, an allocator or the engine itself fails: who hears of it, and what goes on."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from kvpage import (
    AllocatorFault,
    EngineBroken,
    Extent,
    Grant,
    KvpageError,
    OutgrewPool,
    PoolGeometry,
    RequestFailed,
    SamplingParams,
    SequenceId,
    StepFailed,
    TokenStream,
)
from kvpage.allocators.dynamic import DynamicAllocator
from kvpage.allocators.fixed import FixedAllocator
from kvpage.blocks import BlockId
from kvpage.plan import StepPlan, StepResult
from kvpage.sampling import MAX_CHOICES
from kvpage.testing import undisturbed
from tests.engine.conftest import Run
from tests.engine.runners import GEOMETRY, CharacterTokenizer, GatedRunner
from tests.engine.scenes import (
    Scene,
    check_generates,
    check_nothing_left,
    fake_engine,
    scene,
    until,
)

PROMPT = [1, 2, 3]
Outcome = list[int] | KvpageError


async def outcomes(
    at: Scene, number: int, *, prompt: list[int] = PROMPT, max_tokens: int = 5
) -> list[Outcome]:
    """What `number` equal requests come to; none gets beyond its first step before all are open."""
    found: list[Outcome] = [[] for _ in range(number)]
    params = SamplingParams(max_tokens=max_tokens)
    streams = [await at.engine.generate(prompt, params).__aenter__() for _ in found]
    at.let_go()

    async def read(index: int) -> None:
        try:
            found[index] = [token.id async for token in streams[index]]
        except KvpageError as error:
            found[index] = error

    async with anyio.create_task_group() as tasks:
        for index in range(number):
            tasks.start_soon(read, index)
    return found


def failing(when: Callable[[StepPlan], bool], error: BaseException) -> GatedRunner:
    """A runner, held at its first step, that raises `error` once, when `when` says so of a plan."""
    errors = [error]

    def failure(plan: StepPlan) -> None:
        if errors and when(plan):
            raise errors.pop()

    return GatedRunner(free_steps=0, watch=failure)


# -- steps -----------------------------------------------------------------------------------------


def test_a_failed_step_fails_its_own_requests_only(run: Run) -> None:
    """Those in the step get `StepFailed` with its cause; the queue behind them is served."""
    cause = ArithmeticError("the model overflowed")

    async def main() -> None:
        runner = failing(lambda plan: len(plan.rows) == 2, cause)
        async with scene(runner, max_num_seqs=2) as at:
            *failed, third = await outcomes(at, 3)
            for error in failed:
                assert isinstance(error, StepFailed)
                assert error.__cause__ is cause
                assert str(error) == "a step failed: ArithmeticError: the model overflowed"
            assert third == undisturbed(PROMPT, 5)
            await check_nothing_left(at.engine, "again")
            assert at.engine.stats().requests_failed == 2

    run(main)


def test_a_running_request_outside_the_failed_step_goes_on(run: Run) -> None:
    """Requests that the token budget left out of the step that failed do not notice."""
    cause = ArithmeticError("the model overflowed")

    async def main() -> None:
        runner = failing(lambda plan: len(plan.rows) == 2, cause)
        async with scene(runner, max_batch_tokens=2) as at:
            first, second, third, fourth = await outcomes(at, 4, prompt=[1])
            assert isinstance(first, StepFailed)
            assert isinstance(second, StepFailed)
            assert third == fourth == undisturbed([1], 5)

    run(main)


def test_a_failed_step_leaves_nothing_false_in_the_prefix_cache(run: Run) -> None:
    """Blocks that a failed step should have copied are not shared as if they had been."""

    async def main() -> None:
        runner = failing(lambda plan: len(plan.copies) > 0, ArithmeticError())
        async with scene(runner, allocator=partial(DynamicAllocator, max_extent=4)) as at:
            failed = await outcomes(at, 3, max_tokens=60)
            assert any(isinstance(outcome, StepFailed) for outcome in failed)
            again = PROMPT + undisturbed(PROMPT, 60)
            completion = await at.engine.complete(again, SamplingParams(max_tokens=3))
            assert list(completion.token_ids) == undisturbed(again, 3)

    run(main)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError("all gone")])
def test_every_failure_of_a_step_reaches_its_requests(run: Run, error: BaseException) -> None:
    """Exceptions that are no `Exception` break the engine, all others only the step."""

    async def main() -> None:
        async with scene(failing(lambda _: True, error)) as at:
            (found,) = await outcomes(at, 1)
            assert isinstance(found, StepFailed | EngineBroken)
            assert isinstance(found, StepFailed) == isinstance(error, Exception)
            assert found.__cause__ is error

    run(main)


# -- the engine itself -----------------------------------------------------------------------------


class TalkativeRunner(GatedRunner):
    """Gives more tokens than were asked for, which no scheduler can make sense of."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        return StepResult(np.append(result.token_ids, [1, 2]))


def test_a_broken_engine_tells_everybody(run: Run) -> None:
    """Open streams, later requests and `idle` get `EngineBroken` with the cause; closing works."""

    async def main() -> None:
        runner = TalkativeRunner(free_steps=0)
        async with scene(runner, max_num_seqs=2) as at:
            for found in await outcomes(at, 4):
                assert isinstance(found, EngineBroken)
                assert isinstance(found.__cause__, ValueError)
            with pytest.raises(EngineBroken, match="the engine ended by ValueError"):
                await at.engine.complete(PROMPT)
            with pytest.raises(EngineBroken):
                await at.engine.idle()
        assert runner.closed
        assert at.engine.stats().pool.used_blocks == 0

    run(main)


def test_a_broken_engine_tells_who_waits_for_admission(run: Run) -> None:
    """A request that was not accepted yet hears of the end as well."""

    async def main() -> None:
        async with scene(TalkativeRunner(free_steps=0), max_num_seqs=1, max_waiting=1) as at:

            async def expect_broken() -> None:
                with pytest.raises(EngineBroken):
                    await at.engine.complete(PROMPT)

            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(expect_broken)
                await until(lambda: len(at.engine._gate._waiters) >= 2)
                at.let_go()

    run(main)


# -- decoding --------------------------------------------------------------------------------------


class FickleTokenizer(CharacterTokenizer):
    """Cannot decode what follows the prompt `[1, 2, 3]`."""

    def decode(self, ids: Sequence[int], **_options: bool) -> str:
        if undisturbed(PROMPT, 2)[1] in ids:
            raise UnicodeError("no such character")
        return super().decode(ids)


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["in the reader", "in the engine"])
def test_an_output_that_cannot_be_decoded_fails_one_request(
    run: Run, stop: tuple[str, ...]
) -> None:
    """Wherever it is decoded, its reader gets `RequestFailed` and the engine goes on."""

    async def main() -> None:
        async with fake_engine(tokenizer=FickleTokenizer()) as engine:
            found: list[int] = []
            stream = engine.generate(PROMPT, SamplingParams(stop=stop), request_id="mine")
            with pytest.raises(RequestFailed) as failure:
                await collect(stream, found)
            assert str(failure.value) == (
                "the output cannot be decoded: UnicodeError: no such character"
            )
            assert isinstance(failure.value.__cause__, UnicodeError)
            assert found == undisturbed(PROMPT, 1)
            assert [token async for token in stream] == []
            await engine.idle()
            assert engine.stats().pool.used_blocks == 0
            assert (await engine.complete([9], SamplingParams(max_tokens=1))).text

    run(main)


async def collect(stream: TokenStream, into: list[int]) -> None:
    """Read to the end, and keep what came before an error."""
    async for token in stream:
        into += [token.id]


# -- allocators ------------------------------------------------------------------------------------

BAD = SequenceId(MAX_CHOICES)  # of the second request
"""The second request of an engine: the one whose allocator misbehaves."""


class Raising(FixedAllocator):
    """Raises in one method for one sequence."""

    def __init__(self, geometry: PoolGeometry, *, method: str, bad: SequenceId = BAD) -> None:
        super().__init__(geometry)
        self._method = method
        self._bad = bad

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        self._raise_in("admit", seq)
        return super().admit(seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens)

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        self._raise_in("extend", seq)
        return super().extend(seq, num_tokens)

    def finish(self, seq: SequenceId) -> None:
        super().finish(seq)
        self._raise_in("finish", seq)

    def _raise_in(self, method: str, seq: SequenceId) -> None:
        if method == self._method and seq == self._bad:
            raise LookupError("lost a block")


class Lying(FixedAllocator):
    """Gives one sequence a bad answer to `admit`."""

    def __init__(self, geometry: PoolGeometry, *, lie: Callable[[Grant], Any]) -> None:
        super().__init__(geometry)
        self._lie = lie

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        grant = super().admit(seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens)
        lie: Grant = self._lie(grant) if seq == BAD else grant
        return lie


LIES: dict[str, Callable[[Grant], Any]] = {
    "outside the pool": lambda _: Grant((Extent(BlockId(GEOMETRY.num_blocks), 1),)),
    "below zero": lambda _: Grant((Extent(BlockId(-1), 1),)),
    "the first request's": lambda _: Grant((Extent(BlockId(0), 1),)),
    "twice": lambda grant: Grant(grant.extents * 2),
    "nothing": lambda _: Grant(),
    "not a grant": lambda _: None,
    "bare numbers": lambda _: Grant((0, 1)),  # type: ignore[arg-type]
    "no number": lambda _: Grant((Extent("first", 1),)),  # type: ignore[arg-type]
    "moves that are no pairs": lambda grant: Grant(grant.extents, (1, 2)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("method", ["admit", "extend"])
def test_an_allocator_that_raises_fails_one_request(run: Run, method: str) -> None:
    """That request gets `AllocatorFault` naming the allocator, with the cause; others go on."""

    def raising(geometry: PoolGeometry) -> Raising:
        return Raising(geometry, method=method)

    async def main() -> None:
        async with scene(free_steps=0, allocator=raising) as at:
            first, second, third = await outcomes(at, 3)
            assert isinstance(second, AllocatorFault)
            expected = f"allocator 'raising' raised LookupError in {method}: lost a block"
            assert str(second) == expected
            assert second.plugin == "raising"
            assert first == third == undisturbed(PROMPT, 5)
            await check_nothing_left(at.engine, "again")

    run(main)


@pytest.mark.parametrize("method", ["admit", "extend"])
def test_a_fault_of_one_choice_ends_the_others_before_the_next_step(run: Run, method: str) -> None:
    """The whole request gets `AllocatorFault`, and nothing is computed for what it has given up."""

    def raising(geometry: PoolGeometry) -> Raising:
        return Raising(geometry, method=method, bad=SequenceId(BAD + 2))

    async def main() -> None:
        async with scene(allocator=raising) as at:
            params = SamplingParams(max_tokens=30)
            async with at.engine.generate(PROMPT, params) as other:
                with pytest.raises(AllocatorFault):
                    await at.engine.complete(PROMPT, SamplingParams(n=3, max_tokens=20))
                assert [token.id async for token in other] == undisturbed(PROMPT, 30)
            await check_nothing_left(at.engine, "again")

    run(main)


def test_an_allocator_that_raises_at_the_end_fails_nobody(run: Run) -> None:
    """When a request is over, what its allocator raises can only be logged."""

    def raising(geometry: PoolGeometry) -> Raising:
        return Raising(geometry, method="finish")

    async def main() -> None:
        async with scene(free_steps=0, allocator=raising) as at:
            assert await outcomes(at, 3) == [undisturbed(PROMPT, 5)] * 3
            await check_nothing_left(at.engine, "again")

    run(main)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_allocator_that_lies_fails_one_request(run: Run, lie: Callable[[Grant], Any]) -> None:
    """Every kind of bad grant is found out before anything is written to it."""

    def lying(geometry: PoolGeometry) -> Lying:
        return Lying(geometry, lie=lie)

    async def main() -> None:
        async with scene(free_steps=0, allocator=lying) as at:
            first, second, third = await outcomes(at, 3)
            assert isinstance(second, AllocatorFault)
            assert first == third == undisturbed(PROMPT, 5)
            await check_nothing_left(at.engine, "again")

    run(main)


# -- room ------------------------------------------------------------------------------------------

TINY = PoolGeometry(num_blocks=4, block_size=4, max_model_len=128)
"""16 slots: less than a sequence may grow to."""


def test_a_request_that_outgrows_the_pool_ends_by_an_error_of_its_own(run: Run) -> None:
    """It gets as many tokens as there is room for, then `OutgrewPool` with both numbers."""

    async def main() -> None:
        async with fake_engine(geometry=TINY) as engine:
            stream = engine.generate(PROMPT, SamplingParams(max_tokens=50))
            found: list[int] = []
            with pytest.raises(OutgrewPool, match=r"17 tokens need 1 more blocks.*pool of 4 "):
                await collect(stream, found)
            assert found == undisturbed(PROMPT, 17 - len(PROMPT))
            await check_generates(engine)

    run(main)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_two_requests_with_room_for_one_and_a_half_both_finish(run: Run, preempt: str) -> None:
    """Each preempts the other at most a few times, and neither notices in its output."""

    async def main() -> None:
        runner = GatedRunner(TINY, free_steps=0)
        async with scene(runner, geometry=TINY, preempt=preempt) as at:
            assert await outcomes(at, 2, max_tokens=10) == [undisturbed(PROMPT, 10)] * 2
            stats = at.engine.stats()
            assert 1 <= stats.preemptions <= 4
            assert stats.swapped_preemptions == (stats.preemptions if preempt == "swap" else 0)

    run(main)
