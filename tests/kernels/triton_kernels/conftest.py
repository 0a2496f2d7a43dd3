"""One suite for the Triton kernels, run twice.

With `TRITON_INTERPRET=1` it runs in Triton's interpreter, on any machine; `test_interpreter.py`
starts such a process. Without it, it runs compiled: `pytest -m cuda` on a machine with a GPU.
"""

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the compiled tests, and skip them where there is nothing to compile for.

    Interpreted, numpy computes what a GPU would, and warns where a GPU gives infinity or NaN.
    The interpreter of Triton 3.6 also makes numbers of arrays in a way that numpy is giving up
    (and from 2.4 on refuses: that Triton wants an older numpy).
    """
    quiet = pytest.mark.filterwarnings(
        "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
    )
    without_gpu = pytest.mark.skip(reason="needs a GPU (or TRITON_INTERPRET=1, then no GPU)")
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(quiet if INTERPRETED else pytest.mark.cuda)
        if not INTERPRETED and not torch.cuda.is_available():
            item.add_marker(without_gpu)


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return "cpu" if INTERPRETED else "cuda"
