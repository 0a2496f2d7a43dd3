"""What is said when arguments do not fit."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from kvpage.kernels.cache_write import write_kv
from kvpage.kernels.paged_attention import Tiling, Tilings, paged_attention
from kvpage.kernels.work import AttentionBatch

ONE = np.ones(1, np.int32)
BATCH = AttentionBatch(np.zeros((1, 4), np.int32), 0 * ONE, ONE, ONE, 8)
GOOD: Mapping[str, Any] = {
    "q": torch.zeros(1, 4, 16),
    "k_pool": torch.zeros(32, 2, 16),
    "v_pool": torch.zeros(32, 2, 16),
    "batch": BATCH,
    "scale": 1.0,
}
BYTES = torch.zeros(32, 2, 16, dtype=torch.int8)

BAD_CALLS: list[tuple[Mapping[str, Any], str]] = [
    ({"q": torch.zeros(1, 5, 16)}, r"a multiple of 2 heads, 16\], got .* \[1, 5, 16\]"),
    ({"q": torch.zeros(1, 4, 8)}, r"heads, 16\], got torch.float32 \[1, 4, 8\]"),
    ({"q": torch.zeros(2, 4, 16)}, "q has 2 tokens and the batch 1"),
    ({"q": torch.zeros(1, 4, 16).double()}, "float32, float16 or bfloat16, got torch.float64"),
    ({"q": torch.zeros(1, 4, 16).half()}, "pools must be torch.float16 as q, int8 or fp8"),
    ({"q": torch.zeros(1, 16, 4).transpose(1, 2)[:, :4]}, "last dim of q must be contiguous"),
    ({"q": torch.zeros(1, 4, 17)[:, :, :16]}, "strides of q must be multiples of 16"),
    ({"k_pool": torch.zeros(32, 16, 2).transpose(1, 2)}, "last dim of k_pool must be contiguous"),
    ({"v_pool": torch.zeros(31, 2, 16)}, r"\[num_slots, Hkv, D\] and .*\[31, 2, 16\]"),
    ({"v_pool": torch.zeros(32, 2, 16).half()}, "float32 and v_pool is torch.float16"),
    ({"v_pool": torch.zeros(32, 2, 16, device="meta")}, "v_pool is on meta and its peers on cpu"),
    ({"k_pool": BYTES, "v_pool": BYTES}, "int8 pools need kv_scales"),
    ({"kv_scales": (torch.ones(2), torch.ones(2))}, "kv_scales are for int8 and fp8 pools"),
    ({"sinks": torch.zeros(2)}, r"sinks must be contiguous of shape \[4\]"),
    ({"alibi_slopes": torch.zeros(8)[::2]}, "alibi_slopes must be contiguous"),
    ({"window": -1}, "must not be negative, got -1"),
    ({"softcap": -2.0}, "must not be negative, got 0 and -2.0"),
    ({"out": torch.zeros(1, 4, 8)}, r"shape \(1, 4, 16\), got .*\[1, 4, 8\]"),
]


@pytest.mark.parametrize(("change", "message"), BAD_CALLS)
def test_bad_attention_arguments(change: Mapping[str, Any], message: str) -> None:
    """The launcher refuses before anything runs, and says what is wrong."""
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**GOOD, **change})


def test_tilings_with_too_few_rows() -> None:
    """Heads that do not fit would be left out."""
    tilings = Tilings(Tiling(16, 32, split=256), Tiling(64, 32, split=256))
    with pytest.raises(ValueError, match="a group of 24 heads does not fit in 16 rows"):
        tilings.shape(group_size=24, window=0)


GOOD_WRITE: Mapping[str, Any] = {
    "k": torch.zeros(3, 2, 16),
    "v": torch.zeros(3, 2, 16),
    "k_pool": torch.zeros(32, 2, 16),
    "v_pool": torch.zeros(32, 2, 16),
    "slots": torch.zeros(3, dtype=torch.int64),
}

BAD_WRITES: list[tuple[Mapping[str, Any], str]] = [
    ({"k": torch.zeros(3, 1, 16)}, r"k must be \[T, 2, 16\] as its pool"),
    ({"v": torch.zeros(4, 2, 16)}, "same tokens and type"),
    ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots must be contiguous of shape \[3\]"),
    ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots must be int64, got torch.int32"),
    ({"k": torch.zeros(3, 16, 2).transpose(1, 2)}, "last dim of k must be contiguous"),
]


@pytest.mark.parametrize(("change", "message"), BAD_WRITES)
def test_bad_writes(change: Mapping[str, Any], message: str) -> None:
    """Likewise for new K and V."""
    with pytest.raises(ValueError, match=message):
        write_kv(**{**GOOD_WRITE, **change})
