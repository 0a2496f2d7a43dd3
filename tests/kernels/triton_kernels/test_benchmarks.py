"""The benchmark scripts work, whatever the figures are."""

import runpy
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def kernel() -> dict[str, Any]:
    """The names of `benchmarks/kernel.py`."""
    return runpy.run_path(str(BENCHMARKS / "kernel.py"))


def one_millisecond(run: Any) -> float:
    """A timer that does not measure."""
    run()
    return 1.0


def test_a_decode_case_is_measured(kernel: dict[str, Any], device: str) -> None:
    """Bytes of K and V, and at least one peer beside the kernel."""
    case = kernel["Case"](batch=2, queries=1, context=40)
    row = kernel["measure"](case, kernel["kv_bytes"], one_millisecond, device)
    assert row.rate == 2 * 40 * 8 * 128 * 2 * 2
    assert row.beside["SDPA"] == 1.0


def test_an_extend_case_is_measured(kernel: dict[str, Any], device: str) -> None:
    """Operations of visible keys: 3 queries see 4, 5 and 6 keys."""
    case = kernel["Case"](batch=1, queries=3, context=6)
    row = kernel["measure"](case, kernel["operations"], one_millisecond, device)
    assert row.rate == 4 * 15 * 32 * 128


def test_tilings_are_varied(kernel: dict[str, Any], device: str) -> None:
    """The first of the tilings runs."""
    case = kernel["Case"](batch=1, queries=1, context=20)
    row = next(kernel["tuned"](case, "decode", one_millisecond, device))
    assert row.name == "decode, tile 32, 3 stages, 2 warps"
