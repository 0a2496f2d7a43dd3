"""What a CPU does in a layer beside attention, one pass over memory each, compiled by numba.

torch needs six operators for an RMS norm and five for a rotation, each of them a call, a result
and a pass. At the few rows of a decode step the calls cost more than the work; at many rows, the
passes. A `Program` goes further: one call for several passes in a row.

All take and give float32. Rows are tokens; what is computed for one depends on it alone, neither
on the others nor on the number of threads, to the last bit.
"""

import ctypes
import functools
import math
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from kvpage.kernels import cpu_product, cpu_threads, simd
from kvpage.kernels.cpu_kernel import cached
from kvpage.kernels.cpu_product import Panels, multiply_panels, silu_times
from kvpage.kernels.simd import (
    LANES,
    PANEL,
    add_atomically,
    call,
    call_parallel,
    largest_lane,
    load,
    magnitude,
    maximum,
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
    """One pass, as its threads read it. Names without a unit are addresses; 0 means absent.

    Threads take `items_at_once` items of `num_items` until there are none: rows, but of a product
    groups of panels. `bytes_per_row` and `other_bytes` say how much memory the pass touches. A call
    is of the C function `entry` with `argument`, by all threads unless it has one item.
    """

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "operation", "next_item", "next_item_at", "num_items", "items_at_once",
                "bytes_per_row", "other_bytes", "num_rows", "width",
                "source", "source_row_bytes", "result", "result_row_bytes",
                "weight", "bias", "inputs", "num_panels", "panels_per_item", "panels_between",
                "addend", "addend_row_bytes", "gated", "gated_row_bytes",
                "cos", "sin", "table_row_bytes",
                "num_heads", "head_dim", "rotary_dim", "slots", "scales", "zeros",
                "entry", "argument",
            )
        ),
        ("eps", ctypes.c_float),
    ]  # fmt: skip


class _Passes(ctypes.Structure):
    """Jobs in a row, for one thread, which lets others help with the large ones.

    Attributes:
        jobs: address of the first.
        num_jobs: how many there are.
        num_rows: what each of them is over.
        parallel: address of `GOMP_parallel`.
        entry: address of the kernel that does one job.
        threads: how many share a large job.
        threaded_bytes: what makes a job large.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "jobs",
            "num_jobs",
            "num_rows",
            "parallel",
            "entry",
            "threads",
            "threaded_bytes",
        )
    ]


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
    source = job.source + row * job.source_row_bytes
    result = job.result + row * job.result_row_bytes
    for i in range(0, job.width * 4, LANES * 4):
        gate = source + 2 * i
        store(result + i, silu_times(load(gate), load(gate + LANES * 4)))


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


@_compiled
def _add_row(job: Any, row: int) -> None:
    source = job.source + row * job.source_row_bytes
    addend = job.addend + row * job.addend_row_bytes
    result = job.result + row * job.result_row_bytes
    whole = job.width - job.width % LANES
    for i in range(0, whole * 4, LANES * 4):
        store(result + i, load(source + i) + load(addend + i))
    xs, ys = _floats(source, job.width), _floats(addend, job.width)
    sums = _floats(result, job.width)
    for i in range(whole, job.width):
        sums[i] = xs[i] + ys[i]


NORM, ROTATE, GATE, QUANTISE, WRITE, WRITE_BFLOAT16, ADD, PRODUCT, CALL = range(9)


@_compiled
def _do_item(job: Any, row: int) -> None:
    if job.operation == PRODUCT:
        multiply_panels(job, row)
    elif job.operation == NORM:
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
    elif job.operation == ADD:
        _add_row(job, row)


@_compiled
def _work(job: Any) -> None:
    while True:
        first = add_atomically(job.next_item_at, job.items_at_once)
        if first >= job.num_items:
            break
        for item in range(first, min(first + job.items_at_once, job.num_items)):
            _do_item(job, item)


JOB = np.dtype(Job)
_JOB = numba.from_dtype(JOB)
_job_pointer = typed_pointer(_JOB)


@functools.cache
def _kernel() -> Any:
    """All operations as one C function that threads may call at once to share the items."""
    stamp = _stamp()

    def work(pointer: Any) -> None:
        _ = stamp
        _work(numba.carray(pointer, 1)[0])

    return _c_function(_JOB, work)


@functools.cache
def _conductor() -> Any:
    """A C function that does the jobs of `_Passes`, one after another."""
    stamp = _stamp()

    def conduct(pointer: Any) -> None:
        _ = stamp
        passes = numba.carray(pointer, 1)[0]
        jobs = numba.carray(_job_pointer(passes.jobs), passes.num_jobs)
        for i in range(passes.num_jobs):
            job = jobs[i]
            if job.operation == CALL:
                if passes.threads == 1 or job.num_items == 1:
                    call(job.entry, job.argument)
                else:
                    call_parallel(passes.parallel, job.entry, job.argument, passes.threads)
                continue
            job.next_item = 0
            job.num_rows = passes.num_rows
            if job.operation != PRODUCT:
                job.num_items = passes.num_rows
            num_bytes = job.bytes_per_row * job.num_rows + job.other_bytes
            if passes.threads == 1 or num_bytes < passes.threaded_bytes:
                _work(job)
            else:
                address = job.next_item_at - NEXT_ITEM_OFFSET
                call_parallel(passes.parallel, passes.entry, address, passes.threads)

    return _c_function(numba.from_dtype(np.dtype(_Passes)), conduct)


_ZEROS = torch.zeros(PANEL)
NEXT_ITEM_OFFSET = Job.next_item.offset


def _stamp() -> tuple[int, ...]:
    """For numba's cache, which knows of this file and what a closure holds: the other sources."""
    return tuple(
        zlib.crc32(Path(each).read_bytes()) for each in (simd.__file__, cpu_product.__file__)
    )


def _c_function(argument: Any, function: Any) -> Any:
    signature = numba.types.void(numba.types.CPointer(argument))
    return cached(functools.partial(numba.cfunc, signature, error_model="numpy"), function)


def job(operation: int, num_rows: int, **fields: Any) -> Job:
    """A pass over so many rows; it can be run once it is placed."""
    made = Job(operation=operation, items_at_once=ROWS_AT_ONCE, **fields)
    set_rows(made, num_rows)
    return made


def set_rows(made: Job, num_rows: int) -> None:
    """Give a job another number of rows."""
    made.num_rows = num_rows
    if made.operation not in (PRODUCT, CALL):
        made.num_items = num_rows


def _place(made: Job) -> None:
    """Tell a job where it lies."""
    made.next_item_at = ctypes.addressof(made) + NEXT_ITEM_OFFSET


class Program:
    """Passes in a row, which one call runs. Belongs to one thread.

    Args:
        jobs: they are copied.

    Attributes:
        jobs: the copies; what differs from call to call is set here.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = (Job * len(jobs))(*jobs)
        for each in self.jobs:
            _place(each)
        self._passes = _Passes(
            jobs=ctypes.addressof(self.jobs),
            num_jobs=len(jobs),
            parallel=cpu_threads.openmp_address(),
            entry=_kernel().address,
        )

    def run(self, num_rows: int) -> None:
        """Run all passes over so many rows, on torch's threads."""
        passes = self._passes
        if not passes.parallel:
            for each in self.jobs:
                each.next_item = 0
                set_rows(each, num_rows)
                _run(each)
            return
        passes.num_rows = num_rows
        passes.threads, passes.threaded_bytes = torch.get_num_threads(), THREADED_BYTES
        cpu_threads.run(_conductor().address, ctypes.addressof(passes), 1)


def _run(made: Job) -> None:
    if made.operation == CALL:
        threads = 1 if made.num_items == 1 else torch.get_num_threads()
        cpu_threads.run(made.entry, made.argument, threads)
        return
    num_bytes = made.bytes_per_row * made.num_rows + made.other_bytes
    threads = 1 if num_bytes < THREADED_BYTES else torch.get_num_threads()
    cpu_threads.run(_kernel().address, ctypes.addressof(made), threads)


def _run_once(operation: int, num_rows: int, **fields: Any) -> None:
    made = job(operation, num_rows, **fields)
    _place(made)
    _run(made)


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
    _run_once(
        NORM, x.numel() // width, bytes_per_row=8 * width, width=width,
        eps=eps, weight=weight.data_ptr(),
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
    _run_once(
        ROTATE, num_tokens, bytes_per_row=8 * num_heads * head_dim,
        num_heads=num_heads, head_dim=head_dim, rotary_dim=cos.shape[1],
        source=heads.data_ptr(), source_row_bytes=heads.stride(0) * 4,
        cos=cos.data_ptr(), sin=sin.data_ptr(), table_row_bytes=cos.shape[1] * 4,
    )  # fmt: skip


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` (Shazeer, 2020).

    Args:
        gate_up: `float32[..., 2 * N]`, `LANES` of gate and of up in turns.

    Returns:
        `float32[..., N]`.
    """
    _check(gate_up)
    _fit(gate_up.shape[-1] % (2 * LANES) == 0, gate_up)
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    result = gate_up.new_empty(*gate_up.shape[:-1], width)
    _run_once(
        GATE, result.numel() // width, bytes_per_row=12 * width, width=width,
        source=gate_up.data_ptr(), source_row_bytes=width * 8,
        result=result.data_ptr(), result_row_bytes=width * 4,
    )  # fmt: skip
    return result


def product(x: torch.Tensor, panels: Panels) -> torch.Tensor:
    """`x @ weight.T + bias` from packed weights.

    Args:
        x: `float32[T, inputs]`.
        panels: the weights.

    Returns:
        `float32[T, outputs]`; rows may lie farther apart than they are long.
    """
    _check(x)
    _fit(x.dim() == 2 and x.shape[1] == panels.inputs, x, panels.weight)
    x = x.contiguous()
    padded = x.new_empty(len(x), panels.padded_outputs)
    made = product_job(panels, len(x))
    made.source, made.source_row_bytes = x.data_ptr(), x.shape[1] * 4
    made.result, made.result_row_bytes = padded.data_ptr(), padded.shape[1] * 4
    _place(made)
    _run(made)
    return padded[:, : panels.outputs]


def product_job(panels: Panels, num_rows: int) -> Job:
    """The pass of `product`; where rows come from and go to is left to be set."""
    threads = torch.get_num_threads()
    per_item = panels.panels_per_item(threads)
    num_panels = len(panels.weight)
    made = job(
        PRODUCT, num_rows, weight=panels.weight.data_ptr(), bias=panels.bias.data_ptr(),
        scales=0 if panels.scales is None else panels.scales.data_ptr(), zeros=_ZEROS.data_ptr(),
        inputs=panels.inputs, num_panels=num_panels, panels_per_item=per_item,
        panels_between=(threads - 1) * per_item,
        num_items=-(-num_panels // per_item), other_bytes=panels.weight.nbytes,
        bytes_per_row=4 * (panels.inputs + panels.padded_outputs),
    )  # fmt: skip
    made.items_at_once = 1
    return made


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
    _run_once(
        QUANTISE, num_rows, bytes_per_row=9 * width, width=width, scales=scales.data_ptr(),
        source=x.data_ptr(), source_row_bytes=x.stride(0) * 4,
        result=result.data_ptr(), result_row_bytes=width,
    )  # fmt: skip
    return result, scales


WRITERS = {torch.float32: WRITE, torch.bfloat16: WRITE_BFLOAT16}


def can_write(rows: torch.Tensor, pool: torch.Tensor) -> bool:
    """Whether `write` knows these types and layouts."""
    return _adjacent(rows) and rows.dtype == torch.float32 and is_writable(pool)


def is_writable(pool: torch.Tensor) -> bool:
    """Whether `write` knows the type and layout of a pool."""
    return _adjacent(pool) and pool.dtype in WRITERS


def _adjacent(x: torch.Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def write(stored: Sequence[tuple[torch.Tensor, torch.Tensor]], slots: torch.Tensor) -> None:
    """Store K and V: `float32[T, H, D]` in slots of `[num_slots, H, D]`.

    Args:
        stored: K and V, each with its pool, for which `can_write` is true. The pools are written.
        slots: `int64[T]`; a token whose slot is -1 is not stored.
    """
    slots = slots.contiguous()
    program = _writer(stored, slots)
    at = slots.data_ptr()
    for made, (rows, pool) in zip(program.jobs, stored, strict=True):
        made.slots, made.source, made.result = at, rows.data_ptr(), pool.data_ptr()
    program.run(slots.shape[0])


_thread = threading.local()


def _writer(stored: Sequence[tuple[torch.Tensor, torch.Tensor]], slots: torch.Tensor) -> Program:
    """This thread's program for tensors of such shapes and strides: the same in most layers."""
    key = (slots.shape, slots.dtype, *(
        (x.shape, x.stride(), x.dtype) for each in stored for x in each
    ))  # fmt: skip
    if getattr(_thread, "writer_key", None) != key:
        _thread.writer = Program([_write_job(*each, slots) for each in stored])
        _thread.writer_key = key
    program: Program = _thread.writer
    return program


def _write_job(rows: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> Job:
    _fit(
        rows.shape[1:] == pool.shape[1:] and rows.shape[:1] == slots.shape
        and slots.dtype == torch.int64,
        rows, pool, slots,
    )  # fmt: skip
    width = rows.shape[1] * rows.shape[2]
    return job(
        WRITERS[pool.dtype], 0, width=width, bytes_per_row=8 * width,
        source_row_bytes=rows.stride(0) * 4,
        result_row_bytes=pool.stride(0) * pool.element_size(),
    )  # fmt: skip
