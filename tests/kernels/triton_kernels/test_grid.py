"""Combinations of shapes and options, too many for every run."""

import itertools
import random
from typing import Any

import pytest
import torch

from kvpage.kernels.paged_attention import Tiling, Tilings, paged_attention
from kvpage.testing.attention import PLACEMENTS, AttentionShape, attention_problem

pytestmark = pytest.mark.slow

HEADS = ((4, 4), (9, 3), (28, 4), (14, 2), (5, 1), (24, 1))
DIMS = ((16, 16), (64, 64), (80, 80), (112, 112), (192, 128))
BLOCK_SIZES = (1, 3, 8, 16, 24, 64, 128)
CASES = list(itertools.product(HEADS, DIMS, BLOCK_SIZES))[::2]


def drawn_options(draw: random.Random, num_heads: int, device: str) -> dict[str, Any]:
    """Each option in about half of the cases."""
    heads = torch.arange(num_heads, device=device) / num_heads
    options = {
        "window": draw.choice([1, 7, 30, 128]),
        "softcap": draw.choice([0.5, 20.0]),
        "sinks": 3 * heads - 1,
        "alibi_slopes": heads / 4,
    }
    return {name: value for name, value in options.items() if draw.random() < 0.5}


@pytest.mark.parametrize(("heads", "dims", "block_size"), CASES)
def test_any_combination(
    heads: tuple[int, int], dims: tuple[int, int], block_size: int, device: str
) -> None:
    """Lengths around block boundaries, phases, cuts and options, drawn for each shape."""
    draw = random.Random(f"{heads} {dims} {block_size}")
    kv_lens = [draw.choice([1, 2, 9]) * block_size + draw.choice([-1, 0, 1]) for _ in range(3)]
    kv_lens = [max(1, min(n, 260)) for n in kv_lens]
    query_lens = [min(n, draw.choice([1, 1, 20, 40])) for n in kv_lens]
    tilings = draw.choice([None, Tilings(Tiling(32, 32, split=64), Tiling(64, 32, split=128))])
    problem = attention_problem(
        AttentionShape(
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=dims[0],
            value_dim=dims[1],
            block_size=block_size,
        ),
        query_lens,
        kv_lens,
        placement=draw.choice(PLACEMENTS),
        device=device,
        **drawn_options(draw, heads[0], device),
    )
    out = problem.solve(paged_attention, tilings=tilings)
    assert (out.double() - problem.answer()).abs().max() < 5e-6
