"""Choosing an implementation."""

import subprocess
import sys

import pytest
import torch

from kvpage.kernels import attention_backend, default_backend
from kvpage.testing.attention import AttentionShape, attention_problem


def test_importing_the_package_imports_no_library_behind_it() -> None:
    """A program that only plans needs neither torch nor triton nor numba."""
    code = "import sys, kvpage.kernels; print({'torch', 'triton', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", ["triton", "numba", "reference"])
def test_a_backend_has_the_name_that_was_asked_for(name: str) -> None:
    """All of them are importable here, and complete."""
    backend = attention_backend(name)  # type: ignore[arg-type]
    assert backend.name == name
    assert callable(backend.paged_attention)


def test_an_unknown_backend_is_refused() -> None:
    """The message names those that exist."""
    with pytest.raises(ValueError, match="'cuda'; there are triton, numba, reference"):
        attention_backend("cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device_type", "name"), [("cuda", "triton"), ("cpu", "numba"), ("mps", "reference")]
)
def test_the_default_of_a_device(device_type: str, name: str) -> None:
    """The fastest that runs there."""
    assert default_backend(device_type) == name


def test_backends_agree() -> None:
    """What numba answers is what the reference answers, through the same record."""
    problem = attention_problem(AttentionShape(head_dim=64), [1, 9], [100, 20])
    outs = [
        problem.solve(attention_backend(name).paged_attention) for name in ("numba", "reference")
    ]
    torch.testing.assert_close(*outs, rtol=0, atol=5e-6)
