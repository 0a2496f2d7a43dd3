"""What the block manager refuses, and what it counts at an admission."""

from typing import Any

import numpy as np
import pytest

from kvpage.allocators.base import Grant
from kvpage.allocators.fixed import FixedAllocator
from kvpage.batch import RunningBatch
from kvpage.block_manager import BlockManager
from kvpage.blocks import BlockId, Extent, PoolGeometry, SequenceId
from kvpage.errors import AllocatorFault, OutOfBlocks
from kvpage.prefix import ChainedKeys
from kvpage.scheduler import Scheduler
from kvpage.sequence import Sequence
from kvpage.testing import FakeRunner

GEOMETRY = PoolGeometry(8, 4, 32)


class Answering(FixedAllocator):
    """A fixed allocator that gives one answer of the test's own."""

    answer: Any = None

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        if isinstance(self.answer, type):
            raise self.answer("all", None)
        granted: Grant = self.answer
        return granted


def manager(answer: Any) -> BlockManager:
    allocator = Answering(GEOMETRY)
    allocator.answer = answer
    blocks = BlockManager(GEOMETRY, allocator, max_num_seqs=2, name="lying")
    blocks.admit(SequenceId(0), 0, 4, max_tokens=32)
    return blocks


@pytest.mark.parametrize("num_blocks", [0, -1, -(10**12), 9, 10**12])
def test_an_extent_of_an_impossible_length_is_refused(num_blocks: int) -> None:
    """Before it is written out block by block."""
    blocks = manager(Grant((Extent(BlockId(4), num_blocks),)))
    with pytest.raises(AllocatorFault, match=f"granted {num_blocks} blocks of a pool of 8"):
        blocks.extend(SequenceId(0), 5)
    assert len(blocks.blocks_of(SequenceId(0))) == 1


def test_out_of_blocks_without_numbers_is_a_fault() -> None:
    """It is the plugin that is wrong, not the request."""
    with pytest.raises(AllocatorFault, match="raised TypeError in extend"):
        manager(OutOfBlocks).extend(SequenceId(0), 5)


def test_shared_blocks_are_not_counted_as_needed() -> None:
    """Two prompts that share 7 of 8 blocks run together in a pool of 12."""
    geometry = PoolGeometry(12, 4, 48)
    blocks = BlockManager(geometry, FixedAllocator(geometry), max_num_seqs=2, prefix_cache=True)
    batch = RunningBatch(2, 48)
    scheduler = Scheduler(blocks, batch, max_batch_tokens=512)
    runner = FakeRunner(geometry, known_tokens=batch.tokens)
    for number in range(2):
        prompt = np.arange(30, dtype=np.int32)
        keys = ChainedKeys(4, secret=b"key")
        scheduler.add(Sequence(SequenceId(number), prompt, 30, 34, prefix_keys=keys))
        plan = scheduler.schedule().plan
        assert plan is not None
        scheduler.update(plan, runner.execute(plan))
    assert scheduler.num_running == 2
    assert scheduler.cached_prompt_tokens == 28
