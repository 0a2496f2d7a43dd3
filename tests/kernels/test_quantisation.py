"""K and V in one byte."""

import pytest
import torch

from kvpage.kernels.quantisation import fp8_dtype, quantised, scales_for
from kvpage.testing.attention import AttentionShape, attention_problem

RELATIVE_ERRORS = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}


def numbers() -> torch.Tensor:
    """`[200, 2, 16]`, the second head a hundred times the first."""
    x = torch.randn(200, 2, 16, generator=torch.Generator().manual_seed(0))
    return x * torch.tensor([1.0, 100.0])[:, None]


def test_int8_is_off_by_half_a_scale_at_most() -> None:
    """127 equal steps a side, each head its own."""
    x = numbers()
    scales = scales_for(x, torch.int8)
    back = quantised(x, torch.int8, scales).float() * scales[:, None]
    assert ((back - x).abs() <= 0.5001 * scales[:, None]).all()


@pytest.mark.parametrize(("dtype", "bound"), RELATIVE_ERRORS.items())
def test_fp8_rounds_relatively(dtype: torch.dtype, bound: float) -> None:
    """3 bits of mantissa err by 1/16 of a value at most, 2 bits by 1/8."""
    x = numbers()
    scales = scales_for(x, dtype)
    back = quantised(x, dtype, scales).float() * scales[:, None]
    normal = x.abs() > 1e-3 * x.abs().amax((0, 2))[:, None]
    assert ((back - x).abs() <= bound * x.abs())[normal].all()


@pytest.mark.parametrize("dtype", [torch.int8, *RELATIVE_ERRORS])
def test_what_is_too_large_is_clamped(dtype: torch.dtype) -> None:
    """Neither wrapped around nor infinite nor NaN."""
    x = torch.tensor([1e9, -1e9]).view(2, 1, 1)
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    assert quantised(x, dtype, None).float().flatten().tolist() == [largest, -largest]


def test_a_head_of_zeros_has_a_scale() -> None:
    """Zero divided by it is zero, not NaN."""
    zeros = torch.zeros(3, 1, 4)
    stored = quantised(zeros, torch.int8, scales_for(zeros, torch.int8))
    assert (stored == 0).all()


def test_the_fp8_type_of_a_cpu() -> None:
    """The interpreter has the more precise one."""
    assert fp8_dtype(torch.device("cpu")) == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.int8, 0.02), (torch.float8_e4m3fn, 0.06), (torch.float8_e5m2, 0.12)]
)
def test_attention_error_of_quantised_pools(dtype: torch.dtype, bound: float) -> None:
    """The documented error of outputs of size one, for normal K and V and scales that fit."""
    lengths = [1, 8], [300, 200]
    exact = attention_problem(AttentionShape(head_dim=64), *lengths)
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = (torch.full((2,), 5.0 / largest),) * 2
    stored = attention_problem(
        AttentionShape(head_dim=64, kv_dtype=dtype), *lengths, kv_scales=scales
    )
    error = (stored.answer() - exact.answer()).abs().max()
    assert bound / 10 < error < bound
