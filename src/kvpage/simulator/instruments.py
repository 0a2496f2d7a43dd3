"""What a replay measures with: a metered allocator, time-weighted means, a bounded time series."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import ceil, log10
from time import perf_counter_ns
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.allocators.base import Allocator, Grant, Trimmable
from kvpage.blocks import AllocatorStatistics, BlockId, SequenceId


@attrs.define
class OperationCost:
    """Calls of one method of an allocator. As a context manager it counts and times what is inside.

    Attributes:
        calls: how many, those that raised included.
        total_ns: wall time in them.
    """

    calls: int = 0
    total_ns: int = 0
    _start_ns: int = 0

    def __enter__(self) -> None:
        self._start_ns = perf_counter_ns()

    def __exit__(self, *_exception: object) -> None:
        self.total_ns += perf_counter_ns() - self._start_ns
        self.calls += 1


class MeteredAllocator:
    """Passes every call on to an allocator; counts and times it.

    Attributes:
        costs: by method.
        granted_extents: extents of all grants together.
        moved_blocks: blocks that the strategy had copied.
    """

    def __init__(self, inner: Allocator) -> None:
        self.sharing = inner.sharing
        self.costs = {name: OperationCost() for name in ("admit", "extend", "free", "finish")}
        self.granted_extents = 0
        self.moved_blocks = 0
        self._inner = inner

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        """See `Allocator.admit`."""
        with self.costs["admit"]:
            grant = self._inner.admit(
                seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens
            )
        return self._counted(grant)

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        """See `Allocator.extend`."""
        with self.costs["extend"]:
            grant = self._inner.extend(seq, num_tokens)
        return self._counted(grant)

    def free(self, blocks: Iterable[BlockId]) -> None:
        """See `Allocator.free`."""
        with self.costs["free"]:
            self._inner.free(blocks)

    def finish(self, seq: SequenceId) -> None:
        """See `Allocator.finish`."""
        with self.costs["finish"]:
            self._inner.finish(seq)

    def statistics(self) -> AllocatorStatistics:
        """See `Allocator.statistics`."""
        return self._inner.statistics()

    def _counted(self, grant: Grant) -> Grant:
        self.granted_extents += len(grant.extents)
        self.moved_blocks += len(grant.moves)
        return grant


class MeteredTrimmable(MeteredAllocator):
    """The same around a strategy that can trim, so that the block manager finds the method."""

    def __init__(
        self, inner: Allocator, trim: Callable[[SequenceId, int], Sequence[BlockId]]
    ) -> None:
        super().__init__(inner)
        self.costs["trim"] = OperationCost()
        self._trim = trim

    def trim(self, seq: SequenceId, num_tokens: int) -> Sequence[BlockId]:
        """See `Trimmable.trim`."""
        with self.costs["trim"]:
            return self._trim(seq, num_tokens)


def metered(allocator: Allocator) -> MeteredAllocator:
    """`allocator` inside a meter that can do what it can do."""
    if isinstance(allocator, Trimmable):
        return MeteredTrimmable(allocator, allocator.trim)
    return MeteredAllocator(allocator)


class Sample(NamedTuple):
    """The pool at one step, or its mean over several. A row of numbers, so a tuple.

    Attributes:
        live_slots: slots that hold a token of a running sequence. A step writes its tokens while it
            runs, layer by layer, so over its time half of them count.
        allocated_slots: slots of blocks that running sequences hold.
        unused_slots: how many of these hold no token when the step has run.
        blocked_slots: free slots while the head of the queue finds no room; 0 while it does.
        running: sequences in the batch.
        waiting: sequences in the queue.
        output_tokens: tokens that the step generates.
    """

    live_slots: float
    allocated_slots: float
    unused_slots: float
    blocked_slots: float
    running: float
    waiting: float
    output_tokens: float


class Series:
    """Weighted means of samples over time, in a bounded number of points.

    Every point covers as many samples as the others (the last one fewer). When all points are in
    use, neighbours merge and each covers twice as many.

    Args:
        capacity: points at most; even.
    """

    def __init__(self, capacity: int = 1024) -> None:
        # A row sums up weight, weight * time, weight * sample.
        self._sums = np.zeros((capacity, 2 + len(Sample._fields)))
        self._used = 0
        self._in_last = 0
        self._per_point = 1

    def add(self, weight: float, time: float, sample: Sample) -> None:
        """Enter a sample that counts `weight`, taken at `time`."""
        if self._used == 0 or self._in_last == self._per_point:
            self._next_point()
        self._sums[self._used - 1] += weight * np.array((1.0, time, *sample))
        self._in_last += 1

    def points(self) -> list[tuple[float, Sample]]:
        """Mean time and mean sample of each point, in order of time."""
        return [(time, Sample(*values)) for time, *values in self._means(self._sums[: self._used])]

    def mean(self) -> Sample | None:
        """The weighted mean of everything; None of nothing."""
        means = self._means(self._sums[: self._used].sum(axis=0, keepdims=True))
        return Sample(*means[0][1:]) if means else None

    @staticmethod
    def _means(sums: npt.NDArray[np.float64]) -> list[list[float]]:
        weighed = sums[sums[:, 0] > 0]
        means: list[list[float]] = (weighed[:, 1:] / weighed[:, :1]).tolist()
        return means

    def _next_point(self) -> None:
        if self._used == len(self._sums):
            merged = self._sums[0::2] + self._sums[1::2]
            self._used = len(merged)
            self._sums[: self._used] = merged
            self._sums[self._used :] = 0.0
            self._per_point *= 2
        self._used += 1
        self._in_last = 0


class Waits:
    """Waiting times, kept as a histogram of logarithmic bins: quantiles are 4 % coarse."""

    _PER_DECADE = 64
    _SHORTEST_S = 1e-3

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        """Enter one waiting time."""
        self._total_s += seconds
        self._bins[ceil(log10(max(seconds, self._SHORTEST_S)) * self._PER_DECADE)] += 1

    def mean(self) -> float | None:
        """The mean in seconds; None of nothing."""
        count = self._bins.total()
        return self._total_s / count if count else None

    def quantile(self, share: float) -> float | None:
        """The time that `share` of the waits do not exceed, in seconds; None of nothing."""
        missing = share * self._bins.total()
        for index in sorted(self._bins):
            missing -= self._bins[index]
            if missing <= 0:
                return float(10.0 ** (index / self._PER_DECADE))
        return None
