"""What a step costs, by hand."""

import pytest

from kvpage.tuning.calibration import Shape
from kvpage.tuning.cost import Curve, MachineCost, StepCost

COST = StepCost(
    decode=Curve(((1, 0.10), (11, 0.20))),
    chunk=Curve(((10, 0.30), (110, 1.30))),
    per_kv_token_s=1e-3,
    per_pair_s=1e-4,
    per_copied_token_s=1e-2,
    block_size=4,
)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0, 0.0), (0.5, 0.1), (1, 0.1), (6, 0.15), (11, 0.2), (21, 0.3)]
)
def test_a_curve_is_straight_between_its_points_and_beyond(tokens: float, seconds: float) -> None:
    """Below the first it is level: a step of no tokens is no step."""
    assert COST.decode.at(tokens) == pytest.approx(seconds)


def test_points_may_come_in_any_order() -> None:
    """As they were measured."""
    assert Curve(((8, 2.0), (2, 1.0))).at(5) == pytest.approx(1.5)


def test_decoding_rows_cost_their_curve_and_their_context() -> None:
    """Eleven rows that attend to 20 tokens each."""
    assert COST.of(Shape(11, 1, 20).plan(4)) == pytest.approx(0.2 + 11 * 20 * 1e-3)


def test_a_chunk_costs_its_curve_and_its_pairs() -> None:
    """The query at position i sees i + 1 keys: ten of them behind ten others, 155 pairs."""
    shape = Shape(1, 10, 20)
    assert shape.pairs == sum(range(11, 21))
    assert COST.of(shape.plan(4)) == pytest.approx(0.3 + 155 * 1e-4)


def test_a_mixed_step_reads_the_weights_once() -> None:
    """Ten rows and a chunk of ten: the chunk adds what twenty tokens cost more than ten."""
    seconds = COST.seconds(rows=10, chunk_tokens=10, kv_tokens=0, pairs=0)
    assert seconds == pytest.approx(0.19 + (0.40 - 0.30))


def test_copies_cost_by_the_token() -> None:
    """Two blocks of four."""
    plan = Shape(1, 1, 1).plan(4, copied_tokens=8)
    assert plan.copies.shape == (2, 2)
    assert COST.of(plan) == pytest.approx(0.1 + 1e-3 + 8e-2)


def test_a_size_that_was_not_measured_costs_like_the_next_one() -> None:
    """On a logarithmic scale."""
    machine = MachineCost(COST.decode, COST.chunk, {8: 1.0, 64: 2.0}, 0.0, 0.0, 1)
    assert [machine.at(size).per_kv_token_s for size in (4, 16, 32, 128)] == [1.0, 1.0, 2.0, 2.0]
