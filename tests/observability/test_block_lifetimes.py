"""How long blocks are held, from grant to return."""

import numpy as np
from prometheus_client import CollectorRegistry

from kvpage import BlockId, Extent, Grant, PoolGeometry, SamplingParams, SequenceId, metrics
from kvpage.allocators.dynamic import DynamicAllocator
from kvpage.allocators.fixed import FixedAllocator
from kvpage.block_manager import BlockManager
from kvpage.latencies import BlockLifetimes, Histogram
from kvpage.prefix import ChainedKeys
from tests.engine.scenes import fake_engine
from tests.observability.test_metrics import scraped

GEOMETRY = PoolGeometry(num_blocks=8, block_size=4, max_model_len=32)
A, B = SequenceId(1), SequenceId(2)


class Clock:
    """Tells the time that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ledger(clock: Clock, *, prefix_cache: bool = False) -> tuple[BlockManager, Histogram]:
    histogram = Histogram((1.0, 2.0, 3.0))
    lifetimes = BlockLifetimes(GEOMETRY.num_blocks, histogram, clock)
    allocator = FixedAllocator(GEOMETRY)
    blocks = BlockManager(
        GEOMETRY, allocator, max_num_seqs=2, lifetimes=lifetimes, prefix_cache=prefix_cache
    )
    return blocks, histogram


def test_each_block_counts_from_its_own_grant() -> None:
    """A sequence of two blocks that grows by one a second before its end."""
    clock = Clock()
    blocks, histogram = ledger(clock)
    blocks.admit(A, 0, 8, max_tokens=32)
    clock.now += 1.5
    blocks.extend(A, 9)
    clock.now += 1.0
    blocks.release(A)
    snapshot = histogram.snapshot()
    assert (snapshot.counts, snapshot.total) == ((1, 0, 2, 0), 2 * 2.5 + 1.0)


def test_a_block_that_is_granted_again_counts_anew() -> None:
    """The time that it was free is nobody's."""
    clock = Clock()
    blocks, histogram = ledger(clock)
    for seq in (A, B):
        blocks.admit(seq, 0, 4, max_tokens=32)
        clock.now += 0.5
        blocks.release(seq)
        clock.now += 50
    assert histogram.snapshot().counts == (2, 0, 0, 0)


def test_time_in_the_prefix_cache_counts() -> None:
    """The block is back with its allocator when it is evicted, not when its sequence ends."""
    clock = Clock()
    blocks, histogram = ledger(clock, prefix_cache=True)
    blocks.admit(A, 0, 5, max_tokens=32)
    keys = ChainedKeys(4, secret=b"s", salt="").first(1, np.arange(5, dtype=np.int32))
    blocks.publish(A, keys, 0)
    blocks.release(A)
    assert histogram.snapshot().counts == (1, 0, 0, 0)
    clock.now += 2.5
    blocks.admit(B, 0, 32, max_tokens=32)
    assert histogram.snapshot().counts == (1, 0, 1, 0)


def test_a_trimmed_block_is_back() -> None:
    """A strategy that grants more than is needed gives some of it back under pressure."""
    clock = Clock()
    histogram = Histogram((1.0,))
    lifetimes = BlockLifetimes(GEOMETRY.num_blocks, histogram, clock)
    allocator = DynamicAllocator(GEOMETRY)
    blocks = BlockManager(GEOMETRY, allocator, max_num_seqs=2, lifetimes=lifetimes)
    blocks.admit(A, 0, 20, max_tokens=32)
    held = len(blocks.blocks_of(A))
    trimmed = blocks.trim(np.array([4, 0]))
    assert histogram.snapshot().counts == (trimmed, 0)
    blocks.release(A)
    assert histogram.snapshot().counts == (held, 0)


def test_a_moved_block_and_the_one_it_came_from_both_count() -> None:
    """A move is a grant of the one and a return of the other."""
    histogram = Histogram((1.0,))
    lifetimes = BlockLifetimes(GEOMETRY.num_blocks, histogram, Clock())

    class Moving(FixedAllocator):
        def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
            del seq, num_tokens
            extent = Extent(BlockId(7), 1)
            self._free.remove(BlockId(7))
            self._free.remove(BlockId(6))
            return Grant((extent,), moves=((BlockId(0), BlockId(6)),))

    blocks = BlockManager(GEOMETRY, Moving(GEOMETRY), max_num_seqs=2, lifetimes=lifetimes)
    blocks.admit(A, 0, 4, max_tokens=32)
    blocks.extend(A, 5)
    assert histogram.snapshot().num_observations == 1
    blocks.release(A)
    assert histogram.snapshot().num_observations == 3


async def test_an_engine_exposes_them() -> None:
    """As a histogram of seconds: one observation for each block that came back."""
    registry = CollectorRegistry()
    async with fake_engine(prefix_cache=False) as engine:
        metrics.register(engine, registry)
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=7))  # K and V of nine
        await engine.idle()
        samples = scraped(registry)
    assert samples["kvpage_block_lifetime_seconds_count", ""] == 3
    assert samples["kvpage_block_lifetime_seconds_bucket", "le=+Inf"] == 3
