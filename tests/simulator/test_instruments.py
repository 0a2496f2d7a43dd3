"""What a replay measures with."""

import numpy as np
import pytest

from kvpage.allocators.base import Trimmable
from kvpage.allocators.dynamic import DynamicAllocator
from kvpage.allocators.fixed import FixedAllocator
from kvpage.blocks import PoolGeometry, SequenceId
from kvpage.errors import OutOfBlocks
from kvpage.simulator.instruments import Sample, Series, Waits, metered

GEOMETRY = PoolGeometry(num_blocks=8, block_size=4, max_model_len=32)


def sample(live: float) -> Sample:
    return Sample(live, 0, 0, 0, 0, 0, 0)


def test_series_weighs_by_time() -> None:
    """A sample that lasts three times as long counts three times."""
    series = Series()
    series.add(1.0, 0.0, sample(10.0))
    series.add(3.0, 1.0, sample(20.0))
    mean = series.mean()
    assert mean is not None
    assert mean.live_slots == pytest.approx(17.5)


def test_series_is_bounded_and_keeps_the_mean() -> None:
    """Thousands of samples end in at most `capacity` points, in order, with nothing lost."""
    series = Series(capacity=8)
    for step in range(5000):
        series.add(1.0, step, sample(step))
    points = series.points()
    times = [time for time, _ in points]
    assert 4 <= len(points) <= 8
    gaps = np.diff(times)[:-1]
    assert gaps[0] > 0
    assert gaps == pytest.approx(gaps[0])  # all but the last cover equally many samples
    assert [point.live_slots for _, point in points] == pytest.approx(times)
    mean = series.mean()
    assert mean is not None
    assert mean.live_slots == pytest.approx(2499.5)


def test_series_of_nothing_has_no_mean() -> None:
    """No samples, no points, and None instead of a division by zero."""
    assert Series().points() == []
    assert Series().mean() is None


def test_waits_know_mean_and_quantiles() -> None:
    """The mean is exact, a quantile is within the width of a bin."""
    waits = Waits()
    for seconds in np.linspace(0.01, 10.0, 1000):
        waits.add(float(seconds))
    assert waits.mean() == pytest.approx(5.005)
    assert waits.quantile(0.99) == pytest.approx(9.9, rel=0.04)
    assert waits.quantile(0.5) == pytest.approx(5.0, rel=0.04)


def test_waits_of_nothing_are_none() -> None:
    """Nobody waited: no mean, no quantile."""
    assert Waits().mean() is None
    assert Waits().quantile(0.99) is None


def test_a_meter_answers_as_the_allocator_does() -> None:
    """Grants, statistics and `sharing` come through unchanged, and calls are counted."""
    meter, plain = metered(FixedAllocator(GEOMETRY)), FixedAllocator(GEOMETRY)
    seq = SequenceId(1)
    assert meter.sharing == plain.sharing
    assert meter.admit(seq, 9, max_tokens=32) == plain.admit(seq, 9, max_tokens=32)
    assert meter.extend(seq, 13) == plain.extend(seq, 13)
    assert meter.statistics() == plain.statistics()
    assert meter.granted_extents == 4
    assert {name: cost.calls for name, cost in meter.costs.items()} == {
        "admit": 1,
        "extend": 1,
        "free": 0,
        "finish": 0,
    }


def test_a_refusal_is_counted_and_passed_on() -> None:
    """`OutOfBlocks` reaches the block manager; the call is timed like any other."""
    meter = metered(FixedAllocator(GEOMETRY))
    with pytest.raises(OutOfBlocks):
        meter.admit(SequenceId(1), 100, max_tokens=100)
    assert meter.costs["admit"].calls == 1
    assert meter.costs["admit"].total_ns > 0
    assert meter.granted_extents == 0


def test_a_meter_can_trim_exactly_if_the_allocator_can() -> None:
    """The block manager looks for `Trimmable`; it must find the truth."""
    assert not isinstance(metered(FixedAllocator(GEOMETRY)), Trimmable)
    assert isinstance(metered(DynamicAllocator(GEOMETRY)), Trimmable)
