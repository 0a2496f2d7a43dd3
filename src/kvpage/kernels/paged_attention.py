"""Paged attention in Triton: one kernel for every allocator, GPU and model.

**The layout.** A layer's cache is two flat pools of token slots:

    k_pool  [num_slots, Hkv, D]         slot s holds K of one token, all KV heads
    v_pool  [num_slots, Hkv, Dv]

A sequence's tokens are scattered over them in blocks of BLOCK adjacent slots, and its row of the
block table says where: position p is in slot `table[p // BLOCK] * BLOCK + p % BLOCK`. However an
allocator chose the blocks, the kernel reads the same keys in the same order, so all allocators
give the same output, bit for bit. Reading the table costs one small load for TILE keys.

**The work.** The host cuts a step into items, "these queries attend to these keys", of about
equal size (`work` draws the records). Program (i, h) executes item i for KV head h:

    rows of a program:          query 0            query 1
                        ┌───────────────────┬───────────────────┬─────┐
                        │ head 0 … head G-1 │ head 0 … head G-1 │  …  │   ROWS, the rest masked
                        └───────────────────┴───────────────────┴─────┘
    keys:   kv_begin ├──────┬──────┬──────┬──────┤ kv_end      TILE keys at a time

The G query heads of a group read the same K and V, so they share a program (GQA): a decoding
sequence fills G rows of a matrix product instead of one. ROWS is 16 where every sequence has one
query (decode), 64 where some have more (extend): two launches, one source.

**The softmax** is taken online (Milakov and Gimelshein, 2018; FlashAttention-2, Dao, 2023): for
each row a running maximum m, the total of exp2(s - m), and the sum of V so weighted. Scores
are held in base 2, since exp2 is what the hardware has. A row that has seen no key yet has
m = -inf, which is kept, and replaced only where -inf minus -inf would make NaN.

**Long sequences** are cut at fixed positions (FlashDecoding, Dao et al., 2023). Each part writes
its normalised output and the logarithm of its total in float32; `_merge` weighs them together.
Where a sequence is cut depends on nothing but its own lengths, hence a request's bits are the
same in any batch.

Sums and softmax are float32; products take the type of the queries, and float32 is not rounded to
TF32. Offsets into the pools are int64, since 2^31 elements are 4 GiB of bf16.

Dims: T query tokens, Hq = Hkv * G query heads, D and Dv head dims (padded to powers of two
`D_PAD`, `DV_PAD`), N items, M merges, P partial results.
"""

from functools import cache
from typing import Any, Literal, TypeAlias

import attrs
import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import (
    AttentionCall,
    check_call,
    check_output,
    padded_dim,
    stride_alignment,
)
from kvpage.kernels.device_work import Launch, device_work
from kvpage.kernels.work import ITEM_WORDS, MERGE_WORDS, AttentionBatch, Cut, WorkShape

LOG2E = tl.constexpr(1.4426950408889634)
WORDS_OF_ITEM = tl.constexpr(ITEM_WORDS)
WORDS_OF_MERGE = tl.constexpr(MERGE_WORDS)
PARTS_AT_ONCE = tl.constexpr(16)


@triton.jit  # type: ignore[untyped-decorator]
def _finite(m: tl.tensor) -> tl.tensor:
    """A running maximum that can be subtracted: 0 for a row that has seen no key."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit  # type: ignore[untyped-decorator]
def _with_sink(
    m: tl.tensor, total: tl.tensor, sink: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A softmax that also has this score, which carries no value; and the factor of its sum."""
    m_new = tl.maximum(m, sink)
    m_finite = _finite(m_new)
    shrink = tl.exp2(m - m_finite)
    return m_new, total * shrink + tl.exp2(sink - m_finite), shrink


@triton.jit(do_not_specialize=["q_token_stride", "q_head_stride"])  # type: ignore[untyped-decorator]
def _attend(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [T, Hq, Dv], contiguous
    partial_out_ptr: tl.tensor,  # float32[P, Hkv, QUERIES * G, Dv]
    partial_lse_ptr: tl.tensor,  # float32[P, Hkv, QUERIES * G]
    table_ptr: tl.tensor,  # int32[E]
    items_ptr: tl.tensor,  # int32[N, 8]
    # Absent options are None, and their code is not compiled.
    sinks_ptr: tl.tensor | None,  # [Hq]
    alibi_slopes_ptr: tl.tensor | None,  # [Hq]
    k_scales_ptr: tl.tensor | None,  # [Hkv]
    v_scales_ptr: tl.tensor | None,  # [Hkv]
    softcap: tl.tensor | None,
    scale: tl.tensor,
    # In units of Q_ALIGN elements: so the compiler knows the alignment without looking at the
    # values, which could change with the batch and cost a compilation in the middle of serving.
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    Q_ALIGN: tl.constexpr,
    K_SLOT_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    V_SLOT_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """Attention of one item's queries over its keys, for one KV head."""
    item_ptr = items_ptr + tl.program_id(0) * WORDS_OF_ITEM
    table_start = tl.load(item_ptr)
    if table_start < 0:
        return
    first_token = tl.load(item_ptr + 1)
    num_queries = tl.load(item_ptr + 2)
    first_position = tl.load(item_ptr + 3)
    kv_begin = tl.load(item_ptr + 4)
    kv_end = tl.load(item_ptr + 5)
    part = tl.load(item_ptr + 6)
    kv_head = tl.program_id(1).to(tl.int64)

    # Row r is head r % G of the group, of query r // G. Rows behind the last query are computed
    # with zeros and never stored; without the mask they would be heads of the next group.
    row = tl.arange(0, ROWS)
    query = row // G
    row_is_real = (query < QUERIES) & (query < num_queries)
    head = kv_head * G + row % G
    token = (first_token + query).to(tl.int64)
    position = first_position + query

    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    q_offset = token * (q_token_stride * Q_ALIGN) + head * (q_head_stride * Q_ALIGN)
    q = tl.load(
        q_ptr + q_offset[:, None] + d[None, :],
        mask=row_is_real[:, None] & (d[None, :] < D),
        other=0.0,
    ).to(COMPUTE)

    # A quantised K is a multiple of its head's scale, and so are its scores.
    score_scale = scale
    if k_scales_ptr is not None:
        score_scale = scale * tl.load(k_scales_ptr + kv_head).to(tl.float32)
    if alibi_slopes_ptr is not None:
        slope = tl.load(alibi_slopes_ptr + head, mask=row_is_real, other=0.0).to(tl.float32)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    k_head_ptr = k_ptr + kv_head * K_HEAD_STRIDE
    v_head_ptr = v_ptr + kv_head * V_HEAD_STRIDE

    # Tiles begin at multiples of TILE whatever kv_begin is, so that a key is always summed with
    # the same neighbours. Nothing before kv_begin is loaded: it may be freed or never written,
    # and a weight of 0 does not help, since 0 * NaN is NaN.
    for tile_begin in range(kv_begin // TILE * TILE, kv_end, TILE):
        key = tile_begin + tl.arange(0, TILE)
        key_is_real = (key >= kv_begin) & (key < kv_end)
        if BLOCK % TILE == 0:
            # The whole tile is in one block, which holds at least one real key.
            block = tl.load(table_ptr + table_start + tile_begin // BLOCK).to(tl.int64)
            slot = block * BLOCK + (tile_begin % BLOCK + tl.arange(0, TILE))
        else:
            entry_ptr = table_ptr + table_start + key // BLOCK
            block = tl.load(entry_ptr, mask=key_is_real, other=0).to(tl.int64)
            slot = block * BLOCK + key % BLOCK
        k = tl.load(
            k_head_ptr + slot[None, :] * K_SLOT_STRIDE + d[:, None],
            mask=key_is_real[None, :] & (d[:, None] < D),
            other=0.0,
        ).to(COMPUTE)
        v = tl.load(
            v_head_ptr + slot[:, None] * V_SLOT_STRIDE + dv[None, :],
            mask=key_is_real[:, None] & (dv[None, :] < DV),
            other=0.0,
        ).to(COMPUTE)

        s = tl.dot(q, k, input_precision="ieee") * score_scale
        if softcap is not None:
            # tanh(x) = 2 * sigmoid(2x) - 1. Of the two ways to write it this one has no inf/inf.
            s = softcap * (2.0 / (1.0 + tl.exp2(s * (-2.0 * LOG2E / softcap))) - 1.0)
        if alibi_slopes_ptr is not None:
            s += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        visible = key_is_real[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (position[:, None] - key[None, :] < WINDOW)
        s = tl.where(visible, s * LOG2E, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        m_finite = _finite(m_new)
        p = tl.exp2(s - m_finite[:, None])
        shrink = tl.exp2(m - m_finite)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(COMPUTE), v, acc * shrink[:, None], input_precision="ieee")
        m = m_new

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=row_is_real, other=0.0).to(tl.float32) * LOG2E
        # Where there are several parts, the sink is left to the merge.
        m, total, shrink = _with_sink(m, total, tl.where(part < 0, sink, float("-inf")))
        acc = acc * shrink[:, None]
    # A row of zeros, not of NaN, where a part has no visible key.
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if v_scales_ptr is not None:
        result *= tl.load(v_scales_ptr + kv_head).to(tl.float32)

    is_stored = row_is_real[:, None] & (dv[None, :] < DV)
    if part < 0:
        out_offset = (token * (HKV * G) + head) * DV
        tl.store(
            out_ptr + out_offset[:, None] + dv[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=is_stored,
        )
    else:
        partial = (part.to(tl.int64) * HKV + kv_head) * (QUERIES * G) + row
        lse = tl.where(total > 0, m + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_lse_ptr + partial, lse, mask=row_is_real)
        tl.store(partial_out_ptr + partial[:, None] * DV + dv[None, :], result, mask=is_stored)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    out_ptr: tl.tensor,  # [T, Hq, Dv], contiguous
    partial_out_ptr: tl.tensor,  # float32[P, Hkv, QUERIES * G, Dv]
    partial_lse_ptr: tl.tensor,  # float32[P, Hkv, QUERIES * G]
    merges_ptr: tl.tensor,  # int32[M, 4]
    sinks_ptr: tl.tensor | None,  # [Hq] or None
    HKV: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
) -> None:
    """The output of one query and head from its parts: program (merge, query, head)."""
    merge_ptr = merges_ptr + tl.program_id(0) * WORDS_OF_MERGE
    query = tl.program_id(1)
    head = tl.program_id(2)
    if query >= tl.load(merge_ptr + 1):
        return
    first_token = tl.load(merge_ptr)
    first_part = tl.load(merge_ptr + 2)
    num_parts = tl.load(merge_ptr + 3)

    row = query * G + head % G
    dv = tl.arange(0, DV_PAD)
    m = float("-inf")
    total = 0.0
    acc = tl.zeros([DV_PAD], tl.float32)
    for begin in range(0, num_parts, PARTS_AT_ONCE):
        index = begin + tl.arange(0, PARTS_AT_ONCE)
        is_real = index < num_parts
        part = (first_part + index).to(tl.int64)
        partial = (part * HKV + head // G) * (QUERIES * G) + row
        lse = tl.load(partial_lse_ptr + partial, mask=is_real, other=float("-inf"))
        output = tl.load(
            partial_out_ptr + partial[:, None] * DV + dv[None, :],
            mask=is_real[:, None] & (dv[None, :] < DV),
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(lse, 0))
        m_finite = _finite(m_new)
        weight = tl.exp2(lse - m_finite)
        shrink = tl.exp2(m - m_finite)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(output * weight[:, None], 0)
        m = m_new

    if sinks_ptr is not None:
        m, total, shrink = _with_sink(m, total, tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
        acc = acc * shrink
    token = (first_token + query).to(tl.int64)
    out_offset = (token * (HKV * G) + head) * DV
    # Some part has the query's own key, so total is not 0.
    tl.store(
        out_ptr + out_offset + dv,
        (acc / total).to(out_ptr.dtype.element_ty),
        mask=dv < DV,
    )


GpuFamily: TypeAlias = Literal["mma", "wgmma", "amd"]
"""NVIDIA GPUs by their matrix instructions (from Hopper on, whole warp groups), and AMD's."""

INTERPRETED: bool = not isinstance(_attend, triton.JITFunction)
"""Whether `TRITON_INTERPRET=1` was set when this module was imported."""


COMMON_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
"""Pinned, because Triton's default changes in 3.10."""


@attrs.frozen
class Tiling:
    """How one launch uses the machine.

    Attributes:
        rows: packed rows (queries times heads of a group) of a program.
        tile: keys per iteration.
        split: a sequence is cut at the multiples of this many keys.
        num_warps: warps of a program.
        num_stages: depth of the load pipeline.
    """

    rows: int
    tile: int
    split: int
    num_warps: int = 4
    num_stages: int = 3


@attrs.frozen
class Tilings:
    """The two launches of a step: sequences with one query, and sequences with several."""

    decode: Tiling
    extend: Tiling

    def shape(self, group_size: int, window: int) -> WorkShape:
        """How the host has to cut the work for them.

        Raises:
            ValueError: a program has fewer rows than a query has heads in a group.
        """
        fewest = min(self.decode.rows, self.extend.rows)
        if fewest < group_size:
            raise ValueError(f"a group of {group_size} heads does not fit in {fewest} rows")
        return WorkShape(
            Cut(1, self.decode.split),
            Cut(self.extend.rows // group_size, self.extend.split),
            window,
        )


def default_tilings(call: AttentionCall, family: GpuFamily) -> Tilings:
    """Tilings that compile without spills for these types and head dims: docs/reference/kernel.md.

    They depend on model and machine alone, never on the batch. Extending sequences have many
    queries to fill the GPU with and are cut only where they get very long.
    """
    group_rows = triton.next_power_of_2(call.group_size)
    large = call.q.dtype == torch.float32 or max(call.head_dim, call.value_dim) > 128
    one_byte = call.k_pool.dtype.itemsize == 1
    tile = 32 if large or one_byte or family == "amd" else 64
    if INTERPRETED:
        tile = 128  # an iteration costs the interpreter the same whatever its size
    extend_warps = 4 if family == "amd" or (family == "wgmma" and not large) else 8
    return Tilings(
        Tiling(max(16, group_rows), tile, split=decode_split(call.group_size)),
        Tiling(max(64, group_rows), tile, split=16384, num_warps=extend_warps),
    )


@cache
def gpu_family(device: torch.device) -> GpuFamily:
    """Which matrix instructions a device has; for a CPU, where only the interpreter runs, `mma`."""
    if torch.version.hip is not None:
        return "amd"
    if device.type != "cuda":
        return "mma"
    return "wgmma" if torch.cuda.get_device_capability(device)[0] in {9, 10} else "mma"


def decode_split(group_size: int) -> int:
    """Where a decoding sequence is cut, in keys.

    A part writes `G * Dv` float32 a KV head and reads `keys * (D + Dv)` numbers, so with 64 keys
    or more for each head of the group the parts' results are a few per cent of the traffic.
    """
    return max(256, 64 * group_size)


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
    tilings: Tilings | None = None,
) -> torch.Tensor:
    """Causal attention of a step's queries over the cached K and V of their sequences.

    Args:
        q: `[T, Hq, D]`, float32, float16 or bfloat16, the last dim contiguous.
        k_pool: `[num_slots, Hkv, D]`, in the type of `q`, int8 or fp8, the last dim contiguous.
        v_pool: `[num_slots, Hkv, Dv]`, likewise.
        batch: which tokens attend to which slots; planned once for all layers of a step.
        scale: factor on the scores, most often `D ** -0.5`.
        window: a query at position p attends to positions `(p - window, p]`; 0 means to all.
        softcap: if positive, a score s becomes `softcap * tanh(s / softcap)`.
        sinks: `[Hq]`, a score per head that takes part in the softmax and carries no value.
        alibi_slopes: `[Hq]`; the score of key position n gains `slope * (n - p)`.
        kv_scales: `([Hkv], [Hkv])`, what a stored K or V is multiplied by, for quantised pools.
        out: where to write the result, `[T, Hq, Dv]`, contiguous.
        tilings: for tuning; by default they follow from types and head dims.

    Returns:
        `[T, Hq, Dv]` in the type of `q`: `out` if given, else a new contiguous tensor.

    Raises:
        ValueError: a shape, type, stride or device does not fit, or the batch does not.
    """
    call = AttentionCall(
        q, k_pool, v_pool, batch, scale, window, softcap, sinks, alibi_slopes, kv_scales
    )
    check_call(call)
    tilings = tilings or default_tilings(call, gpu_family(q.device))
    work = device_work(batch, tilings.shape(call.group_size, window), q.device)
    out = _output(call, out)
    _launch(call, out, work.table, work.decode, tilings.decode)
    _launch(call, out, work.table, work.extend, tilings.extend)
    return out


def attend_arguments(
    call: AttentionCall, out: torch.Tensor, table: torch.Tensor, launch: Launch, tiling: Tiling
) -> dict[str, Any]:
    """The arguments of the attend kernel by name, but for the partial results.

    Everything that selects a compiled variant comes from the model and the tiling alone.
    """
    q, k_pool, v_pool = call.q, call.k_pool, call.v_pool
    k_scales, v_scales = call.kv_scales or (None, None)
    q_align = stride_alignment("q", q)
    return {
        "q_ptr": q,
        "k_ptr": k_pool,
        "v_ptr": v_pool,
        "out_ptr": out,
        "table_ptr": table,
        "items_ptr": launch.items,
        "sinks_ptr": call.sinks,
        "alibi_slopes_ptr": call.alibi_slopes,
        "k_scales_ptr": k_scales,
        "v_scales_ptr": v_scales,
        "softcap": float(call.softcap) or None,
        "scale": float(call.scale),
        "q_token_stride": q.stride(0) // q_align,
        "q_head_stride": q.stride(1) // q_align,
        "Q_ALIGN": q_align,
        "K_SLOT_STRIDE": k_pool.stride(0),
        "K_HEAD_STRIDE": k_pool.stride(1),
        "V_SLOT_STRIDE": v_pool.stride(0),
        "V_HEAD_STRIDE": v_pool.stride(1),
        "D": call.head_dim,
        "D_PAD": padded_dim(call.head_dim),
        "BLOCK": call.batch.block_size,
        "TILE": tiling.tile,
        "ROWS": tiling.rows,
        "WINDOW": call.window,
        "COMPUTE": _compute_type(q.dtype),
        **_shared_constants(call, launch),
    }


def merge_arguments(call: AttentionCall, out: torch.Tensor, launch: Launch) -> dict[str, Any]:
    """The arguments of the merge kernel by name, but for the partial results."""
    return {
        "out_ptr": out,
        "merges_ptr": launch.merges,
        "sinks_ptr": call.sinks,
        **_shared_constants(call, launch),
    }


def partial_arguments(call: AttentionCall, launch: Launch) -> dict[str, torch.Tensor]:
    """Room for the partial results of a launch, uninitialised."""
    shape = (launch.num_parts, call.num_kv_heads, launch.queries * call.group_size)
    return {
        "partial_out_ptr": call.q.new_empty(*shape, call.value_dim, dtype=torch.float32),
        "partial_lse_ptr": call.q.new_empty(shape, dtype=torch.float32),
    }


def compile_options(tiling: Tiling) -> dict[str, Any]:
    """How the attend kernel is compiled."""
    return {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages, **COMMON_OPTIONS}


def _launch(
    call: AttentionCall, out: torch.Tensor, table: torch.Tensor, launch: Launch, tiling: Tiling
) -> None:
    """Run the items of a launch, and the merges where a sequence was cut."""
    if not len(launch.items):
        return
    partials = partial_arguments(call, launch)
    _attend[(len(launch.items), call.num_kv_heads)](
        **attend_arguments(call, out, table, launch, tiling), **partials, **compile_options(tiling)
    )
    if len(launch.merges):
        _merge[(len(launch.merges), launch.queries, call.num_heads)](
            **merge_arguments(call, out, launch), **partials, **COMMON_OPTIONS
        )


def _output(call: AttentionCall, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        out = call.q.new_empty(call.q.shape[0], call.num_heads, call.value_dim)
    else:
        check_output(call, out)
    # No item writes the tokens that pad a captured graph: they must not carry NaN through the
    # model, where a router or an all-reduce may look at all tokens.
    return out.zero_() if call.batch.capacity is not None else out


def _shared_constants(call: AttentionCall, launch: Launch) -> dict[str, int]:
    return {
        "HKV": call.num_kv_heads,
        "G": call.group_size,
        "DV": call.value_dim,
        "DV_PAD": padded_dim(call.value_dim),
        "QUERIES": launch.queries,
    }


def _compute_type(dtype: torch.dtype) -> tl.dtype:
    """The type of matrix products: that of the queries, but for the interpreter.

    Its product of bfloat16 is wrong (triton issue 11584), and that of float16 slow.
    """
    if INTERPRETED or dtype == torch.float32:
        return tl.float32
    return tl.float16 if dtype == torch.float16 else tl.bfloat16
