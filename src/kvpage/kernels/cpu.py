"""Paged attention on the CPU, compiled by numba and run on torch's own threads."""

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvpage.kernels import AttentionOptions, cpu_rows, cpu_threads
from kvpage.kernels.cpu_kernel import STORED_AS, Job, kernel
from kvpage.kernels.cpu_layer import Attention, LayerRun, Pools
from kvpage.kernels.cpu_plan import Plan, Shape, plan_step
from kvpage.kernels.quantisation import quantised
from kvpage.kernels.work import AttentionBatch

JOB = np.dtype(Job)


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
    """Causal attention over the cached K and V; `reference.paged_attention` says what it computes.

    Computes in float32. Two Python threads may call it at once. The GIL is free meanwhile.

    Raises:
        ValueError: the pools are quantised, of two types, or not contiguous within a head; or the
            shapes do not belong together.
    """
    _check_scales(k_pool, v_pool, kv_scales)
    queries = _with_whole_heads(q.float())
    result = out if out is not None and _is_writable(out) else _new_output(q, v_pool)
    # Layers of one step that look alike share a plan, and what it takes to check and lay it out.
    key = (*map(_layout, (queries, k_pool, v_pool, result)), *_key(window))
    plan = batch.planned(key, lambda: _plan(batch, queries, k_pool, v_pool, result, key))
    per_head = [None if x is None else x.float().contiguous() for x in (sinks, alibi_slopes)]
    job = plan.job
    job.q, job.k, job.v, job.out = (x.data_ptr() for x in (queries, k_pool, v_pool, result))
    job.sinks, job.alibi_slopes = (0 if x is None else x.data_ptr() for x in per_head)
    job.scale, job.softcap = scale, softcap
    plan.counters.fill(0)
    cpu_threads.run(
        kernel(k_pool.dtype).address,
        ctypes.addressof(job),
        1 if job.num_items == 1 else torch.get_num_threads(),
    )
    if out is None:
        return result if q.dtype == torch.float32 else result.to(q.dtype)
    return out if result is out else out.copy_(result)


def compute_layers(
    run: LayerRun,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pools: Sequence[Pools],
    batch: AttentionBatch,
    slots: torch.Tensor,
    options: Sequence[AttentionOptions],
) -> torch.Tensor | None:
    """Decoder layers in one call: `write_kv` and `paged_attention` within a `LayerRun`.

    Args:
        run: the layers.
        x: `float32[T, hidden]`, contiguous.
        cos: `float32[T, R]`, of positions, contiguous; both halves of it.
        sin: likewise.
        pools: of each layer; written.
        batch: the step.
        slots: `int64[T]`, where K and V go.
        options: of each layer, the same in every call.

    Returns:
        `float32[T, hidden]`; None if the pools are of a kind that it does not write.
    """
    stored: _Stored = run.of_pools(pools, lambda: _Stored.of(pools, options))
    if stored.dtype is None:
        return None
    tensors = run.between(x.shape[0])
    jobs, _counters = stored.jobs(pools, batch, *tensors)
    attention = Attention(
        kernel(stored.dtype).address,
        jobs.ctypes.data + np.arange(len(jobs)) * jobs.itemsize,
        jobs["num_items"],
    )
    return run.compute(x, cos, sin, pools, slots.contiguous(), attention)


@attrs.frozen(eq=False)
class _Stored:
    """What the attention of layers depends on beside the step. Belongs to one thread.

    Attributes:
        dtype: of the pools; None if they are of a kind that is not written.
        k: `int64[layers]`, where the pools are.
        v: likewise.
        sinks: likewise; 0 if a layer has none.
        options: of each layer.
        groups: numbers of the layers that can share a plan.
        kept: what must stay alive.
    """

    dtype: torch.dtype | None
    k: npt.NDArray[np.int64]
    v: npt.NDArray[np.int64]
    sinks: npt.NDArray[np.int64]
    options: Sequence[AttentionOptions]
    groups: Sequence[list[int]]
    kept: Sequence[torch.Tensor | None]

    @classmethod
    def of(cls, pools: Sequence[Pools], options: Sequence[AttentionOptions]) -> "_Stored":
        dtypes = {pool.dtype for each in pools for pool in each}
        written = all(cpu_rows.is_writable(pool) for each in pools for pool in each)
        alike: dict[Any, list[int]] = {}
        for i, (each, option) in enumerate(zip(pools, options, strict=True)):
            alike.setdefault((*map(_layout, each), option.window), []).append(i)
        sinks = [None if o.sinks is None else o.sinks.float().contiguous() for o in options]
        k, v = (np.array([each.data_ptr() for each in side]) for side in zip(*pools, strict=True))
        return cls(
            dtype=dtypes.pop() if written and len(dtypes) == 1 else None,
            k=k, v=v,
            sinks=np.array([0 if each is None else each.data_ptr() for each in sinks]),
            options=options, groups=tuple(alike.values()), kept=sinks,
        )  # fmt: skip

    def jobs(
        self, pools: Sequence[Pools], batch: AttentionBatch, q: torch.Tensor, out: torch.Tensor
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """The fields of `Job` for each layer, and counters, which must live as long."""
        jobs = np.empty(len(pools), JOB)
        longest = 0
        for group in self.groups:
            (k_pool, v_pool), window = pools[group[0]], self.options[group[0]].window
            key = (*map(_layout, (q, k_pool, v_pool, out)), *_key(window))
            build = functools.partial(_plan, batch, q, k_pool, v_pool, out, key)
            plan = batch.planned(key, build)
            jobs[group] = np.frombuffer(memoryview(plan.job), JOB)
            longest = max(longest, len(plan.counters))
        counters = np.zeros((len(jobs), longest), np.int64)
        jobs["counters"] = counters.ctypes.data + np.arange(len(jobs)) * counters.strides[0]
        jobs["q"], jobs["out"] = q.data_ptr(), out.data_ptr()
        jobs["k"], jobs["v"], jobs["sinks"], jobs["alibi_slopes"] = self.k, self.v, self.sinks, 0
        jobs["scale"] = [each.scale for each in self.options]
        jobs["softcap"] = [each.softcap for each in self.options]
        return jobs, counters


def _key(window: int) -> tuple[int, int, int]:
    """Of a plan, beside its layouts."""
    return window, torch.get_num_threads(), threading.get_ident()


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype


def _plan(
    batch: AttentionBatch,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    key: tuple[Any, ...],
) -> Plan:
    """The items of a step for layers of one layout; a plan for each layout and thread.

    Raises:
        ValueError: the shapes do not belong together.
    """
    _check_shapes(q, k_pool, v_pool, batch, out)
    window, threads, ident = key[-3:]
    heads = (q.shape[1], k_pool.shape[1], q.shape[2], v_pool.shape[2])
    plan = plan_step(batch, Shape(*heads, window, threads, ident))
    _set_strides(plan.job, q, k_pool, v_pool, out)
    return plan


def _check_scales(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    if k_pool.dtype not in STORED_AS or k_pool.dtype != v_pool.dtype or kv_scales is not None:
        scales = "with" if kv_scales is not None else "without"
        raise ValueError(
            "the CPU kernel reads K and V pools of one type, float32, bfloat16 or float16, without "
            f"scales; these are {k_pool.dtype} and {v_pool.dtype} {scales} scales"
        )


def _check_shapes(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: AttentionBatch,
    out: torch.Tensor,
) -> None:
    """Refuse what would make the kernel read or write where it must not."""
    if k_pool.stride(2) != 1 or v_pool.stride(2) != 1:
        raise ValueError(
            "the numbers of a head must be adjacent in the pools; they are "
            f"{k_pool.stride(2)} apart in K and {v_pool.stride(2)} in V"
        )
    num_tokens, query_heads, k_dims = q.shape
    slots, kv_heads, v_dims = v_pool.shape
    wanted = (num_tokens, query_heads, v_dims)
    if (
        k_pool.shape != (slots, kv_heads, k_dims)
        or query_heads % kv_heads
        or num_tokens != batch.num_tokens
        or out.shape != wanted
    ):
        raise ValueError(
            f"a batch of {batch.num_tokens} queries, q of {tuple(q.shape)}, pools of "
            f"{tuple(k_pool.shape)} and {tuple(v_pool.shape)} and an output of {wanted} do not "
            "belong together"
        )


def _with_whole_heads(q: torch.Tensor) -> torch.Tensor:
    return q if q.stride(2) == 1 else q.contiguous()


def _is_writable(out: torch.Tensor) -> bool:
    """Whether the kernel can write the output where it shall be."""
    return out.dtype == torch.float32 and out.stride(2) == 1


def _new_output(q: torch.Tensor, v_pool: torch.Tensor) -> torch.Tensor:
    return torch.empty(q.shape[0], q.shape[1], v_pool.shape[2], dtype=torch.float32)


def _set_strides(
    job: Job, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, out: torch.Tensor
) -> None:
    stored_bytes = k_pool.element_size()
    job.k_slot_bytes = k_pool.stride(0) * stored_bytes
    job.k_head_bytes = k_pool.stride(1) * stored_bytes
    job.v_slot_bytes = v_pool.stride(0) * stored_bytes
    job.v_head_bytes = v_pool.stride(1) * stored_bytes
    job.q_token_bytes, job.q_head_bytes = q.stride(0) * 4, q.stride(1) * 4
    job.out_token_bytes, job.out_head_bytes = out.stride(0) * 4, out.stride(1) * 4


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Store the K and V of a step's tokens; see `reference.write_kv`."""
    stored = ((k, k_pool), (v, v_pool))
    if kv_scales is None and all(cpu_rows.can_write(*each) for each in stored):
        cpu_rows.write(stored, slots)
        return
    kept = slots >= 0
    for (rows, pool), scales in zip(stored, kv_scales or (None, None), strict=True):
        pool.index_copy_(0, slots[kept], quantised(rows[kept], pool.dtype, scales))


def copy_blocks(
    k_pool: torch.Tensor, v_pool: torch.Tensor, copies: torch.Tensor, *, block_size: int
) -> None:
    """Copy whole blocks inside pools; see `reference.copy_blocks`."""
    sources, destinations = copies.unbind(1)
    for pool in (k_pool, v_pool):
        num_blocks = len(pool) // block_size
        blocks = pool[: num_blocks * block_size].view(num_blocks, block_size, *pool.shape[1:])
        blocks.index_copy_(0, destinations, blocks[sources])
