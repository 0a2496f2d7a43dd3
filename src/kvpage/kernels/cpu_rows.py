"""What a CPU does between matrix products, one pass over memory each, compiled by numba.

torch needs six operators for an RMS norm and five for a rotation, each of them a call, a result
and a pass. At the few rows of a decode step the calls cost more than the work; at many rows, the
passes.

All take and give float32. Rows are tokens; what is computed for one depends on it alone, neither
on the others nor on the number of threads, to the last bit.
"""

import ctypes
import functools
import math
import zlib
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from kvpage.kernels import cpu_threads, simd
from kvpage.kernels.cpu_kernel import cached
from kvpage.kernels.simd import (
    LANES,
    add_atomically,
    exp,
    largest_lane,
    load,
    magnitude,
    maximum,
    select_less,
    splat,
    store,
    sum_of_lanes,
    typed_pointer,
)

THREADED_BYTES = 256 * 1024
"""A call over less memory than this is done sooner than a second thread could help."""

ROWS_AT_ONCE = 8
ZERO_POINT = 128
INT8_MAX = 127


class Job(ctypes.Structure):
    """What the threads of one call read. Names without a unit are addresses; 0 means absent."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "operation", "num_rows", "next_row", "next_row_at", "width",
                "source", "source_row_bytes", "result", "result_row_bytes",
                "weight", "cos", "sin", "table_row_bytes",
                "num_heads", "head_dim", "rotary_dim", "slots", "scales",
            )
        ),
        ("eps", ctypes.c_float),
    ]  # fmt: skip


_float_pointer = typed_pointer(numba.types.float32)
_byte_pointer = typed_pointer(numba.types.uint8)
_short_pointer = typed_pointer(numba.types.uint16)
_word_pointer = typed_pointer(numba.types.uint32)
_int64_pointer = typed_pointer(numba.types.int64)
_compiled = functools.partial(numba.njit, error_model="numpy")


@_compiled
def _floats(address: int, count: int) -> Any:
    return numba.carray(_float_pointer(address), count)


@_compiled
def _norm_row(job: Any, row: int) -> None:
    source = job.source + row * job.source_row_bytes
    result = job.result + row * job.result_row_bytes
    whole = job.width - job.width % LANES
    total = splat(np.float32(0))
    for i in range(0, whole, LANES):
        x = load(source + i * 4)
        total = total + x * x
    squares = sum_of_lanes(total)
    xs, ys = _floats(source, job.width), _floats(result, job.width)
    weights = _floats(job.weight, job.width)
    for i in range(whole, job.width):
        squares += xs[i] * xs[i]
    scale = np.float32(1) / np.float32(
        math.sqrt(np.float32(squares / np.float32(job.width) + job.eps))
    )
    for i in range(0, whole, LANES):
        store(result + i * 4, load(source + i * 4) * splat(scale) * load(job.weight + i * 4))
    for i in range(whole, job.width):
        ys[i] = xs[i] * scale * weights[i]


@_compiled
def _rotate_row(job: Any, row: int) -> None:
    half = job.rotary_dim // 2
    whole = half - half % LANES
    cos, sin = job.cos + row * job.table_row_bytes, job.sin + row * job.table_row_bytes
    cosines, sines = _floats(cos, job.rotary_dim), _floats(sin, job.rotary_dim)
    for head in range(job.num_heads):
        lower = job.source + row * job.source_row_bytes + head * job.head_dim * 4
        upper = lower + half * 4
        for i in range(0, whole * 4, LANES * 4):
            a, b = load(lower + i), load(upper + i)
            store(lower + i, a * load(cos + i) - b * load(sin + i))
            store(upper + i, b * load(cos + half * 4 + i) + a * load(sin + half * 4 + i))
        numbers = _floats(lower, job.rotary_dim)
        for i in range(whole, half):
            a, b = numbers[i], numbers[half + i]
            numbers[i] = a * cosines[i] - b * sines[i]
            numbers[half + i] = b * cosines[half + i] + a * sines[half + i]


@_compiled
def _gate_row(job: Any, row: int) -> None:
    gate = job.source + row * job.source_row_bytes
    up, result = gate + job.width * 4, job.result + row * job.result_row_bytes
    whole = job.width - job.width % LANES
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    for i in range(0, whole * 4, LANES * 4):
        x = load(gate + i)
        # The sigmoid, from an exponential that cannot overflow.
        decay = exp(zero - magnitude(x))
        share = select_less(x, zero, decay, one) / (one + decay)
        store(result + i, x * share * load(up + i))
    gates, ups = _floats(gate, job.width), _floats(up, job.width)
    results = _floats(result, job.width)
    for i in range(whole, job.width):
        decay_1 = np.float32(math.exp(-abs(gates[i])))
        share_1 = (decay_1 if gates[i] < 0 else np.float32(1)) / (np.float32(1) + decay_1)
        results[i] = gates[i] * share_1 * ups[i]


@_compiled
def _quantise_row(job: Any, row: int) -> None:
    source = job.source + row * job.source_row_bytes
    whole = job.width - job.width % LANES
    largest = splat(np.float32(0))
    for i in range(0, whole, LANES):
        largest = maximum(magnitude(load(source + i * 4)), largest)
    peak = largest_lane(largest)
    xs = _floats(source, job.width)
    for i in range(whole, job.width):
        peak = max(peak, abs(xs[i]))
    scale = peak / np.float32(INT8_MAX)
    _floats(job.scales, job.num_rows)[row] = scale
    steps = np.float32(1) / scale if scale > 0 else np.float32(0)
    result = numba.carray(_byte_pointer(job.result + row * job.result_row_bytes), job.width)
    for i in range(job.width):
        # Half up; what is cast is above zero, so that cutting off rounds down.
        result[i] = np.uint8(np.int32(xs[i] * steps + np.float32(ZERO_POINT + 0.5)))


@_compiled
def _write_row(job: Any, row: int) -> None:
    slot = numba.carray(_int64_pointer(job.slots), job.num_rows)[row]
    if slot < 0:
        return
    source = job.source + row * job.source_row_bytes
    result = job.result + slot * job.result_row_bytes
    xs, ys = _floats(source, job.width), _floats(result, job.width)
    for i in range(job.width):
        ys[i] = xs[i]


@_compiled
def _write_bfloat16_row(job: Any, row: int) -> None:
    slot = numba.carray(_int64_pointer(job.slots), job.num_rows)[row]
    if slot < 0:
        return
    bits = numba.carray(_word_pointer(job.source + row * job.source_row_bytes), job.width)
    result = numba.carray(_short_pointer(job.result + slot * job.result_row_bytes), job.width)
    for i in range(job.width):
        # To nearest, ties to even, as torch does; the carry may go up into the exponent.
        x = bits[i]
        rounded = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        is_nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        result[i] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


NORM, ROTATE, GATE, QUANTISE, WRITE, WRITE_BFLOAT16 = range(6)


@_compiled
def _do_row(job: Any, row: int) -> None:
    if job.operation == NORM:
        _norm_row(job, row)
    elif job.operation == ROTATE:
        _rotate_row(job, row)
    elif job.operation == GATE:
        _gate_row(job, row)
    elif job.operation == QUANTISE:
        _quantise_row(job, row)
    elif job.operation == WRITE:
        _write_row(job, row)
    elif job.operation == WRITE_BFLOAT16:
        _write_bfloat16_row(job, row)


@functools.cache
def _kernel() -> Any:
    """All operations as one C function that threads may call at once to share the rows."""
    stamp = zlib.crc32(Path(simd.__file__).read_bytes())

    def work(pointer: Any) -> None:
        # numba's cache knows of this file and of what this closure holds: name the other source.
        _ = stamp
        job = numba.carray(pointer, 1)[0]
        while True:
            first = add_atomically(job.next_row_at, ROWS_AT_ONCE)
            if first >= job.num_rows:
                break
            for row in range(first, min(first + ROWS_AT_ONCE, job.num_rows)):
                _do_row(job, row)

    signature = numba.types.void(numba.types.CPointer(numba.from_dtype(np.dtype(Job))))
    return cached(functools.partial(numba.cfunc, signature, error_model="numpy"), work)


def _run(operation: int, num_bytes: int, **fields: Any) -> None:
    """Run an operation over all rows, which together touch so many bytes of memory."""
    job = Job(operation=operation, **fields)
    job.next_row_at = ctypes.addressof(job) + Job.next_row.offset
    threads = 1 if num_bytes < THREADED_BYTES else torch.get_num_threads()
    cpu_threads.run(_kernel().address, job, threads)


def _check(*tensors: torch.Tensor) -> None:
    for x in tensors:
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise ValueError(f"float32 on a CPU is wanted, not {x.dtype} on {x.device}")


def _fit(fits: bool, *tensors: torch.Tensor) -> None:
    if not fits:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"these shapes or strides do not belong together: {shapes}")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dim (Zhang and Sennrich, 2019).

    Args:
        x: `float32[..., D]`.
        weight: `float32[D]`.
        eps: added to the mean.
    """
    _check(x, weight)
    _fit(weight.shape == x.shape[-1:], x, weight)
    x = x.contiguous()
    result, width = torch.empty_like(x), x.shape[-1]
    _run(
        NORM, 8 * x.numel(),
        num_rows=x.numel() // width, width=width, eps=eps, weight=weight.data_ptr(),
        source=x.data_ptr(), source_row_bytes=width * 4,
        result=result.data_ptr(), result_row_bytes=width * 4,
    )  # fmt: skip
    return result


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn the halves of each head's first R numbers into each other (Su et al., 2021), in place.

    Args:
        heads: `float32[T, H, D]`, heads adjacent to each other.
        cos: `float32[T, R]`, of positions; both halves of it.
        sin: likewise.
    """
    num_tokens, num_heads, head_dim = heads.shape
    _check(heads, cos, sin)
    _fit(
        cos.shape == sin.shape and len(cos) == num_tokens and cos.shape[1] <= head_dim
        and cos.shape[1] % 2 == 0 and heads.stride()[1:] == (head_dim, 1),
        heads, cos, sin,
    )  # fmt: skip
    cos, sin = cos.contiguous(), sin.contiguous()
    _run(
        ROTATE, 8 * heads.numel(),
        num_rows=num_tokens, num_heads=num_heads, head_dim=head_dim, rotary_dim=cos.shape[1],
        source=heads.data_ptr(), source_row_bytes=heads.stride(0) * 4,
        cos=cos.data_ptr(), sin=sin.data_ptr(), table_row_bytes=cos.shape[1] * 4,
    )  # fmt: skip


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `float32[..., 2 * N]`, gates first: `[..., N]` (Shazeer, 2020)."""
    _check(gate_up)
    _fit(gate_up.shape[-1] % 2 == 0, gate_up)
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    result = gate_up.new_empty(*gate_up.shape[:-1], width)
    _run(
        GATE, 12 * result.numel(),
        num_rows=result.numel() // width, width=width,
        source=gate_up.data_ptr(), source_row_bytes=width * 8,
        result=result.data_ptr(), result_row_bytes=width * 4,
    )  # fmt: skip
    return result


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in one byte, with a scale for each row.

    Args:
        x: `float32[T, N]`.

    Returns:
        `uint8[T, N]` and `float32[T]`: `x` is about `(bytes - ZERO_POINT) * scale`, within half a
        scale, which is the largest magnitude of a row divided by 127.
    """
    _check(x)
    x = x.contiguous()
    num_rows, width = x.shape
    result = x.new_empty(num_rows, width, dtype=torch.uint8)
    scales = x.new_empty(num_rows)
    _run(
        QUANTISE, 9 * x.numel(),
        num_rows=num_rows, width=width, scales=scales.data_ptr(),
        source=x.data_ptr(), source_row_bytes=x.stride(0) * 4,
        result=result.data_ptr(), result_row_bytes=width,
    )  # fmt: skip
    return result, scales


_WRITERS = {torch.float32: WRITE, torch.bfloat16: WRITE_BFLOAT16}


def can_write(rows: torch.Tensor, pool: torch.Tensor) -> bool:
    """Whether `write` knows these types and layouts."""
    adjacent = all(x.stride(2) == 1 and x.stride(1) == x.shape[2] for x in (rows, pool))
    return adjacent and rows.dtype == torch.float32 and pool.dtype in _WRITERS


def write(rows: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Store K or V: `float32[T, H, D]` in slots of `[num_slots, H, D]`.

    Args:
        rows: the heads of a token adjacent to each other.
        pool: float32 or bfloat16; written.
        slots: `int64[T]`; a token whose slot is -1 is not stored.
    """
    _fit(
        rows.shape[1:] == pool.shape[1:] and slots.shape == rows.shape[:1]
        and slots.dtype == torch.int64 and can_write(rows, pool),
        rows, pool, slots,
    )  # fmt: skip
    slots = slots.contiguous()
    _run(
        _WRITERS[pool.dtype], 8 * rows.numel(),
        num_rows=len(slots), width=rows.shape[1] * rows.shape[2], slots=slots.data_ptr(),
        source=rows.data_ptr(), source_row_bytes=rows.stride(0) * 4,
        result=pool.data_ptr(), result_row_bytes=pool.stride(0) * pool.element_size(),
    )  # fmt: skip
