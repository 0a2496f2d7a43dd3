"""Calibration against a machine whose costs are known."""

import numpy as np
import pytest

from kvpage.blocks import PoolGeometry
from kvpage.plan import StepPlan, StepResult
from kvpage.testing import FakeRunner
from kvpage.tuning.calibration import CHUNKS, DECODE_ROWS, Shape, calibrate
from kvpage.tuning.cost import Curve, MachineCost

TRUTH = MachineCost(
    decode=Curve((rows, 0.02 + 0.001 * rows) for rows in DECODE_ROWS),
    chunk=Curve((tokens, 0.03 + 0.0005 * tokens) for tokens in CHUNKS),
    per_kv_token_s={8: 3e-6, 16: 2e-6},
    per_pair_s=1e-7,
    per_copied_token_s=5e-6,
    bytes_per_token=100,
)


class Machine:
    """Makes runners that check every step and take as long as `TRUTH` says, on its own clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.open = 0

    def make(self, geometry: PoolGeometry) -> "_TimedRunner":
        self.open += 1
        return _TimedRunner(self, geometry)


class _TimedRunner:
    def __init__(self, machine: Machine, geometry: PoolGeometry) -> None:
        self._machine = machine
        self._cost = TRUTH.at(geometry.block_size)
        self._num_slots = geometry.num_slots

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.slots.max() < self._num_slots
        self._machine.now_s += self._cost.of(plan)
        return StepResult(np.zeros(len(plan.sample_rows), np.int64))

    def close(self) -> None:
        self._machine.open -= 1


def calibrated(machine: Machine, *, num_tokens: int = 8192) -> MachineCost:
    return calibrate(
        machine.make,
        block_sizes=(16, 8),
        bytes_per_token=100,
        max_model_len=2048,
        num_tokens=num_tokens,
        clock=lambda: machine.now_s,
    )


def test_finds_what_steps_cost() -> None:
    """Every number of the model comes out as it was put in."""
    found = calibrated(Machine())
    assert found.per_kv_token_s == pytest.approx(TRUTH.per_kv_token_s)
    assert found.per_pair_s == pytest.approx(TRUTH.per_pair_s)
    assert found.per_copied_token_s == pytest.approx(TRUTH.per_copied_token_s)
    for count in (*DECODE_ROWS, 100):
        assert found.decode.at(count) == pytest.approx(TRUTH.decode.at(count))
    for count in (*CHUNKS, 100):
        assert found.chunk.at(count) == pytest.approx(TRUTH.chunk.at(count))


def test_closes_its_runners() -> None:
    """Their pools may be large."""
    machine = Machine()
    calibrated(machine)
    assert machine.open == 0


def test_a_small_pool_is_measured_as_far_as_it_goes() -> None:
    """Lines go on beyond what fits."""
    found = calibrated(Machine(), num_tokens=512)
    assert found.decode.at(256) == pytest.approx(TRUTH.decode.at(256))


@pytest.mark.parametrize("shape", [Shape(3, 1, 17), Shape(1, 9, 30), Shape(2, 5, 5)])
def test_its_steps_are_real_ones(shape: Shape) -> None:
    """Each sequence has blocks of its own and writes where it reads."""
    plan = shape.plan(4)
    assert len(set(plan.block_tables.ravel().tolist())) == shape.blocks(4)
    blocks, places = plan.slots // 4, plan.slots % 4
    of_token = np.repeat(np.arange(shape.sequences), shape.queries)
    assert (plan.block_tables[of_token, plan.positions // 4] == blocks).all()
    assert (places == plan.positions % 4).all()
    if shape.queries == shape.keys:  # nothing is read that was not written
        FakeRunner(PoolGeometry(shape.blocks(4), 4, 64)).execute(plan)
