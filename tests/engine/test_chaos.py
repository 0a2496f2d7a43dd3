"""Everything at once, for long: see `tests.engine.chaos`."""

import gc
import threading
import time
from collections import Counter

import psutil
import pytest

from tests.engine.chaos import play
from tests.engine.scenes import engine_threads

LONG_S = 600.0
MOST_GROWTH_BYTES = 64 << 20


def number_of_our_objects() -> int:
    """Live objects of kvpage's classes."""
    gc.collect()
    return sum(str(type(thing).__module__).startswith("kvpage.") for thing in gc.get_objects())


def number_of_threads() -> int:
    """But for the workers of event loops, which these keep for a while."""
    workers = ("Trio thread", "AnyIO worker thread")
    return sum(not thread.name.startswith(workers) for thread in threading.enumerate())


@pytest.mark.parametrize("seed", range(5))
def test_a_round_of_chaos(seed: int) -> None:
    """Every request is accounted for, and nothing is left behind."""
    play(seed)
    assert engine_threads() == []


@pytest.mark.slow
def test_ten_minutes_of_chaos() -> None:
    """Round after round; objects, threads and memory stay what they were after the first few."""
    outcomes: Counter[str] = Counter()
    for seed in range(1000, 1010):
        outcomes += play(seed)
    objects, threads = number_of_our_objects(), number_of_threads()
    resident_bytes = psutil.Process().memory_info().rss
    end, seed = time.monotonic() + LONG_S, 1010
    while time.monotonic() < end:
        outcomes += play(seed)
        seed += 1
    print(f"{seed - 1000} rounds: {dict(outcomes)}")
    assert number_of_our_objects() <= objects
    assert number_of_threads() <= threads
    assert psutil.Process().memory_info().rss <= resident_bytes + MOST_GROWTH_BYTES
