"""The operators between matrix products, against torch in float64."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from kvpage.kernels import cpu_rows
from kvpage.kernels.simd import LANES

# Below, at and above the width of a vector, and more than a thread takes at once.
WIDTHS = (1, 15, 16, 17, 576)
ROWS = (0, 1, 9, 300)


pytestmark = pytest.mark.usefixtures("one_and_two_threads")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_is_that_of_float64(rows: int, width: int) -> None:
    """Any width, any number of rows."""
    x, weight = random(rows, width), random(width)
    expected = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    actual = cpu_rows.rms_norm(x[None], weight, 1e-5)
    torch.testing.assert_close(actual, expected.float()[None], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 20), (80, 80), (8, 4)])
def test_a_rotation_turns_the_first_numbers_of_each_head(
    rows: int, head_dim: int, rotary_dim: int
) -> None:
    """In place, among neighbours that stay as they are."""
    both = random(rows, 5 * head_dim)
    before = both.double().view(rows, 5, head_dim)
    cos, sin = random(rows, rotary_dim), random(rows, 2 * rotary_dim)[:, rotary_dim:]
    expected = before.clone()
    turned = before[:, 1:4, :rotary_dim]
    first, second = turned.chunk(2, dim=-1)
    expected[:, 1:4, :rotary_dim] = (
        turned * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    )
    cpu_rows.rotate(both[:, head_dim : 4 * head_dim].view(rows, 3, head_dim), cos, sin)
    torch.testing.assert_close(both.view_as(expected), expected.float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [LANES, 3 * LANES, 36 * LANES])
def test_a_gate_is_that_of_float64(rows: int, width: int) -> None:
    """From gates so low that their exponential overflows to ones so high that they pass all."""
    gate, up = random(rows, width) * 60, random(rows, width)
    parts = [x.view(rows, width // LANES, LANES) for x in (gate, up)]
    gate_up = torch.stack(parts, dim=2).view(rows, 2 * width)
    expected = F.silu(gate.double()) * up.double()
    torch.testing.assert_close(cpu_rows.silu_gate(gate_up), expected.float(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_bytes_are_within_half_a_step(width: int) -> None:
    """Each row has the scale that its largest magnitude needs; a row of zeros stays zero."""
    x = random(9, width) * torch.logspace(-6, 6, 9)[:, None]
    x[3] = 0
    rows, scales = cpu_rows.quantise(x)
    torch.testing.assert_close(scales, x.abs().amax(dim=1) / 127)
    restored = (rows.double() - cpu_rows.ZERO_POINT) * scales[:, None]
    assert bool(((restored - x).abs() <= 0.5001 * scales[:, None]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_to_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    """Rounded as torch rounds; NaN and infinity stay; slot -1 is skipped."""
    rows, others = random(40, 5, 17)[:, 1:4], random(40, 2, 9)
    rows[5, 0, 0], rows[6, 1, 1], rows[7, 2, 2] = float("nan"), float("inf"), -float("inf")
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:40]
    slots[3] = -1
    pool, other_pool = random(64, 3, 17).to(dtype), random(64, 2, 9)
    expected, other_expected = pool.clone(), other_pool.clone()
    expected[slots[slots >= 0]] = rows[slots >= 0].to(dtype)
    other_expected[slots[slots >= 0]] = others[slots >= 0]
    cpu_rows.write(((rows, pool), (others, other_pool)), slots)
    assert torch.equal(other_pool, other_expected)
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused() -> None:
    """Memory is addressed by hand, so shapes and types are checked first."""
    with pytest.raises(ValueError, match="do not belong together"):
        cpu_rows.rms_norm(random(2, 8), random(7), 1e-5)
    with pytest.raises(ValueError, match="do not belong together"):
        cpu_rows.rotate(random(2, 3, 8), random(2, 10), random(2, 10))
    k, pool = random(2, 3, 8), random(9, 3, 7)
    with pytest.raises(ValueError, match="do not belong together"):
        cpu_rows.write(((k, pool), (k, pool)), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="do not belong together"):
        cpu_rows.silu_gate(random(2, 3 * LANES))
    with pytest.raises(ValueError, match="float32 on a CPU is wanted"):
        cpu_rows.silu_gate(random(2, 8).double())
