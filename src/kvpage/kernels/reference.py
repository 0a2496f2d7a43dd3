"""Paged attention in plain torch: slow, short, and the oracle of every other kernel.

Dims: T query tokens of a step, Hq query heads, Hkv KV heads, G = Hq / Hkv heads of a group,
D and Dv head dims of K and V, N keys of one sequence.

One sequence at a time, its K and V are gathered through the block table and a dense softmax is
taken over them. Everything is computed in float32, or in float64 if the queries are float64.
"""

import numpy as np
import torch

from kvpage.kernels.quantisation import quantised
from kvpage.kernels.work import AttentionBatch


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
    """Causal attention of a step's queries over the cached K and V of their sequences.

    Args:
        q: `[T, Hq, D]`, the last dim contiguous.
        k_pool: `[num_slots, Hkv, D]`.
        v_pool: `[num_slots, Hkv, Dv]`.
        batch: which tokens attend to which slots.
        scale: factor on the scores, most often `D ** -0.5`.
        window: a query at position p attends to positions `(p - window, p]`; 0 means to all.
        softcap: if positive, a score s becomes `softcap * tanh(s / softcap)`.
        sinks: `[Hq]`, a score per head that takes part in the softmax and carries no value.
        alibi_slopes: `[Hq]`; the score of key position n gains `slope * (n - p)`.
        kv_scales: `([Hkv], [Hkv])`, what a stored K or V is multiplied by, for quantised pools.
        out: where to write the result, `[T, Hq, Dv]`.

    Returns:
        `[T, Hq, Dv]` in the type of `q`: `out` if given, else a new contiguous tensor.
    """
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v_pool.shape[2])
    first_token = 0
    for i, num_queries in enumerate(batch.query_lens.tolist()):
        tokens = slice(first_token, first_token + num_queries)
        first_token += num_queries
        first_key = _first_visible(batch, i, window)
        slots = _slots(batch, i, first_key).to(q.device)
        keys, values = _dequantised(k_pool[slots], v_pool[slots], kv_scales, _compute_dtype(q))
        scores = _scores(q[tokens], keys, scale, softcap)
        distance = _distance(batch, i, first_key, q.device)
        scores = _masked(scores, distance, window, alibi_slopes)
        out[tokens] = _weighted(scores, values, sinks).to(out.dtype)
    return out


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Store the K and V of a step's tokens, in place.

    Args:
        k: `[T, Hkv, D]`, the last dim contiguous.
        v: `[T, Hkv, Dv]`, the last dim contiguous.
        k_pool: `[num_slots, Hkv, D]`.
        v_pool: `[num_slots, Hkv, Dv]`.
        slots: `int64[T]`; a token whose slot is -1 is skipped.
        kv_scales: `([Hkv], [Hkv])`; a value x is stored as `x / scale`, rounded to the nearest
            and clamped to what the pool's type can hold.
    """
    k_scales, v_scales = kv_scales or (None, None)
    stored = slots >= 0
    k_pool[slots[stored]] = quantised(k[stored], k_pool.dtype, k_scales)
    v_pool[slots[stored]] = quantised(v[stored], v_pool.dtype, v_scales)


def copy_blocks(
    k_pool: torch.Tensor, v_pool: torch.Tensor, copies: torch.Tensor, *, block_size: int
) -> None:
    """Copy whole blocks, in place; every source is read before any destination is written.

    Args:
        k_pool: `[num_slots, Hkv, D]`.
        v_pool: `[num_slots, Hkv, Dv]`.
        copies: `int64[C, 2]`, pairs of block ids (from, to), no destination twice.
        block_size: tokens per block.
    """
    for pool in (k_pool, v_pool):
        before = pool.clone()
        for source, destination in copies.tolist():
            pool[_block(destination, block_size)] = before[_block(source, block_size)]


def _block(block: int, block_size: int) -> slice:
    return slice(block * block_size, (block + 1) * block_size)


def _compute_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _first_visible(batch: AttentionBatch, i: int, window: int) -> int:
    """The first position that the first query of sequence `i` attends to."""
    first_query = int(batch.kv_lens[i] - batch.query_lens[i])
    return max(0, first_query - window + 1) if window else 0


def _slots(batch: AttentionBatch, i: int, first: int) -> torch.Tensor:
    """`int64[N]`: the slots of positions `first` to the end of sequence `i`."""
    positions = np.arange(first, batch.kv_lens[i])
    blocks = batch.block_table[batch.rows[i], positions // batch.block_size].astype(np.int64)
    return torch.from_numpy(blocks * batch.block_size + positions % batch.block_size)


def _distance(batch: AttentionBatch, i: int, first: int, device: torch.device) -> torch.Tensor:
    """`int64[queries, N]`: how far each key lies behind each query; negative is the future."""
    end = int(batch.kv_lens[i])
    queries = torch.arange(end - int(batch.query_lens[i]), end, device=device)
    return queries[:, None] - torch.arange(first, end, device=device)[None, :]


def _dequantised(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K `[N, Hkv, D]` and V `[N, Hkv, Dv]` as numbers of the type that is computed in."""
    k, v = k.to(dtype), v.to(dtype)
    if kv_scales is None:
        return k, v
    k_scales, v_scales = kv_scales
    return k * k_scales.to(dtype)[:, None], v * v_scales.to(dtype)[:, None]


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """`[Hq, queries, N]`: scaled, capped dot products of each head with the K of its group."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,nhd->hqn", q.to(k.dtype), k) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _masked(
    scores: torch.Tensor, distance: torch.Tensor, window: int, alibi_slopes: torch.Tensor | None
) -> torch.Tensor:
    """The scores with ALiBi's bias added, and -inf where a query may not look."""
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * distance
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    return scores.masked_fill(hidden, float("-inf"))


def _weighted(scores: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """`[queries, Hq, Dv]`: the values under the softmax of the scores and the sink."""
    num_heads, num_queries, num_keys = scores.shape
    if sinks is not None:
        sink_column = sinks.to(scores.dtype)[:, None, None].expand(-1, num_queries, 1)
        scores = torch.cat([scores, sink_column], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, :num_keys]
    return torch.einsum("hqn,nhd->qhd", weights, v.repeat_interleave(num_heads // v.shape[1], 1))
