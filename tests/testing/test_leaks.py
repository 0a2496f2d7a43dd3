"""`assert_no_leaks` tells a quiet engine from one that holds something."""

import attrs
import pytest

from kvpage.blocks import PoolStatistics
from kvpage.testing import assert_no_leaks

QUIET = PoolStatistics(num_blocks=8, block_size=16, free_blocks=5, used_blocks=0, cached_blocks=3)


@attrs.frozen
class Snapshot:
    pool: PoolStatistics = QUIET
    num_running: int = 0
    num_waiting: int = 0


@attrs.frozen
class Engine:
    snapshot: Snapshot

    def stats(self) -> Snapshot:
        return self.snapshot


def test_a_quiet_engine_passes_with_blocks_in_the_prefix_cache() -> None:
    """Cached blocks are no leak."""
    assert_no_leaks(Engine(Snapshot()))


@pytest.mark.parametrize(
    "snapshot",
    [
        Snapshot(num_running=1),
        Snapshot(num_waiting=1),
        Snapshot(pool=attrs.evolve(QUIET, free_blocks=4, used_blocks=1)),
    ],
    ids=["running", "waiting", "used"],
)
def test_whatever_is_held_is_a_leak(snapshot: Snapshot) -> None:
    """A request in the batch, one in the queue, one block: each alone is enough."""
    with pytest.raises(AssertionError, match=r"requests still run, . wait, and . of 8 blocks"):
        assert_no_leaks(Engine(snapshot))
