"""`assert_no_leaks`: did every request give back what it held?"""

from typing import Protocol

from kvpage.blocks import PoolStatistics


class PoolUse(Protocol):
    """The part of an engine's statistics that a leak shows in."""

    @property
    def pool(self) -> PoolStatistics:
        """Blocks by state."""
        ...

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        ...


class HasStatistics(Protocol):
    """What `assert_no_leaks` needs of an engine."""

    def stats(self) -> PoolUse:
        """A snapshot of the engine."""
        ...


def assert_no_leaks(engine: HasStatistics) -> None:
    """Check that an engine whose streams have all ended holds nothing for them.

    Blocks that are cached for prefix reuse are no leak: they are given up on demand.

    Args:
        engine: an `AsyncEngine`, or anything with such a `stats()`.

    Raises:
        AssertionError: requests are still open, or blocks are held; the sentence says how many.
    """
    stats = engine.stats()
    if stats.num_running or stats.num_waiting or stats.pool.used_blocks:
        raise AssertionError(
            f"{stats.num_running} requests still run, {stats.num_waiting} wait, and "
            f"{stats.pool.used_blocks} of {stats.pool.num_blocks} blocks are held"
        )
