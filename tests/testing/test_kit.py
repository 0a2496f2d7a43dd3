"""`check_allocator` judges modules, imports and histories as it says."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvpage.testing import ContractViolation, check_allocator

BUILT_ON_TENSORS = """
import torch
from kvpage.allocators.fixed import FixedAllocator

class TensorAllocator(FixedAllocator):
    pass
"""


def test_a_module_that_imports_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an allocator's module imports counts, even where torch is loaded already."""
    (tmp_path / "tensor_allocator.py").write_text(BUILT_ON_TENSORS)
    (tmp_path / "torch.py").touch()  # the real one takes seconds to import
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    from tensor_allocator import TensorAllocator  # type: ignore[import-not-found]

    with pytest.raises(ContractViolation, match="importing tensor_allocator imports torch"):
        check_allocator(TensorAllocator, max_examples=1)


@pytest.mark.parametrize("absent", ["torch", "pytest", "hypothesis"])
def test_the_kit_comes_without(absent: str) -> None:
    """Importing the kit loads neither torch nor pytest, and hypothesis only for the check."""
    script = f"import sys, kvpage.testing; sys.exit({absent!r} in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_an_unknown_name_is_no_part_of_the_kit() -> None:
    """The lazy import of the check hides no misspelling."""
    import kvpage.testing

    with pytest.raises(AttributeError, match="has no attribute 'check_alocator'"):
        kvpage.testing.check_alocator  # noqa: B018
