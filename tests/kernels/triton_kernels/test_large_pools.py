"""Pools whose offsets do not fit in 32 bits."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvpage.kernels import cache_write
from kvpage.kernels.paged_attention import INTERPRETED, paged_attention
from kvpage.kernels.work import AttentionBatch

HEAD_DIM = 16
BLOCK_SIZE = 8
FAR_BLOCK = 2**31 // (HEAD_DIM * BLOCK_SIZE)
"""The first block whose offset in elements is 2^31."""


@pytest.fixture(autouse=True)
def _overflow_is_an_error() -> Iterator[None]:
    """Arithmetic of 32 bits that overflows raises in the interpreter, before it reads anything."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    object.__setattr__(options, "debug", True)
    yield
    object.__setattr__(options, "debug", False)


@pytest.fixture
def pool(device: str) -> torch.Tensor:
    """A pool of 2^31 elements and one block more, of one head. Its pages are never touched."""
    return torch.empty((FAR_BLOCK + 1) * BLOCK_SIZE, 1, HEAD_DIM, dtype=torch.int8, device=device)


def test_slots_beyond_two_to_the_31_elements(pool: torch.Tensor, device: str) -> None:
    """The far block is written and read as any other."""
    kv = torch.arange(-64, 64.0, device=device).view(BLOCK_SIZE, 1, HEAD_DIM)
    scales = (torch.ones(1, device=device),) * 2
    slots = FAR_BLOCK * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)
    # One pool serves as both, to have it in memory once.
    cache_write.write_kv(kv, kv, pool, pool, slots, kv_scales=scales)
    assert torch.equal(kv, pool[slots].float())

    one = np.ones(1, np.int32)
    table = np.array([[FAR_BLOCK]], np.int32)
    batch = AttentionBatch(table, 0 * one, one, BLOCK_SIZE * one, BLOCK_SIZE)
    # A score of the last row far above all others: the output is that row.
    q = torch.full((1, 1, HEAD_DIM), 100.0, device=device)
    out = paged_attention(q, pool, pool, batch, scale=1.0, kv_scales=scales)
    assert torch.equal(kv[-1], out[0])
