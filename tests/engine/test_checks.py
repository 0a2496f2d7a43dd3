"""An engine that checks everything: a bug shows in the step that makes it."""

from collections.abc import Iterable

import anyio
import attrs
import numpy as np
import pytest
import torch

from kvpage import (
    AsyncEngine,
    BlockId,
    EngineBroken,
    LedgerError,
    PoolGeometry,
    SamplingParams,
    SequenceId,
)
from kvpage.allocators.fixed import FixedAllocator
from kvpage.batch import RunningBatch
from kvpage.block_manager import BlockManager
from kvpage.checks import CheckedScheduler
from kvpage.kernels import attention_backend
from kvpage.model import KVPools, share_model
from kvpage.probe import LayerShape
from kvpage.runner import ModelRunner, first_tokens
from kvpage.sequence import Sequence
from kvpage.testing import FakeRunner, undisturbed
from kvpage.testing.fake_runner import CorruptCache
from tests.engine.conftest import Run
from tests.engine.runners import GatedRunner
from tests.engine.scenes import fake_engine, scene
from tests.engine.test_faults import outcomes
from tests.model.tiny import VOCABULARY, tiny_model

SMALL = PoolGeometry(num_blocks=16, block_size=4, max_model_len=64)
STRATEGIES = ("fixed", "dynamic", "contiguous:reserve=request")


# -- what is right stays as it is ------------------------------------------------------------------


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("allocator", STRATEGIES)
def test_correct_runs_give_the_same_output(run: Run, allocator: str, preempt: str) -> None:
    """With preemption, shared prefixes and moves in a pool that is too small."""

    async def main() -> None:
        runner = GatedRunner(SMALL, free_steps=0)
        async with scene(runner, geometry=SMALL, allocator=allocator, checks="everything") as at:
            assert await outcomes(at, 6, max_tokens=30) == [undisturbed([1, 2, 3], 30)] * 6

    run(main)


@pytest.mark.parametrize("attention", ["reference", pytest.param("numba", marks=pytest.mark.slow)])
async def test_a_model_reads_nothing_of_free_blocks(attention: str) -> None:
    """NaN in every slot that nobody has written changes no token, also across preemptions."""
    model = tiny_model("llama")
    params = SamplingParams(max_tokens=20, temperature=0)
    prompts = [[(7 * i + j) % VOCABULARY for j in range(5 + i)] for i in range(4)]

    async def texts(checks: str) -> list[tuple[int, ...]]:
        engine = AsyncEngine(
            model=model,
            kv_memory="20 blocks",
            block_size=3,
            attention=attention,
            checks=checks,
        )
        found: list[tuple[int, ...]] = [()] * len(prompts)

        async def one(index: int) -> None:
            found[index] = (await engine.complete(prompts[index], params)).token_ids

        async with engine:
            for _ in range(2):  # the second time over blocks that were poisoned
                async with anyio.create_task_group() as tasks:
                    for index in range(len(prompts)):
                        tasks.start_soon(one, index)
        return found

    assert await texts("everything") == await texts("grants")


# -- what is wrong shows ---------------------------------------------------------------------------


class Leaky(FixedAllocator):
    """Forgets one of the blocks that it gets back."""

    def free(self, blocks: Iterable[BlockId]) -> None:
        super().free(list(blocks)[1:])


def test_a_plugin_that_loses_a_block_breaks_the_engine(run: Run) -> None:
    """At once, by a sentence that names it; without the checks nobody would know."""

    async def main() -> None:
        async with fake_engine(allocator=Leaky, prefix_cache=False, checks="everything") as engine:
            with pytest.raises(EngineBroken) as broken:
                await engine.complete([1, 2, 3], SamplingParams(max_tokens=9))
            assert isinstance(broken.value.__cause__, LedgerError)
            assert str(broken.value) == (
                "the engine ended by LedgerError: the ledger of blocks contradicts itself: "
                "allocator 'Leaky' says that 63 blocks are free, and 64 are"
            )
            assert engine.health().state == "broken"

    run(main)


class Forgetful(BlockManager):
    """Gives the first block of a sequence back while the sequence lives."""

    def lose_first(self, seq: SequenceId) -> None:
        block = self._holdings[seq].blocks[0]
        self._references[block] = 0
        self._num_free += 1
        self._allocator.free([block])


def one_running() -> tuple[CheckedScheduler, Forgetful, FakeRunner]:
    """A sequence of six tokens, after its first step."""
    blocks = Forgetful(SMALL, FixedAllocator(SMALL), max_num_seqs=2)
    batch = RunningBatch(2, SMALL.max_model_len)
    runner = FakeRunner(SMALL, known_tokens=batch.tokens)
    scheduler = CheckedScheduler(blocks, batch, max_batch_tokens=64, poison=runner.poison)
    prompt = np.arange(6, dtype=np.int32)
    scheduler.add(Sequence(SequenceId(0), prompt, prompt_tokens=6, max_total_tokens=40))
    plan = scheduler.schedule().plan
    assert plan is not None
    scheduler.update(plan, runner.execute(plan))
    return scheduler, blocks, runner


def test_a_block_that_is_free_and_held_is_found_before_the_step_runs() -> None:
    """The schedule of the next step is never executed."""
    scheduler, blocks, *_ = one_running()
    blocks.lose_first(SequenceId(0))
    with pytest.raises(LedgerError, match="block 0 has 0 references, and 1 are found"):
        scheduler.schedule()


def test_a_ledger_that_breaks_in_a_step_is_found_after_it() -> None:
    """Before anybody gets a token of it."""
    scheduler, blocks, runner = one_running()
    plan = scheduler.schedule().plan
    assert plan is not None
    result = runner.execute(plan)
    blocks.lose_first(SequenceId(0))
    with pytest.raises(LedgerError):
        scheduler.update(plan, result)


def test_freed_blocks_are_poisoned_before_the_next_step() -> None:
    """Whoever reads a sequence's blocks after its end reads that they are not its own."""
    scheduler, _, runner = one_running()
    plan = scheduler.schedule().plan
    assert plan is not None
    stale = attrs.evolve(plan, block_tables=plan.block_tables.copy())
    runner.execute(stale)
    scheduler.cancel_all()
    runner.execute(stale)
    scheduler.schedule()
    with pytest.raises(CorruptCache):
        runner.execute(stale)


def test_blocks_that_were_held_for_a_single_step_are_poisoned() -> None:
    """A request that ends in its first step has written them all the same."""
    poisoned: list[list[int]] = []
    blocks = BlockManager(SMALL, FixedAllocator(SMALL), max_num_seqs=1)
    batch = RunningBatch(1, SMALL.max_model_len)
    scheduler = CheckedScheduler(
        blocks, batch, max_batch_tokens=64, poison=lambda freed: poisoned.append(freed.tolist())
    )
    prompt = np.arange(6, dtype=np.int32)
    scheduler.add(Sequence(SequenceId(0), prompt, prompt_tokens=6, max_total_tokens=7))
    plan = scheduler.schedule().plan
    assert plan is not None
    scheduler.update(plan, FakeRunner(SMALL).execute(plan))
    scheduler.schedule()
    assert poisoned == [list(range(SMALL.num_blocks)), [0, 1]]


def test_blocks_in_use_are_left_alone() -> None:
    """Step after step, also as the sequence grows into blocks that were poisoned while free."""
    scheduler, _, runner = one_running()
    for _ in range(30):
        plan = scheduler.schedule().plan
        assert plan is not None
        scheduler.update(plan, runner.execute(plan))


def test_a_model_that_reads_a_poisoned_block_fails_the_request() -> None:
    """NaN goes through attention to the logits, of which no token can be chosen."""
    runner = ModelRunner(share_model(tiny_model("llama")), SMALL, "reference")
    decode = first_tokens(9, SMALL.block_size, num_queries=1)
    runner.execute(first_tokens(8, SMALL.block_size))
    assert not runner.execute(decode).failures
    runner.poison(np.array([2, 3]))
    runner.execute(decode)  # which writes its token into block 2 first
    runner.poison(np.array([0]))
    assert "not finite" in str(runner.execute(decode).failures[0])


def test_poison_fills_these_blocks_and_no_others() -> None:
    """K and V of every layer."""
    shapes = (LayerShape(2, 4, 6, 1),) * 2
    backend = attention_backend("reference")
    device = torch.device("cpu")
    pools = KVPools(shapes, 12, backend, dtype=torch.bfloat16, device=device)
    for pool in (pool for layer in pools.layers for pool in layer):
        pool.zero_()
    pools.poison(torch.tensor([1, 3]), block_size=3)
    for pool in (pool for layer in pools.layers for pool in layer):
        poisoned = pool.isnan().flatten(1).all(1)
        assert poisoned.tolist() == ([False] * 3 + [True] * 3) * 2
        assert not pool[~poisoned].isnan().any()
