"""Swap space, and what the scheduler does with it: nothing is computed twice, nothing is lost."""

import pytest
from tests.allocators.test_scheduler_properties import Service

from kvpage.allocators.fixed import FixedAllocator
from kvpage.block_manager import BlockManager
from kvpage.blocks import BlockId, PoolGeometry, SequenceId
from kvpage.errors import StepFailed
from kvpage.sequence import SequenceState
from kvpage.swap import SwapSpace
from kvpage.testing import undisturbed
from kvpage.testing.conformance import AllocatorUnderTest

FIRST, SECOND = SequenceId(0), SequenceId(1)
BLOCKS = [BlockId(block) for block in (7, 3, 9)]

PROMPT = list(range(5, 21))
MAX_TOKENS = 24
GEOMETRY = PoolGeometry(num_blocks=15, block_size=4, max_model_len=40)
"""Room for one and a half requests of full length."""


def service(factory: AllocatorUnderTest, *, swap_blocks: int, budget: int = 16) -> Service:
    return Service(
        factory,
        GEOMETRY,
        max_num_seqs=4,
        max_batch_tokens=budget,
        prefix_cache=False,
        swap_blocks=swap_blocks,
    )


def until_swapped(at: Service) -> None:
    """Step until a preempted sequence is kept in host memory."""
    while not at.scheduler.swap.used_blocks:
        at.step()


# -- the space -------------------------------------------------------------------------------------


def test_a_sequence_goes_out_and_comes_back() -> None:
    """Each block of it to a host block, and from there to its new block."""
    swap = SwapSpace(4)
    assert swap.put(FIRST, BLOCKS, first_block=0, num_tokens=11)
    assert swap.used_blocks == 3
    outs, ins = swap.take()
    assert (outs.tolist(), ins.tolist()) == ([[7, 0], [3, 1], [9, 2]], [])

    swap.restore(FIRST, 1, [BlockId(5), BlockId(6), BlockId(8)])

    outs, ins = swap.take()
    assert (outs.tolist(), ins.tolist()) == ([], [[1, 5], [2, 6]])
    assert (swap.used_blocks, swap.get(FIRST)) == (0, None)
    assert (swap.swapped_out_blocks, swap.swapped_in_blocks) == (3, 2)


def test_without_room_nothing_changes() -> None:
    """Whole or not at all; the refusal is counted."""
    swap = SwapSpace(4)
    swap.put(FIRST, BLOCKS, first_block=0, num_tokens=11)
    assert not swap.put(SECOND, BLOCKS, first_block=0, num_tokens=11)
    assert (swap.used_blocks, swap.get(SECOND), swap.num_full) == (3, None, 1)


def test_what_is_dropped_is_not_copied() -> None:
    """Its host blocks are free at once."""
    swap = SwapSpace(3)
    swap.put(FIRST, BLOCKS, first_block=0, num_tokens=11)
    swap.drop(FIRST)
    assert swap.put(SECOND, BLOCKS[:1], first_block=0, num_tokens=2)
    assert swap.take()[0].tolist() == [[7, 0]]


def test_a_host_block_is_not_written_before_it_was_read() -> None:
    """What comes back leaves its host blocks when that copy is certain, not before."""
    swap = SwapSpace(3)
    swap.put(FIRST, BLOCKS, first_block=0, num_tokens=11)
    swap.take()
    swap.restore(FIRST, 0, BLOCKS)
    assert not swap.put(SECOND, BLOCKS[:1], first_block=0, num_tokens=2)
    swap.take()
    assert swap.put(SECOND, BLOCKS[:1], first_block=0, num_tokens=2)


def test_who_ends_before_the_step_is_not_copied_back() -> None:
    """Its blocks may be somebody else's by then; its host blocks are free all the same."""
    swap = SwapSpace(3)
    swap.put(FIRST, BLOCKS, first_block=0, num_tokens=11)
    swap.take()
    swap.restore(FIRST, 0, BLOCKS)
    swap.forget(BLOCKS)
    assert [pairs.tolist() for pairs in swap.take()] == [[], []]
    assert swap.used_blocks == 0


def test_a_copy_that_was_not_made_loses_its_sequence_only() -> None:
    """The other one is still there."""
    swap = SwapSpace(8)
    swap.put(FIRST, BLOCKS, first_block=0, num_tokens=11)
    swap.take()
    swap.put(SECOND, BLOCKS, first_block=0, num_tokens=11)
    swap.lose(swap.take()[0])
    assert swap.get(FIRST) is not None
    assert swap.get(SECOND) is None
    assert swap.used_blocks == 3


# -- under the scheduler ---------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [512, 16, 5])
def test_nothing_is_computed_twice(factory: AllocatorUnderTest, budget: int) -> None:
    """Every token of every request once, whatever was preempted in between."""
    at = service(factory, swap_blocks=64, budget=budget)
    for _ in range(3):
        at.submit(PROMPT, MAX_TOKENS)

    at.run_to_the_end()

    assert at.computed_tokens == 3 * (len(PROMPT) + MAX_TOKENS - 1)
    assert list(at.outputs.values()) == [undisturbed(PROMPT, MAX_TOKENS)] * 3
    assert at.scheduler.recomputed_tokens == 0
    assert at.scheduler.num_preemptions == at.scheduler.num_swapped
    assert at.scheduler.num_preemptions <= 3 * MAX_TOKENS


def test_full_swap_space_falls_back_to_recompute() -> None:
    """It is counted, and the output is the same."""
    at = service(FixedAllocator, swap_blocks=1)
    for _ in range(3):
        at.submit(PROMPT, MAX_TOKENS)

    at.run_to_the_end()

    assert list(at.outputs.values()) == [undisturbed(PROMPT, MAX_TOKENS)] * 3
    assert at.scheduler.swap.num_full == at.scheduler.num_preemptions > 0
    assert at.scheduler.recomputed_tokens > 0


def test_a_swapped_sequence_that_is_cancelled_leaves_nothing() -> None:
    """Neither on the device nor on the host; the other goes on."""
    at = service(FixedAllocator, swap_blocks=64)
    first, second = at.submit(PROMPT, MAX_TOKENS), at.submit(PROMPT, MAX_TOKENS)
    until_swapped(at)

    at.scheduler.cancel(at.requests[second])

    assert at.scheduler.swap.used_blocks == 0
    at.run_to_the_end()
    assert at.outputs[first] == undisturbed(PROMPT, MAX_TOKENS)


def test_a_failing_step_spares_who_is_swapped_out() -> None:
    """What was copied before it is used; what it was to copy is computed again."""
    at = service(FixedAllocator, swap_blocks=64)
    first, second = at.submit(PROMPT, MAX_TOKENS), at.submit(PROMPT, MAX_TOKENS)
    until_swapped(at)
    at.step(fails=lambda _: True)
    assert isinstance(at.failures[first], StepFailed)

    at.run_to_the_end()

    assert at.outputs[second] == undisturbed(PROMPT, MAX_TOKENS)
    assert at.scheduler.recomputed_tokens == 0


def test_a_step_that_fails_to_swap_out_loses_that_sequence() -> None:
    """Its tokens are known, its K and V are computed again."""
    at = service(FixedAllocator, swap_blocks=64)
    _, second = at.submit(PROMPT, MAX_TOKENS), at.submit(PROMPT, MAX_TOKENS)
    while not at.failures:
        at.step(fails=lambda plan: len(plan.swap_outs) > 0)
    assert at.scheduler.swap.used_blocks == 0

    at.run_to_the_end()

    assert at.outputs[second] == undisturbed(PROMPT, MAX_TOKENS)


def test_forks_of_a_sequence_that_just_came_back(factory: AllocatorUnderTest) -> None:
    """Its blocks are not filled yet when the copies for forks are made."""
    other = list(range(90, 100))
    at = service(factory, swap_blocks=64)
    growing = at.submit(PROMPT, MAX_TOKENS)
    parent = at.submit(other, MAX_TOKENS)
    while at.requests[growing].state is not SequenceState.FINISHED:
        at.step()
    forks = [at.submit(other, MAX_TOKENS, fork_of=parent) for _ in range(2)]

    at.run_to_the_end()

    for seq in (parent, *forks):
        assert at.outputs[seq] == undisturbed(other, MAX_TOKENS)


def test_a_copy_that_is_due_is_swapped_out_from_its_source(factory: AllocatorUnderTest) -> None:
    """Blocks that a fork or a move is about to fill hold nothing yet."""
    blocks = BlockManager(GEOMETRY, factory(GEOMETRY), max_num_seqs=2)
    if not blocks.sharing:
        return
    blocks.admit(FIRST, 0, 10, max_tokens=40)
    blocks.fork(FIRST, SECOND, 1, 10, max_tokens=40)
    assert blocks.contents_of(SECOND, 9) == blocks.blocks_of(FIRST)[:3]
    blocks.take_copies()
    assert blocks.contents_of(SECOND, 9) == blocks.blocks_of(SECOND)[:3]
