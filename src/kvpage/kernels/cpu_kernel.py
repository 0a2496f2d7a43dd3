"""The inside of paged attention on the CPU, compiled by numba.

Dims: T query tokens of a step, Hq query heads, Hkv KV heads, G = Hq / Hkv heads of a group,
D and Dv head dims of K and V.

A step is cut into items that any thread may take, and an item into tiles of keys at fixed
positions. Two kinds of item, since decoding waits for memory and prefill for arithmetic:

* A *row* is one query and at most `PART_KEYS` keys, all heads. Vector lanes run along the head
  dim, and each K and V of a token is read once, whole, for every head. Longer sequences take
  several rows, whose results the thread that ends last merges in order.
* A *tile* is up to `QUERY_LANES` pairs of (query, head of one group) and all keys they see.
  Vector lanes run along the pairs, so that K and V are used where they lie, number by number,
  and the softmax needs no sum across lanes.

What is computed for a query depends on its own sequence alone: neither on the rest of the batch,
nor on which blocks hold the keys, nor on the number of threads, to the last bit.
"""

import ctypes
import functools
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch

from kvpage.kernels import simd
from kvpage.kernels.simd import (
    CACHE_LINE_BYTES,
    FAR_AHEAD,
    KEYS_AT_ONCE,
    LANES,
    QUERY_LANES,
    TILE_ROWS,
    TILE_VECTORS,
    VALUE_VECTORS,
    add_atomically,
    add_values_narrow,
    add_values_narrow_1,
    add_values_wide,
    add_values_wide_1,
    dot_products,
    exp,
    lane_numbers,
    largest_lane,
    load,
    magnitude,
    maximum,
    prefetch,
    scores_narrow,
    scores_wide,
    select_less,
    splat,
    store,
    sum_of_lanes,
    typed_pointer,
    weighted_rows,
)

PART_KEYS = 256
TILE_KEYS = 64
WIDE = TILE_VECTORS * LANES
SUMMED_KEYS = 16
HIDDEN = np.float32(-np.inf)
# Where a maximum starts: finite, so that hidden minus maximum is -inf and never NaN.
LOWEST = np.float32(-1e30)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Job(ctypes.Structure):
    """What the threads of one call read. Names without a unit are addresses; 0 means absent."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "q", "q_token_bytes", "q_head_bytes",
                "k", "k_slot_bytes", "k_head_bytes",
                "v", "v_slot_bytes", "v_head_bytes",
                "out", "out_token_bytes", "out_head_bytes",
                "sinks", "alibi_slopes", "window",
                "table", "table_row_bytes", "block_size",
                "query_heads", "kv_heads", "k_dims", "v_dims",
                "items", "num_items", "merges", "counters",
                "partials", "partial_bytes", "scratch", "scratch_bytes",
            )
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]  # fmt: skip


ITEM = np.dtype(
    [
        (name, np.int64)
        for name in (
            "row",  # of the block table
            "token",  # of the query; in a tile, of the first query of its sequence
            "position",  # of that token
            "begin",  # keys: first
            "end",  # keys: after the last
            "head",  # of K and V; -1 in a row
            "first",  # pair of a tile; in a row, the partial it writes, or -1
            "last",  # after the last pair of a tile; in a row, its merge
        )
    ]
)
MERGE = np.dtype([(name, np.int64) for name in ("token", "first", "count")])

_item_pointer = typed_pointer(numba.from_dtype(ITEM))
_merge_pointer = typed_pointer(numba.from_dtype(MERGE))
_int32_pointer = typed_pointer(numba.types.int32)
_int64_pointer = typed_pointer(numba.types.int64)
_float_pointer = typed_pointer(numba.types.float32)


def _compiled(function: FunctionT) -> FunctionT:
    """Make a function a part of the kernel, compiled when the kernel is."""
    return cast(FunctionT, numba.njit(error_model="numpy")(function))


@_compiled
def _floats(address: int, count: int) -> Any:
    return numba.carray(_float_pointer(address), count)


@_compiled
def _padded(count: int, step: int) -> int:
    return (count + step - 1) // step * step


@_compiled
def _locate(
    job: Any, row: int, first: int, count: int, begin: int, end: int, k_rows: int, v_rows: int
) -> None:
    """Write the addresses of the K and V of `count` positions; those outside repeat the nearest."""
    table = numba.carray(
        _int32_pointer(job.table + row * job.table_row_bytes), (end - 1) // job.block_size + 1
    )
    k_addresses = numba.carray(_int64_pointer(k_rows), count)
    v_addresses = numba.carray(_int64_pointer(v_rows), count)
    for i in range(count):
        position = min(max(first + i, begin), end - 1)
        block = position // job.block_size
        slot = np.int64(table[block]) * job.block_size + (position - block * job.block_size)
        k_addresses[i] = job.k + slot * job.k_slot_bytes
        v_addresses[i] = job.v + slot * job.v_slot_bytes


@_compiled
def _capped(scores: Any, softcap: Any) -> Any:
    """`softcap * tanh(scores / softcap)`, from an exponential that cannot overflow."""
    x = scores / splat(softcap)
    decay = exp(splat(np.float32(-2)) * magnitude(x))
    one = splat(np.float32(1))
    tanh = (one - decay) / (one + decay)
    zero = splat(np.float32(0))
    return splat(softcap) * select_less(x, zero, zero - tanh, tanh)


# -- rows: one query, all heads ----------------------------------------------------------------


@_compiled
def _attend_row(job: Any, item: Any, scratch: int, pool: Any) -> None:
    start = item.begin - item.begin % LANES
    count = _padded(item.end - start, LANES)
    k_rows = scratch
    # V follows at once, so that what is asked for ahead of the last K is the first V.
    v_rows = k_rows + count * 8
    scores = k_rows + (2 * PART_KEYS + FAR_AHEAD) * 8
    q = scores + job.query_heads * PART_KEYS * 4
    partial = q + job.query_heads * _padded(job.k_dims, LANES) * 4
    if item.first >= 0:
        partial = job.partials + item.first * job.partial_bytes
    _locate(job, item.row, start, count, item.begin, item.end, k_rows, v_rows)
    _copy_query(job, item.token, q)
    _score_row(job, count, k_rows, q, scores, pool)
    _weigh_row(job, item, start, count, scores, partial)
    _sum_row(job, item, start, count, v_rows, scores, partial, pool)
    if item.first < 0:
        _merge(job, item.token, partial, 1)
        return
    merge = numba.carray(_merge_pointer(job.merges), item.last + 1)[item.last]
    done = add_atomically(job.counters + (PARTS_DONE + item.last) * 8, 1)
    if done == merge.count - 1:
        _merge(job, merge.token, job.partials + merge.first * job.partial_bytes, merge.count)


@_compiled
def _copy_query(job: Any, token: int, to: int) -> None:
    """Lay the heads of one query side by side, scaled, each padded with zeros."""
    width = _padded(job.k_dims, LANES)
    for h in range(job.query_heads):
        source = _floats(job.q + token * job.q_token_bytes + h * job.q_head_bytes, job.k_dims)
        copy = _floats(to + h * width * 4, width)
        for d in range(job.k_dims):
            copy[d] = source[d] * job.scale
        for d in range(job.k_dims, width):
            copy[d] = 0


_dots_1, _dots_2, _dots_3 = map(dot_products, (1, 2, 3))


def _weighted(vectors: int) -> Callable[..., Any]:
    """`weighted_rows` of so many vectors for 1 to 3 heads, which are its first argument."""
    add_1, add_2, add_3 = (weighted_rows(heads, vectors) for heads in (1, 2, 3))

    def add(
        heads: int, weights: int, weights_bytes: int, rows: int, count: int, offset: int,
        dims: int, to: int, to_bytes: int, together: int, pool: Any,
    ) -> None:  # fmt: skip
        if heads == 3:
            add_3(weights, weights_bytes, rows, count, offset, dims, to, to_bytes, together, pool)
        elif heads == 2:
            add_2(weights, weights_bytes, rows, count, offset, dims, to, to_bytes, together, pool)
        else:
            add_1(weights, weights_bytes, rows, count, offset, dims, to, to_bytes, together, pool)

    return _compiled(add)


_add_wide, _add_narrow = _weighted(VALUE_VECTORS), _weighted(1)


@_compiled
def _heads_at_once(left: int) -> int:
    """Query heads of a group that share what is loaded of K and V: as many as registers allow."""
    return 3 if left == 3 or left > 4 else min(left, 2)


@_compiled
def _together(job: Any, most: int) -> int:
    """How many keys, from a multiple of it on, lie in one block: a power of two, up to `most`."""
    together: int = min(job.block_size & -job.block_size, most)
    return together


@_compiled
def _score_row(job: Any, count: int, k_rows: int, q: int, scores: int, pool: Any) -> None:
    """float32[query_heads, PART_KEYS]: the dot products with `count` keys."""
    group = job.query_heads // job.kv_heads
    q_bytes, to_bytes = _padded(job.k_dims, LANES) * 4, PART_KEYS * 4
    together = _together(job, KEYS_AT_ONCE)
    for i in range(0, count, KEYS_AT_ONCE):
        for h in range(job.kv_heads):
            rows, offset, dims = k_rows + i * 8, h * job.k_head_bytes, job.k_dims
            g, end = h * group, h * group + group
            while g < end:
                heads = _heads_at_once(end - g)
                first, to = q + g * q_bytes, scores + (g * PART_KEYS + i) * 4
                if heads == 3:
                    _dots_3(first, q_bytes, rows, offset, dims, to, to_bytes, together, pool)
                elif heads == 2:
                    _dots_2(first, q_bytes, rows, offset, dims, to, to_bytes, together, pool)
                else:
                    _dots_1(first, q_bytes, rows, offset, dims, to, to_bytes, together, pool)
                g += heads


@_compiled
def _weigh_row(job: Any, item: Any, start: int, count: int, scores: int, partial: int) -> None:
    """Turn scores into weights, and note their maximum and sum behind the partial's values."""
    maxima = _floats(_maxima(job, partial), job.query_heads)
    sums = _floats(_maxima(job, partial) + job.query_heads * 4, job.query_heads)
    for h in range(job.query_heads):
        line = scores + h * PART_KEYS * 4
        highest = splat(LOWEST)
        for i in range(0, count, LANES):
            shaped = _shape_row(job, item, h, start + i, load(line + i * 4))
            store(line + i * 4, shaped)
            highest = maximum(shaped, highest)
        maxima[h] = largest_lane(highest)
        total = splat(np.float32(0))
        for i in range(0, count, LANES):
            weights = exp(load(line + i * 4) - splat(maxima[h]))
            store(line + i * 4, weights)
            total = total + weights
        sums[h] = sum_of_lanes(total)


@_compiled
def _shape_row(job: Any, item: Any, head: int, position: int, scores: Any) -> Any:
    """Cap, bias and mask the scores of `LANES` keys from a position on."""
    if job.softcap > 0:
        scores = _capped(scores, job.softcap)
    if job.alibi_slopes:
        slope = _floats(job.alibi_slopes, job.query_heads)[head]
        distance = splat(np.float32(item.position - position)) - lane_numbers()
        scores = scores - splat(slope) * distance
    if position < item.begin or position + LANES > item.end:
        hidden = splat(HIDDEN)
        first, last = np.float32(item.begin - position), np.float32(item.end - position)
        scores = select_less(lane_numbers(), splat(first), hidden, scores)
        scores = select_less(lane_numbers(), splat(last), scores, hidden)
    return scores


@_compiled
def _sum_row(
    job: Any, item: Any, start: int, count: int, v_rows: int, scores: int, partial: int, pool: Any
) -> None:
    """float32[query_heads, v_dims]: the sums of the values, each times its weight."""
    group = job.query_heads // job.kv_heads
    row_bytes, together = _padded(job.v_dims, LANES) * 4, _together(job, SUMMED_KEYS)
    _floats(partial, job.query_heads * row_bytes // 4)[:] = 0
    for tile in range(start, start + count, SUMMED_KEYS):
        first, last = max(tile, item.begin), min(tile + SUMMED_KEYS, item.end)
        rows = v_rows + (first - start) * 8
        for h in range(job.kv_heads):
            g, end = h * group, h * group + group
            while g < end:
                heads = _heads_at_once(end - g)
                weights = scores + (g * PART_KEYS + first - start) * 4
                _sum_heads(
                    heads, weights, rows, last - first, h * job.v_head_bytes, job.v_dims,
                    partial + g * row_bytes, row_bytes, together, pool,
                )  # fmt: skip
                g += heads


@_compiled
def _sum_heads(
    heads: int, weights: int, rows: int, count: int, offset: int, dims: int, to: int,
    to_bytes: int, together: int, pool: Any,
) -> None:  # fmt: skip
    step, d = PART_KEYS * 4, 0
    while d < dims:
        at, place, left = offset + d * _stored_bytes(pool), to + d * 4, dims - d
        if left >= VALUE_VECTORS * LANES:
            _add_wide(heads, weights, step, rows, count, at, left, place, to_bytes, together, pool)
            d += VALUE_VECTORS * LANES
        else:
            _add_narrow(
                heads, weights, step, rows, count, at, left, place, to_bytes, together, pool
            )
            d += LANES


@_compiled
def _stored_bytes(pool: Any) -> int:
    return int(np.array(pool).itemsize)


@_compiled
def _maxima(job: Any, partial: int) -> int:
    """A partial is float32[query_heads, v_dims padded], then their maxima, then their sums."""
    values_bytes: int = job.query_heads * _padded(job.v_dims, LANES) * 4
    return partial + values_bytes


@_compiled
def _merge(job: Any, token: int, partials: int, count: int) -> None:
    """Write one token's output from the partials of its parts, in order."""
    width = _padded(job.v_dims, LANES)
    for h in range(job.query_heads):
        highest = LOWEST
        if job.sinks:
            highest = _floats(job.sinks, job.query_heads)[h]
        for i in range(count):
            highest = max(
                highest, _floats(_maxima(job, partials + i * job.partial_bytes), h + 1)[h]
            )
        total = np.float32(0)
        if job.sinks:
            total += math.exp(_floats(job.sinks, job.query_heads)[h] - highest)
        for i in range(count):
            maxima = _floats(_maxima(job, partials + i * job.partial_bytes), 2 * job.query_heads)
            total += math.exp(maxima[h] - highest) * maxima[job.query_heads + h]
        out = _floats(job.out + token * job.out_token_bytes + h * job.out_head_bytes, job.v_dims)
        out[:] = 0
        for i in range(count):
            partial = partials + i * job.partial_bytes
            share = math.exp(_floats(_maxima(job, partial), h + 1)[h] - highest) / total
            values = _floats(partial + h * width * 4, job.v_dims)
            for d in range(job.v_dims):
                out[d] += share * values[d]


# -- tiles: many queries, one KV head -----------------------------------------------------------


@_compiled
def _attend_tile(job: Any, item: Any, scratch: int, pool: Any) -> None:
    line_bytes = QUERY_LANES * 4
    k_rows = scratch
    v_rows = k_rows + TILE_KEYS * 8
    state = v_rows + TILE_KEYS * 8
    scores = state + TILE_STATE_LINES * line_bytes
    q = scores + TILE_KEYS * line_bytes
    values = q + job.k_dims * line_bytes
    _pack_queries(job, item, q)
    _start_tile(job, item, state, values)
    for start in range(item.begin - item.begin % TILE_KEYS, item.end, TILE_KEYS):
        first, last = max(start, item.begin), min(start + TILE_KEYS, item.end)
        _locate(job, item.row, first, _padded(last - first, TILE_ROWS), first, last, k_rows, v_rows)
        _prefetch_rows(k_rows, last - first, item.head * job.k_head_bytes, job.k_head_bytes)
        _prefetch_rows(v_rows, last - first, item.head * job.v_head_bytes, job.v_head_bytes)
        _score_tile(job, item, last - first, k_rows, q, scores, pool)
        for lane in range(0, item.last - item.first, LANES):
            _weigh_tile(job, item, first, last, state + lane * 4, scores + lane * 4)
        _sum_tile(job, item, last - first, v_rows, scores, state, values, pool)
    _end_tile(job, item, state, values)


@_compiled
def _prefetch_rows(rows: int, count: int, offset: int, head_bytes: int) -> None:
    """Ask for one head of `count` rows of a pool."""
    addresses = numba.carray(_int64_pointer(rows), count)
    for i in range(count):
        for at in range(offset, offset + head_bytes, CACHE_LINE_BYTES):
            prefetch(addresses[i] + at)


# The lines of a tile's state, float32[QUERY_LANES] each.
TILE_STATE_LINES = 6
MAXIMUM, SUM, FADED, QUERY, SLOPE, SINK = range(TILE_STATE_LINES)


@_compiled
def _pack_queries(job: Any, item: Any, q: int) -> None:
    """float32[k_dims, QUERY_LANES]: the scaled queries, a pair to a lane."""
    group = job.query_heads // job.kv_heads
    packed = _floats(q, job.k_dims * QUERY_LANES)
    packed[:] = 0
    for pair in range(item.first, item.last):
        token, head = item.token + pair // group, item.head * group + pair % group
        source = _floats(job.q + token * job.q_token_bytes + head * job.q_head_bytes, job.k_dims)
        for d in range(job.k_dims):
            packed[d * QUERY_LANES + pair - item.first] = source[d] * job.scale


@_compiled
def _start_tile(job: Any, item: Any, state: int, values: int) -> None:
    group = job.query_heads // job.kv_heads
    lines = _floats(state, TILE_STATE_LINES * QUERY_LANES)
    lines[:] = 0
    lines[MAXIMUM * QUERY_LANES : SUM * QUERY_LANES] = LOWEST
    _floats(values, job.v_dims * QUERY_LANES)[:] = 0
    for pair in range(item.first, item.last):
        lane, head = pair - item.first, item.head * group + pair % group
        lines[QUERY * QUERY_LANES + lane] = pair // group - item.first // group
        if job.alibi_slopes:
            lines[SLOPE * QUERY_LANES + lane] = _floats(job.alibi_slopes, head + 1)[head]
        if job.sinks:
            lines[SINK * QUERY_LANES + lane] = _floats(job.sinks, head + 1)[head]


@_compiled
def _is_wide(lanes: int) -> bool:
    """Whether so many lanes are worth a tile of full width."""
    return lanes > WIDE // 2


@_compiled
def _score_tile(
    job: Any, item: Any, count: int, k_rows: int, q: int, scores: int, pool: Any
) -> None:
    """float32[TILE_KEYS, QUERY_LANES]: the dot products."""
    offset = item.head * job.k_head_bytes
    lanes = item.last - item.first
    lane = 0
    while lane < lanes:
        for i in range(0, count, TILE_ROWS):
            to = scores + (i * QUERY_LANES + lane) * 4
            if _is_wide(lanes - lane):
                scores_wide(k_rows + i * 8, offset, job.k_dims, q + lane * 4, to, pool)
            else:
                scores_narrow(k_rows + i * 8, offset, job.k_dims, q + lane * 4, to, pool)
        lane += WIDE if _is_wide(lanes - lane) else LANES


@_compiled
def _weigh_tile(job: Any, item: Any, first: int, last: int, state: int, scores: int) -> None:
    """Turn the scores of `LANES` pairs into weights and renew their maxima and sums."""
    line_bytes = QUERY_LANES * 4
    group = job.query_heads // job.kv_heads
    position = item.position + item.first // group
    end = item.position + (item.last - 1) // group
    masked = last - 1 > position or (job.window > 0 and end - first >= job.window)
    query = load(state + QUERY * line_bytes)
    slope = load(state + SLOPE * line_bytes)
    hidden = splat(HIDDEN)
    before = load(state + MAXIMUM * line_bytes)
    highest = before
    for n in range(last - first):
        s = load(scores + n * line_bytes)
        if job.softcap > 0:
            s = _capped(s, job.softcap)
        distance = query + splat(np.float32(position - first - n))
        if job.alibi_slopes:
            s = s - slope * distance
        if masked:
            s = select_less(distance, splat(np.float32(0)), hidden, s)
            if job.window > 0:
                s = select_less(distance, splat(np.float32(job.window)), s, hidden)
        store(scores + n * line_bytes, s)
        highest = maximum(s, highest)
    faded = exp(before - highest)
    total = load(state + SUM * line_bytes) * faded
    for n in range(last - first):
        weights = exp(load(scores + n * line_bytes) - highest)
        store(scores + n * line_bytes, weights)
        total = total + weights
    store(state + MAXIMUM * line_bytes, highest)
    store(state + SUM * line_bytes, total)
    store(state + FADED * line_bytes, faded)


@_compiled
def _sum_tile(
    job: Any, item: Any, count: int, v_rows: int, weights: int, state: int, values: int, pool: Any
) -> None:
    """float32[v_dims, QUERY_LANES]: add the values, each times its weight."""
    lanes = item.last - item.first
    faded = state + FADED * QUERY_LANES * 4
    lane = 0
    while lane < lanes:
        at = lane * 4
        wide = _is_wide(lanes - lane)
        d = 0
        while d < job.v_dims:
            offset = item.head * job.v_head_bytes + d * _stored_bytes(pool)
            to = values + d * QUERY_LANES * 4 + at
            if d + TILE_ROWS <= job.v_dims:
                if wide:
                    add_values_wide(weights + at, v_rows, count, offset, faded + at, to, pool)
                else:
                    add_values_narrow(weights + at, v_rows, count, offset, faded + at, to, pool)
                d += TILE_ROWS
            else:
                if wide:
                    add_values_wide_1(weights + at, v_rows, count, offset, faded + at, to, pool)
                else:
                    add_values_narrow_1(weights + at, v_rows, count, offset, faded + at, to, pool)
                d += 1
        lane += WIDE if wide else LANES


@_compiled
def _end_tile(job: Any, item: Any, state: int, values: int) -> None:
    """Divide by the sums, sinks included, and write the output."""
    group = job.query_heads // job.kv_heads
    line_bytes = QUERY_LANES * 4
    packed = _floats(values, job.v_dims * QUERY_LANES)
    shares = _floats(state + FADED * line_bytes, QUERY_LANES)
    for lane in range(0, item.last - item.first, LANES):
        at = state + lane * 4
        highest, total = load(at + MAXIMUM * line_bytes), load(at + SUM * line_bytes)
        share = splat(np.float32(1))
        if job.sinks:
            sink = load(at + SINK * line_bytes)
            share = exp(highest - maximum(highest, sink))
            total = total * share + exp(sink - maximum(highest, sink))
        store(at + FADED * line_bytes, share / total)
    for pair in range(item.first, item.last):
        token, head = item.token + pair // group, item.head * group + pair % group
        lane = pair - item.first
        out = _floats(job.out + token * job.out_token_bytes + head * job.out_head_bytes, job.v_dims)
        for d in range(job.v_dims):
            out[d] = packed[d * QUERY_LANES + lane] * shares[lane]


# -- threads -----------------------------------------------------------------------------------

# `counters`: the next item, the next thread's number, then how many parts of each merge are done.
NEXT_ITEM, NEXT_THREAD, PARTS_DONE = range(3)


@_compiled
def _work(job: Any, pool: Any) -> None:
    """Take items until there are none: what each thread of a call does."""
    items = numba.carray(_item_pointer(job.items), job.num_items)
    thread = add_atomically(job.counters + NEXT_THREAD * 8, 1)
    scratch = job.scratch + thread * job.scratch_bytes
    while True:
        i = add_atomically(job.counters + NEXT_ITEM * 8, 1)
        if i >= job.num_items:
            break
        item = items[i]
        if item.head >= 0:
            _attend_tile(job, item, scratch, pool)
        else:
            _attend_row(job, item, scratch, pool)


# What says to `simd` how a pool stores its numbers.
STORED_AS = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
}


@functools.cache
def kernel(dtype: torch.dtype) -> Any:
    """The kernel for pools of one type as a C function, compiled or loaded from numba's cache.

    It takes the address of a `Job` and may be called on many threads at once: they share the work.
    """
    pool, stamp = STORED_AS[dtype], zlib.crc32(Path(simd.__file__).read_bytes())

    def attend(job: Any) -> None:
        # numba's cache knows of this file and of what this closure holds: name the other source.
        _ = stamp
        _work(numba.carray(job, 1)[0], pool)

    signature = numba.types.void(numba.types.CPointer(numba.from_dtype(np.dtype(Job))))
    return cached(functools.partial(numba.cfunc, signature, error_model="numpy"), attend)


def cached(decorator: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """Compile with numba's cache on disk: beside this file, or else in the user's own folder."""
    try:
        return decorator(cache=True)(function)
    except RuntimeError as error:
        if "no locator" not in str(error):
            raise
        return decorator()(function)
