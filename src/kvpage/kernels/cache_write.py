"""Writing to the pools: new K and V of a step, and whole blocks for copy-on-write.

New K and V come straight from the projections, in whatever strides those have, and are scattered
to their slots by one kernel, which also quantises them. Each program stores ROWS rows, a row
being one head of one token:

    row r  ->  token r // Hkv, KV head r % Hkv  ->  pool[slots[token], head, :]

Dims: T new tokens, Hkv KV heads, D and Dv head dims of K and V.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kvpage.kernels.arguments import (
    KVScales,
    check_new_tokens,
    check_pools,
    check_vector,
    padded_dim,
    stride_alignment,
)
from kvpage.kernels.quantisation import largest

COMPILE_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
"""Pinned, because Triton's default changes in 3.10."""

_STRIDES = ("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride")


@triton.jit  # type: ignore[untyped-decorator]
def _scatter(
    new_ptr: tl.tensor,  # [T, Hkv, DIM]
    pool_ptr: tl.tensor,  # [num_slots, Hkv, DIM]
    scales_ptr: tl.tensor | None,  # [Hkv]
    token: tl.tensor,  # int64[ROWS]
    head: tl.tensor,  # int64[ROWS]
    slot: tl.tensor,  # int64[ROWS]
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """Store rows of K or V in the pool's type: as they are, or scaled, rounded and clamped."""
    dim = tl.arange(0, DIM_PAD)
    mask = (slot >= 0)[:, None] & (dim[None, :] < DIM)
    src = token * token_stride + head * head_stride
    rows = tl.load(new_ptr + src[:, None] + dim[None, :], mask=mask, other=0.0)
    if LIMIT is not None:
        rows = rows.to(tl.float32)
        if scales_ptr is not None:
            scale = tl.load(scales_ptr + head).to(tl.float32)[:, None]
            # The exact division: an approximate one would round ties otherwise than the host.
            rows = tl.math.div_rn(rows, tl.broadcast_to(scale, rows.shape))
        if pool_ptr.dtype.element_ty == tl.int8:
            rows = tl.floor(rows + 0.5)
        rows = tl.minimum(tl.maximum(rows, -LIMIT), LIMIT)
    dst = slot * SLOT_STRIDE + head * HEAD_STRIDE
    stored = rows.to(pool_ptr.dtype.element_ty)
    tl.store(pool_ptr + dst[:, None] + dim[None, :], stored, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", *_STRIDES])  # type: ignore[untyped-decorator]
def _write(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_pool_ptr: tl.tensor,
    v_pool_ptr: tl.tensor,
    slots_ptr: tl.tensor,  # int64[T]
    k_scales_ptr: tl.tensor | None,
    v_scales_ptr: tl.tensor | None,
    num_tokens: tl.tensor,
    # In units of K_ALIGN and V_ALIGN elements, for the reason given at the attend kernel.
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    K_ALIGN: tl.constexpr,
    V_ALIGN: tl.constexpr,
    K_SLOT_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    V_SLOT_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Scatter ROWS rows of K and of V to their slots; a slot of -1 stores nothing."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // HKV
    head = row % HKV
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    _scatter(
        k_ptr, k_pool_ptr, k_scales_ptr, token, head, slot,
        k_token_stride * K_ALIGN, k_head_stride * K_ALIGN,
        K_SLOT_STRIDE, K_HEAD_STRIDE, D, D_PAD, LIMIT,
    )  # fmt: skip
    _scatter(
        v_ptr, v_pool_ptr, v_scales_ptr, token, head, slot,
        v_token_stride * V_ALIGN, v_head_stride * V_ALIGN,
        V_SLOT_STRIDE, V_HEAD_STRIDE, DV, DV_PAD, LIMIT,
    )  # fmt: skip


# The interpreter pays for programs, a GPU for programs that are too few or too large.
_ROWS = 16 if isinstance(_write, triton.JITFunction) else 256


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scales: KVScales | None = None,
) -> None:
    """Store the K and V of a step's tokens, in place.

    Args:
        k: `[T, Hkv, D]`, the last dim contiguous.
        v: `[T, Hkv, Dv]`, likewise.
        k_pool: `[num_slots, Hkv, D]`, the last dim contiguous.
        v_pool: `[num_slots, Hkv, Dv]`, likewise.
        slots: `int64[T]`; a token whose slot is -1 is skipped.
        kv_scales: `([Hkv], [Hkv])`; a value x is stored as `x / scale`, rounded to the nearest
            and clamped to what a one-byte type can hold.

    Raises:
        ValueError: a shape, type, stride or device does not fit.
    """
    check_pools(k_pool, v_pool, kv_scales)
    check_new_tokens(k, v, k_pool, v_pool)
    check_vector("slots", slots, len(k), k_pool.device)
    if slots.dtype != torch.int64:
        raise ValueError(f"slots must be int64, got {slots.dtype}")
    if not len(k):
        return
    grid = (triton.cdiv(len(k) * k_pool.shape[1], _ROWS),)
    _write[grid](**write_arguments(k, v, k_pool, v_pool, slots, kv_scales), **COMPILE_OPTIONS)


def write_arguments(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: KVScales | None,
) -> dict[str, Any]:
    """The arguments of the write kernel by name; all that selects a variant is the model's."""
    k_scales, v_scales = kv_scales or (None, None)
    k_align, v_align = stride_alignment("k", k), stride_alignment("v", v)
    return {
        "k_ptr": k,
        "v_ptr": v,
        "k_pool_ptr": k_pool,
        "v_pool_ptr": v_pool,
        "slots_ptr": slots,
        "k_scales_ptr": k_scales,
        "v_scales_ptr": v_scales,
        "num_tokens": len(k),
        "k_token_stride": k.stride(0) // k_align,
        "k_head_stride": k.stride(1) // k_align,
        "v_token_stride": v.stride(0) // v_align,
        "v_head_stride": v.stride(1) // v_align,
        "K_ALIGN": k_align,
        "V_ALIGN": v_align,
        "K_SLOT_STRIDE": k_pool.stride(0),
        "K_HEAD_STRIDE": k_pool.stride(1),
        "V_SLOT_STRIDE": v_pool.stride(0),
        "V_HEAD_STRIDE": v_pool.stride(1),
        "HKV": k_pool.shape[1],
        "D": k_pool.shape[2],
        "D_PAD": padded_dim(k_pool.shape[2]),
        "DV": v_pool.shape[2],
        "DV_PAD": padded_dim(v_pool.shape[2]),
        "LIMIT": largest(k_pool.dtype) if k_pool.dtype.itemsize == 1 else None,
        "ROWS": _ROWS,
    }


def copy_blocks(
    k_pool: torch.Tensor, v_pool: torch.Tensor, copies: torch.Tensor, *, block_size: int
) -> None:
    """Copy whole blocks, in place; every source is read before any destination is written.

    Plain torch: it gathers all sources and then scatters them, which is what the promise asks
    for, and copies are rare and long enough that a kernel of our own would gain nothing.

    Args:
        k_pool: `[num_slots, Hkv, D]`.
        v_pool: `[num_slots, Hkv, Dv]`.
        copies: `int64[C, 2]`, pairs of block ids (from, to), no destination twice.
        block_size: tokens per block.
    """
    sources, destinations = copies.unbind(1)
    for pool in (k_pool, v_pool):
        # As bytes, since torch does not index every one-byte float.
        blocks = torch.unflatten(pool.view(torch.uint8), 0, (-1, block_size))
        blocks.index_copy_(0, destinations, blocks.index_select(0, sources))
