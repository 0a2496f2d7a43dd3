"""Paged attention on the CPU, compiled by numba.

Dims: T query tokens of a step, Hq query heads, Hkv KV heads, D and Dv head dims of K and V.
"""

import math

import numba
import numpy as np
import torch

from kvpage.kernels import reference
from kvpage.kernels.work import AttentionBatch

write_kv = reference.write_kv
copy_blocks = reference.copy_blocks


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over the cached K and V; see `reference.paged_attention`."""
    plain = q.dtype == k_pool.dtype == v_pool.dtype == torch.float32
    if not plain or softcap or sinks is not None or alibi_slopes is not None or kv_scales:
        return reference.paged_attention(
            q, k_pool, v_pool, batch, scale=scale, window=window, softcap=softcap, sinks=sinks,
            alibi_slopes=alibi_slopes, kv_scales=kv_scales, out=out,
        )  # fmt: skip
    result = q.new_empty(q.shape[0], q.shape[1], v_pool.shape[2])
    _attend(
        q.numpy(), k_pool.numpy(), v_pool.numpy(), batch.block_table, batch.rows, batch.query_lens,
        batch.kv_lens, batch.block_size, scale, window or 2**62, result.numpy(),
    )  # fmt: skip
    return result if out is None else out.copy_(result)


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _attend(q, k_pool, v_pool, table, rows, query_lens, kv_lens, block_size, scale, window, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    group = q.shape[1] // k_pool.shape[1]
    token = 0
    for i in range(len(rows)):
        for j in range(query_lens[i]):
            position = kv_lens[i] - query_lens[i] + j
            first = max(0, position - window + 1)
            scores = np.empty((q.shape[1], position + 1 - first), np.float32)
            for n in range(first, position + 1):
                slot = np.int64(table[rows[i], n // block_size]) * block_size + n % block_size
                for h in range(q.shape[1]):
                    total = np.float32(0)
                    for d in range(q.shape[2]):
                        total += q[token, h, d] * k_pool[slot, h // group, d]
                    scores[h, n - first] = total * scale
            for h in range(q.shape[1]):
                highest = scores[h].max()
                mass = np.float32(0)
                for n in range(scores.shape[1]):
                    scores[h, n] = math.exp(scores[h, n] - highest)
                    mass += scores[h, n]
                for d in range(out.shape[2]):
                    out[token, h, d] = 0
                for n in range(scores.shape[1]):
                    at = first + n
                    slot = np.int64(table[rows[i], at // block_size]) * block_size + at % block_size
                    weight = scores[h, n] / mass
                    for d in range(out.shape[2]):
                        out[token, h, d] += weight * v_pool[slot, h // group, d]
            token += 1
