"""Paged attention on the CPU: cutting a step into the items that threads take.

What items are is told in `cpu_kernel`.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import attrs
import numba
import numpy as np
import numpy.typing as npt

from kvpage.kernels.cpu_kernel import (
    ITEM,
    MERGE,
    PART_KEYS,
    PARTS_DONE,
    TILE_KEYS,
    TILE_STATE_LINES,
    Job,
    cached,
)
from kvpage.kernels.simd import FAR_AHEAD, LANES, QUERY_LANES
from kvpage.kernels.work import AttentionBatch

_compiled = functools.partial(numba.njit, error_model="numpy")

# From how many queries on a sequence is cut into tiles rather than rows.
TILE_QUERIES = 3


@attrs.frozen(eq=False)
class Plan:
    """The items of a step and the memory to compute them in, for all layers of one shape."""

    job: Job
    counters: npt.NDArray[np.int64]
    # What `job` has the addresses of.
    memory: tuple[npt.NDArray[Any], ...]


@_compiled
def _cut_items(
    rows: Any, query_lens: Any, kv_lens: Any, group: int, kv_heads: int, window: int,
    items: Any, merges: Any,
) -> tuple[int, int, int]:  # fmt: skip
    """Write the items and merges of a step; how many items, merges and partials there are.

    Tiles come first, and of a sequence the last ones: those that take longest.
    """
    num_items = num_merges = num_partials = token = 0
    for i in range(len(rows)):
        if query_lens[i] >= TILE_QUERIES:
            position = kv_lens[i] - query_lens[i]
            pairs = query_lens[i] * group
            for first in range((pairs - 1) // QUERY_LANES * QUERY_LANES, -1, -QUERY_LANES):
                last = min(first + QUERY_LANES, pairs)
                for head in range(kv_heads):
                    item = items[num_items]
                    item.row, item.token, item.position = rows[i], token, position
                    item.begin = max(0, position + first // group - window + 1) if window else 0
                    item.end = position + (last - 1) // group + 1
                    item.head, item.first, item.last = head, first, last
                    num_items += 1
        token += query_lens[i]
    token = 0
    for i in range(len(rows)):
        for j in range(query_lens[i] if query_lens[i] < TILE_QUERIES else 0):
            end = kv_lens[i] - query_lens[i] + j + 1
            begin = max(0, end - window) if window else 0
            first_part, last_part = begin // PART_KEYS, (end - 1) // PART_KEYS
            split = last_part > first_part
            if split:
                merge = merges[num_merges]
                merge.token, merge.first = token + j, num_partials
                merge.count = last_part - first_part + 1
            for part in range(first_part, last_part + 1):
                item = items[num_items]
                item.row, item.token, item.position = rows[i], token + j, end - 1
                item.begin = max(begin, part * PART_KEYS)
                item.end = min(end, (part + 1) * PART_KEYS)
                item.head = -1
                item.first, item.last = (num_partials, num_merges) if split else (-1, -1)
                num_items += 1
                num_partials += split
            num_merges += split
        token += query_lens[i]
    return num_items, num_merges, num_partials


@functools.cache
def planner() -> Callable[..., tuple[int, int, int]]:
    """`_cut_items`, compiled or loaded from numba's cache."""
    lengths = numba.types.int32[::1]
    items, merges = (numba.types.Array(numba.from_dtype(d), 1, "C") for d in (ITEM, MERGE))
    signature = (*[lengths] * 3, *[numba.types.int64] * 3, items, merges)
    # numba's cache knows of this file and of what this closure holds: name the constants of others.
    constants = (PART_KEYS, QUERY_LANES)

    def plan_items(
        rows: Any, query_lens: Any, kv_lens: Any, group: int, kv_heads: int, window: int,
        items: Any, merges: Any,
    ) -> tuple[int, int, int]:  # fmt: skip
        _ = constants
        numbers: tuple[int, int, int] = _cut_items(
            rows, query_lens, kv_lens, group, kv_heads, window, items, merges
        )
        return numbers

    compiled = cached(functools.partial(numba.njit, signature, nogil=True), plan_items)
    return cast(Callable[..., tuple[int, int, int]], compiled)


@attrs.frozen
class Shape:
    """What a plan depends on beside its batch. Threads never share one: it is also scratch."""

    query_heads: int
    kv_heads: int
    k_dims: int
    v_dims: int
    window: int
    num_threads: int
    python_thread: int


def plan_step(batch: AttentionBatch, shape: Shape) -> Plan:
    """Cut a step into items; the tensors of a layer are still missing in the job."""
    items, merges, num_partials = _cut(batch, shape)
    partial_bytes, scratch_bytes = _scratch_bytes(shape)
    counters = np.zeros(PARTS_DONE + len(merges), np.int64)
    # One cache line more than needed: numpy aligns to 16 bytes.
    partials = np.empty(num_partials * partial_bytes + 64, np.uint8)
    scratch = np.empty(shape.num_threads * scratch_bytes + 64, np.uint8)
    table = batch.block_table
    if table.strides[1] != table.itemsize:
        table = np.ascontiguousarray(table)
    job = Job(
        window=shape.window, table=table.ctypes.data, table_row_bytes=table.strides[0],
        block_size=batch.block_size, query_heads=shape.query_heads, kv_heads=shape.kv_heads,
        k_dims=shape.k_dims, v_dims=shape.v_dims, items=items.ctypes.data, num_items=len(items),
        merges=merges.ctypes.data, counters=counters.ctypes.data,
        partials=_aligned(partials), partial_bytes=partial_bytes,
        scratch=_aligned(scratch), scratch_bytes=scratch_bytes,
    )  # fmt: skip
    return Plan(job, counters, (items, merges, partials, scratch, table))


def _cut(batch: AttentionBatch, shape: Shape) -> tuple[npt.NDArray[Any], npt.NDArray[Any], int]:
    """The items and merges of a step, and how many partials they write."""
    group = shape.query_heads // shape.kv_heads
    tiles = int((-(-batch.query_lens * group // QUERY_LANES)).sum()) * shape.kv_heads
    rows = int((batch.kv_lens // PART_KEYS + 2).sum()) * (TILE_QUERIES - 1)
    items = np.empty(tiles + rows, ITEM)
    merges = np.empty(len(batch.rows) * (TILE_QUERIES - 1), MERGE)
    # Copies, since numba would compile once more for a view or a read-only array.
    lengths = (np.array(x, np.int32) for x in (batch.rows, batch.query_lens, batch.kv_lens))
    num_items, num_merges, num_partials = planner()(
        *lengths, group, shape.kv_heads, shape.window, items, merges
    )
    return items[:num_items], merges[:num_merges], num_partials


def _scratch_bytes(shape: Shape) -> tuple[int, int]:
    """Bytes of a partial and of a thread's scratch; see `_attend_row` and `_attend_tile`."""
    k_width, v_width = (-(-dims // LANES) * LANES for dims in (shape.k_dims, shape.v_dims))
    partial = -(-shape.query_heads * (v_width + 2) * 4 // 64) * 64
    row = (2 * PART_KEYS + FAR_AHEAD) * 8 + shape.query_heads * (PART_KEYS + k_width) * 4 + partial
    lines = TILE_STATE_LINES + TILE_KEYS + shape.k_dims + shape.v_dims
    tile = 2 * TILE_KEYS * 8 + lines * QUERY_LANES * 4
    return partial, -(-max(row, tile) // 64) * 64


def _aligned(memory: npt.NDArray[np.uint8]) -> int:
    return int(-(-memory.ctypes.data // 64) * 64)
