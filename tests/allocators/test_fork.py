"""Forks share the prompt of a running sequence, and nothing after it."""

import numpy as np
import pytest

from kvpage.allocators.fixed import FixedAllocator
from kvpage.batch import RunningBatch
from kvpage.block_manager import BlockManager
from kvpage.blocks import PoolGeometry, SequenceId
from kvpage.errors import OutOfBlocks
from kvpage.scheduler import Scheduler
from kvpage.sequence import Sequence
from kvpage.testing import FakeRunner, undisturbed

BLOCK_SIZE = 8
MAX_TOKENS = 20


@pytest.fixture
def blocks() -> BlockManager:
    geometry = PoolGeometry(20, BLOCK_SIZE, 64)
    return BlockManager(geometry, FixedAllocator(geometry), max_num_seqs=4)


@pytest.mark.parametrize(
    ("prompt_tokens", "shared"), [(1, 0), (7, 0), (8, 0), (9, 1), (16, 1), (17, 2)]
)
def test_full_blocks_before_the_last_token_are_shared(
    blocks: BlockManager, prompt_tokens: int, shared: int
) -> None:
    """The block of the last prompt token is the fork's own."""
    parent, child = SequenceId(0), SequenceId(1)
    blocks.admit(parent, 0, prompt_tokens, max_tokens=64)
    computed = blocks.fork(parent, child, 1, prompt_tokens, max_tokens=64)
    blocks.verify()
    assert computed == prompt_tokens - 1
    common = set(blocks.blocks_of(parent)) & set(blocks.blocks_of(child))
    assert len(common) == shared


def test_the_partly_filled_block_is_copied(blocks: BlockManager) -> None:
    """Nothing is copied when the last token begins a block."""
    blocks.admit(SequenceId(0), 0, 12, max_tokens=64)
    blocks.fork(SequenceId(0), SequenceId(1), 1, 12, max_tokens=64)
    sources = [blocks.blocks_of(SequenceId(0))[1], blocks.blocks_of(SequenceId(1))[1]]
    assert blocks.take_copies().tolist() == [sources]

    blocks.admit(SequenceId(2), 2, 9, max_tokens=64)
    blocks.fork(SequenceId(2), SequenceId(3), 3, 9, max_tokens=64)
    assert len(blocks.take_copies()) == 0


def test_a_fork_without_room_changes_nothing(blocks: BlockManager) -> None:
    """The parent keeps what it has, alone."""
    blocks.admit(SequenceId(0), 0, 64, max_tokens=64)
    blocks.admit(SequenceId(1), 1, 96, max_tokens=96)
    before = blocks.statistics()
    with pytest.raises(OutOfBlocks):
        blocks.fork(SequenceId(0), SequenceId(2), 2, 60, max_tokens=64)
    blocks.verify()
    assert blocks.statistics() == before


@pytest.mark.parametrize("num_blocks", [40, 9])
def test_forks_generate_as_if_alone_and_compute_the_prompt_once(num_blocks: int) -> None:
    """Three forks of one prompt, with room for all and under preemption."""
    geometry = PoolGeometry(num_blocks, BLOCK_SIZE, 64)
    blocks = BlockManager(geometry, FixedAllocator(geometry), max_num_seqs=4)
    batch = RunningBatch(4, 64)
    scheduler = Scheduler(blocks, batch, max_batch_tokens=64)
    runner = FakeRunner(geometry, known_tokens=batch.tokens)
    prompt = list(range(5, 35))
    sequences = [
        Sequence(SequenceId(i), np.array(prompt, np.int32), 30, 30 + MAX_TOKENS) for i in range(4)
    ]
    scheduler.add(sequences[0])
    computed = 0
    for step in range(10_000):
        if step == 1:
            for sequence in sequences[1:]:
                sequence.fork_of = sequences[0]
                scheduler.add(sequence)
        plan = scheduler.schedule().plan
        blocks.verify()
        if plan is None:
            break
        computed += len(plan.token_ids)
        scheduler.update(plan, runner.execute(plan))
    expected = undisturbed(prompt, MAX_TOKENS)
    assert [s.tokens[30:].tolist() for s in sequences] == [expected] * 4
    if not scheduler.num_preemptions:
        # The prompt once, its last token once more for each fork, and all outputs but the last.
        assert computed == 30 + 3 + 4 * (MAX_TOKENS - 1)
