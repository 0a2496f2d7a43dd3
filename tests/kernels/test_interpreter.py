"""Runs the Triton suite in Triton's interpreter.

It has to be chosen before Triton is imported, hence the process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "triton_kernels"


def run_suite(markers: str) -> int:
    """Run the suite in a process of its own; the number of tests that passed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(SUITE), "-q", "-m", markers, "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert "skipped" not in done.stdout, done.stdout
    return int(passed[1])


def test_the_suite_passes_interpreted() -> None:
    """All tests of the Triton kernels pass in the interpreter, and none is skipped."""
    assert run_suite("not slow") > 80


@pytest.mark.slow
def test_the_large_grid_passes_interpreted() -> None:
    """So do all combinations of shapes and options."""
    assert run_suite("slow") > 90
