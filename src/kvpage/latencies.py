"""How long things take in a running engine, counted in histograms."""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import attrs

from kvpage.blocks import BlockId

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the buckets: a step of a small model up to a long answer on a slow machine."""

HOST_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
"""Upper bounds of the buckets for the work around a step."""

LIFETIME_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
"""Upper bounds for blocks, which the prefix cache may keep for hours."""


@attrs.frozen
class HistogramSnapshot:
    """Counted observations.

    Attributes:
        bounds: upper bounds of all buckets but the last, which has none.
        counts: observations in each bucket, one more than there are bounds.
        total: sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_observations(self) -> int:
        """How many there were."""
        return sum(self.counts)


class Histogram:
    """Counts observations in fixed buckets. Written by one thread, read by any."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation; a value on a bound belongs below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        """What was counted so far."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


@attrs.frozen(eq=False)
class Latencies:
    """Histograms of seconds.

    Attributes:
        queue: from submission to the first step, per request.
        first_token: from submission to the first token, per request.
        inter_token: between two tokens of a request.
        request: from submission to the last token, per finished request.
        step: one execution of the model, sampling included.
        host: the rest of a step: deciding it, delivering its tokens.
        block_lifetime: from the grant of a block to its return, the time that it was kept for
            reuse included, per block.
    """

    queue: Histogram = attrs.field(factory=Histogram)
    first_token: Histogram = attrs.field(factory=Histogram)
    inter_token: Histogram = attrs.field(factory=Histogram)
    request: Histogram = attrs.field(factory=Histogram)
    step: Histogram = attrs.field(factory=Histogram)
    host: Histogram = attrs.field(factory=lambda: Histogram(HOST_SECONDS))
    block_lifetime: Histogram = attrs.field(factory=lambda: Histogram(LIFETIME_SECONDS))


class BlockLifetimes:
    """Counts how long blocks are away from their allocator.

    Costs a few tenths of a microsecond per block, nothing per token.

    Args:
        num_blocks: blocks in the pool.
        histogram: counts the seconds.
        clock: tells seconds.
    """

    def __init__(
        self,
        num_blocks: int,
        histogram: Histogram,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._granted_at = [0.0] * num_blocks
        self._histogram = histogram
        self._clock = clock

    def granted(self, blocks: Sequence[BlockId]) -> None:
        """The allocator gave these blocks."""
        now = self._clock()
        for block in blocks:
            self._granted_at[block] = now

    def returned(self, blocks: Sequence[BlockId]) -> None:
        """The allocator has these blocks back."""
        now = self._clock()
        for block in blocks:
            self._histogram.observe(now - self._granted_at[block])
