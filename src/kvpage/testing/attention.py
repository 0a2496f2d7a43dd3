"""Attention problems with known answers, for those who write or tune a kernel.

A problem is a step over pools in which only the slots of live tokens hold numbers: every other
slot is NaN, and so is what a sliding window has left behind, whose table entries are -1. A kernel
that reads what it must not read shows it. What a sequence contains follows from its seed alone,
not from where it lies or what lies beside it, so that kernels can be asked for equal bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvpage.kernels import PagedAttention, WriteKV, reference
from kvpage.kernels.work import AttentionBatch

Placement: TypeAlias = Literal["scattered", "extents", "contiguous"]
"""Tables as `fixed`, `dynamic` and `contiguous` make them."""

PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


@attrs.frozen(kw_only=True)
class AttentionShape:
    """The attention layer of a model, and the pool it reads.

    Attributes:
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: of Q and K.
        value_dim: of V; that of K if 0.
        block_size: tokens per block.
        dtype: of the queries and the output.
        kv_dtype: of the pools; that of the queries if none.
    """

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 0
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None

    @property
    def kv_dims(self) -> tuple[int, int]:
        """D and Dv."""
        return self.head_dim, self.value_dim or self.head_dim


@attrs.frozen(eq=False)
class AttentionProblem:
    """The arguments of a `paged_attention` call.

    Attributes:
        q: `[T, Hq, D]`.
        k_pool: `[num_slots, Hkv, D]`.
        v_pool: `[num_slots, Hkv, Dv]`.
        batch: the step.
        options: keyword arguments of the call.
    """

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    batch: AttentionBatch
    options: Mapping[str, Any]

    def solve(self, paged_attention: PagedAttention, **more: Any) -> torch.Tensor:
        """What a kernel answers: `[T, Hq, Dv]`."""
        return paged_attention(
            self.q, self.k_pool, self.v_pool, self.batch, **{**self.options, **more}
        )

    def answer(self) -> torch.Tensor:
        """What is right, as far as float64 knows: `float64[T, Hq, Dv]`."""
        pools = self.k_pool.double(), self.v_pool.double()
        return reference.paged_attention(self.q.double(), *pools, self.batch, **self.options)


def attention_problem(
    shape: AttentionShape,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    seeds: Sequence[int] | None = None,
    placement: Placement = "scattered",
    device: str = "cpu",
    write_kv: WriteKV = reference.write_kv,
    **options: Any,
) -> AttentionProblem:
    """Make a step of random sequences.

    Args:
        shape: the layer and the pool.
        query_lens: queries of each sequence.
        kv_lens: tokens of each sequence.
        seeds: of the contents of each sequence; its index if not given.
        placement: how the block tables look.
        device: where the tensors are.
        write_kv: stores the K and V of all live tokens.
        **options: of the call; `scale` is added, and with a `window` what it hides is evicted.
    """
    options = {"scale": shape.head_dim**-0.5, **options}
    first_visible = _first_visible(query_lens, kv_lens, options.get("window", 0))
    table = _block_table(shape, kv_lens, placement)
    batch = _batch(shape, table, query_lens, kv_lens)
    pools = _pools(shape, int(table.max(initial=0)) + 2, device)
    queries = []
    for i, seed in enumerate(seeds if seeds is not None else range(len(kv_lens))):
        q, k, v = (t.to(device) for t in _contents(shape, seed, kv_lens[i]))
        queries.append(q[kv_lens[i] - query_lens[i] :])
        slots = _slots(batch, i, first_visible[i]).to(device)
        write_kv(k, v, *pools, slots, kv_scales=options.get("kv_scales"))
        table[i, : first_visible[i] // shape.block_size] = -1
    return AttentionProblem(torch.cat(queries), *pools, batch, options)


def random_problem(
    shape: AttentionShape, query_lens: Sequence[int], kv_lens: Sequence[int], *, device: str
) -> AttentionProblem:
    """Make a step over pools full of random numbers: quick to make, for measuring large ones.

    Args:
        shape: the layer and the pool, of a floating-point type.
        query_lens: queries of each sequence.
        kv_lens: tokens of each sequence.
        device: where the tensors are.
    """
    table = _block_table(shape, kv_lens, "scattered")
    num_slots = (int(table.max(initial=0)) + 1) * shape.block_size
    k_pool, v_pool = (
        torch.randn(num_slots, shape.num_kv_heads, dim, dtype=shape.dtype, device=device)
        for dim in shape.kv_dims
    )
    q = torch.randn(
        sum(query_lens), shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device
    )
    batch = _batch(shape, table, query_lens, kv_lens)
    return AttentionProblem(q, k_pool, v_pool, batch, {"scale": shape.head_dim**-0.5})


def _batch(
    shape: AttentionShape,
    table: npt.NDArray[np.int32],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
) -> AttentionBatch:
    rows, queries_of_each, tokens_of_each = (
        np.asarray(lengths, np.int32) for lengths in (range(len(kv_lens)), query_lens, kv_lens)
    )
    return AttentionBatch(table, rows, queries_of_each, tokens_of_each, shape.block_size)


def _first_visible(query_lens: Sequence[int], kv_lens: Sequence[int], window: int) -> list[int]:
    """The first position that each sequence's queries still see."""
    if not window:
        return [0] * len(kv_lens)
    return [max(0, n - q - window + 1) for q, n in zip(query_lens, kv_lens, strict=True)]


def _block_table(
    shape: AttentionShape, kv_lens: Sequence[int], placement: Placement
) -> npt.NDArray[np.int32]:
    """`int32[S, W]`, -1 behind the last block of a sequence."""
    counts = [-(-n // shape.block_size) for n in kv_lens]
    blocks = _placed(sum(counts), placement)
    table = np.full((len(counts), max(counts) + 1), -1, np.int32)
    for row, blocks_of_row in zip(table, np.split(blocks, np.cumsum(counts)[:-1]), strict=True):
        row[: len(blocks_of_row)] = blocks_of_row
    return table


def _placed(num_blocks: int, placement: Placement) -> npt.NDArray[np.int64]:
    """The physical blocks of all logical blocks, in order."""
    if placement == "contiguous":
        return np.arange(num_blocks)
    extent = 4 if placement == "extents" else 1
    extents = np.random.default_rng(num_blocks).permutation(-(-num_blocks // extent))
    return (extents[:, None] * extent + np.arange(extent)).reshape(-1)[:num_blocks]


def _pools(
    shape: AttentionShape, num_blocks: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pools of NaN, or of the largest number where a type has no NaN."""
    dtype = shape.kv_dtype or shape.dtype
    nothing = 127.0 if dtype == torch.int8 else float("nan")
    num_slots = num_blocks * shape.block_size
    k_pool, v_pool = (
        torch.full((num_slots, shape.num_kv_heads, dim), nothing).to(device, dtype)
        for dim in shape.kv_dims
    )
    return k_pool, v_pool


def _contents(
    shape: AttentionShape, seed: int, kv_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V of all tokens of a sequence."""
    generator = torch.Generator().manual_seed(seed)
    head_dim, value_dim = shape.kv_dims
    sizes = ((shape.num_heads, head_dim), (shape.num_kv_heads, head_dim))
    q, k = (torch.randn(kv_len, *size, generator=generator) for size in sizes)
    v = torch.randn(kv_len, shape.num_kv_heads, value_dim, generator=generator)
    return q.to(shape.dtype), k.to(shape.dtype), v.to(shape.dtype)


def _slots(batch: AttentionBatch, i: int, first_visible: int) -> torch.Tensor:
    """`int64[N]`: the slot of each token of a sequence, -1 for the evicted ones."""
    positions = np.arange(batch.kv_lens[i])
    blocks = batch.block_table[i, positions // batch.block_size].astype(np.int64)
    slots = blocks * batch.block_size + positions % batch.block_size
    return torch.from_numpy(np.where(positions >= first_visible, slots, -1))
