"""Pools of every type, written and read by the Triton kernels."""

import pytest
import torch

from kvpage.kernels import cache_write, reference
from kvpage.kernels.paged_attention import paged_attention
from kvpage.kernels.quantisation import fp8_dtype, scales_for
from kvpage.testing.attention import AttentionShape, attention_problem

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ONE_BYTE = (torch.int8, torch.float8_e5m2, torch.float8_e4m3fn)


def compiles_for(dtype: torch.dtype, device: str) -> bool:
    """Whether the kernels can be compiled for pools of this type here."""
    return dtype != torch.float8_e4m3fn or fp8_dtype(torch.device(device)) == dtype


def pools(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """64 slots of 3 heads, `D = 24` and `Dv = 16`, full of threes."""
    k_pool, v_pool = (torch.full((64, 3, dim), 3.0).to(device, dtype) for dim in (24, 16))
    return k_pool, v_pool


def new_tokens(
    num_tokens: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K in the layout of a transposed projection, V as a slice of a fused one, and slots."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(3, num_tokens, 24, generator=generator).transpose(0, 1)
    v = torch.randn(num_tokens, 6, 16, generator=generator)[:, 3:]
    slots = torch.randperm(64, generator=generator)[:num_tokens]
    return k.to(device, dtype), v.to(device, dtype), slots.to(device)


@pytest.mark.parametrize("dtype", FLOATS)
def test_written_as_it_is(dtype: torch.dtype, device: str) -> None:
    """Each row lands in its slot unchanged, and all other slots keep what they have."""
    k, v, slots = new_tokens(37, dtype, device)
    k_pool, v_pool = pools(dtype, device)
    cache_write.write_kv(k, v, k_pool, v_pool, slots)
    for new, pool in ((k, k_pool), (v, v_pool)):
        assert torch.equal(new, pool[slots])
        others = torch.ones(64, dtype=torch.bool, device=device)
        others[slots] = False
        assert (pool[others] == 3.0).all()


def test_slot_minus_one_is_skipped(device: str) -> None:
    """Tokens that pad a step write nowhere, not even to the last slot."""
    k, v, slots = new_tokens(20, torch.float32, device)
    slots[::3] = -1
    written, expected = pools(torch.float32, device), pools(torch.float32, device)
    cache_write.write_kv(k, v, *written, slots)
    reference.write_kv(k, v, *expected, slots)
    assert all(torch.equal(a, b) for a, b in zip(written, expected, strict=True))


def test_no_tokens(device: str) -> None:
    """Nothing to write is not an error."""
    k, v, slots = new_tokens(0, torch.float32, device)
    k_pool, v_pool = pools(torch.float32, device)
    cache_write.write_kv(k, v, k_pool, v_pool, slots)
    assert (k_pool == 3.0).all()


@pytest.mark.parametrize("dtype", ONE_BYTE)
def test_written_quantised(dtype: torch.dtype, device: str) -> None:
    """Values are divided by their head's scale, rounded and clamped, as in the reference.

    In fp8, with values that need no rounding: the interpreter's cast does not round to nearest.
    """
    if not compiles_for(dtype, device):
        pytest.skip("Triton does not compile float8_e4m3fn for this GPU")
    k, v, slots = new_tokens(37, torch.float32, device)
    if dtype != torch.int8:
        k, v = k.sign() * 2.0 ** (4 * k).round(), v.sign() * 2.0 ** (40 * v).round().clamp(-4, 30)
    scales = (torch.tensor([0.25, 0.5, 1.0], device=device),) * 2
    if dtype == torch.int8:
        scales = (torch.tensor([0.01, 0.017, 1.0], device=device),) * 2
    written, expected = pools(dtype, device), pools(dtype, device)
    cache_write.write_kv(k, v, *written, slots, kv_scales=scales)
    reference.write_kv(k, v, *expected, slots, kv_scales=scales)
    assert expected[1].float().max() == (127 if dtype == torch.int8 else torch.finfo(dtype).max)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(written, expected, strict=True))


@pytest.mark.parametrize("dtype", ONE_BYTE)
def test_attention_over_one_byte_pools(dtype: torch.dtype, device: str) -> None:
    """Reading what was stored adds no error of its own: the oracle reads the same bytes."""
    if not compiles_for(dtype, device):
        pytest.skip("Triton does not compile float8_e4m3fn for this GPU")
    shape = AttentionShape(kv_dtype=dtype, num_heads=4, num_kv_heads=2)
    # The largest of some hundred normal numbers is below 5.
    k_scales = torch.tensor([5.0, 6.0], device=device) / (127 if dtype == torch.int8 else 448)
    problem = attention_problem(
        shape, [1, 1, 9], [30, 300, 40], device=device, kv_scales=(k_scales, 2 * k_scales)
    )
    out = problem.solve(paged_attention)
    assert (out.double() - problem.answer()).abs().max() < 5e-6


@pytest.mark.parametrize("dtype", [*FLOATS, *ONE_BYTE])
def test_block_copies(dtype: torch.dtype, device: str) -> None:
    """A chain and a swap: every source is read as it was before the first copy."""
    k_pool, v_pool = pools(dtype, device)
    for pool in (k_pool, v_pool):
        pool.copy_(torch.arange(pool.numel(), device=device).view(pool.shape) % 50)
    expected = k_pool.clone(), v_pool.clone()
    copies = torch.tensor([[0, 1], [1, 2], [5, 6], [6, 5]], device=device)
    cache_write.copy_blocks(k_pool, v_pool, copies, block_size=8)
    reference.copy_blocks(*expected, copies, block_size=8)
    assert torch.equal(k_pool.float(), expected[0].float())
    assert torch.equal(v_pool.float(), expected[1].float())


def test_scales_from_the_data_clamp_nothing(device: str) -> None:
    """With the scales of `scales_for`, each int8 error is at most half a scale."""
    k, v, slots = new_tokens(37, torch.float32, device)
    scales = scales_for(k, torch.int8), scales_for(v, torch.int8)
    k_pool, v_pool = pools(torch.int8, device)
    cache_write.write_kv(k, v, k_pool, v_pool, slots, kv_scales=scales)
    error = (k_pool[slots].float() * scales[0][:, None] - k).abs()
    assert (error <= scales[0][:, None] * 0.5001).all()
