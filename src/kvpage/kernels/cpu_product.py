"""Matrix products with packed weights on a CPU: the inside, for `cpu_rows`.

Weights lie in panels of `PANEL` outputs, `float32[inputs, PANEL]` each, one behind the other: with
few rows, a product reads them from memory once and in order, which no library's layout allows for
as well. Each panel is multiplied with up to `TILE_ROWS` rows at a time, all sums in registers. A
group of panels stays in the second-level cache while all rows pass by (Goto and van de Geijn,
2008); a panel too long for that is cut into slices of inputs.

Weights may be rounded to one byte, with a scale for each output. Up to `WIDENED_ROWS` rows they are
widened on their way into registers, for more rows panel by panel beforehand; either way the same
sums are taken, and scaled at last.

The sum of each output is taken over the inputs in their order, whatever the number of rows.

Where outputs are gates and what they let through, a vector of each in turns, they are multiplied
panel by panel, while the sums are still in a cache.
"""

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import attrs
import numba
import numpy as np
import torch

from kvpage.kernels.simd import (
    CACHE_LINE_BYTES,
    LANES,
    PANEL,
    exp,
    load,
    load_bytes,
    magnitude,
    product_tile,
    select_less,
    splat,
    stack_floats,
    store,
)

TILE_ROWS = 6 if LANES == 8 else 12
"""Sums of a tile and what they are made from just fit into the registers."""

SLICE_BYTES = 128 * 1024
"""What is in use of a panel at once: with as much that is on its way, it fits into the second-level
cache."""

SLICE_INPUTS = SLICE_BYTES // (PANEL * 4)

WIDENED_ROWS = 4 * TILE_ROWS
"""Up to so many, widening bytes for each tile anew costs less than writing and reading floats."""

ITEMS_PER_THREAD = 4

_compiled = functools.partial(numba.njit, error_model="numpy")
_slice_floats = stack_floats(SLICE_INPUTS * PANEL)


@attrs.frozen(eq=False)
class Panels:
    """Weights of a linear layer, packed.

    Attributes:
        weight: `float32` or `int8[panels, inputs, PANEL]`; outputs that the layer does not have are
            zero.
        bias: `float32[panels * PANEL]`; zeros if the layer has none.
        scales: `float32[panels * PANEL]`: of the outputs, if weights are bytes.
        outputs: of the layer.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    scales: torch.Tensor | None
    outputs: int

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        room: "Room",
        scales: torch.Tensor | None = None,
    ) -> "Panels":
        """Pack `float32[outputs, inputs]`, or `int8` with scales `float32[outputs]`."""
        outputs, inputs = weight.shape
        panels = -(-outputs // PANEL)
        packed = room.take(panels * inputs * PANEL).view(panels, inputs, PANEL)
        whole = outputs // PANEL
        packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, inputs).transpose(1, 2)
        if whole < panels:
            packed[whole] = 0
            packed[whole, :, : outputs - whole * PANEL] = weight[whole * PANEL :].T

        def padded(numbers: torch.Tensor | None) -> torch.Tensor:
            result = torch.zeros(panels * PANEL)
            if numbers is not None:
                result[:outputs] = numbers
            return result

        return cls(packed, padded(bias), None if scales is None else padded(scales), outputs)

    @property
    def inputs(self) -> int:
        """Of the layer."""
        return self.weight.shape[1]

    @property
    def padded_outputs(self) -> int:
        """A multiple of `PANEL`."""
        return len(self.bias)

    def panels_per_item(self, threads: int) -> int:
        """How many panels a thread takes at once."""
        slices = SLICE_INPUTS // self.inputs
        return max(1, min(slices, len(self.weight) // (threads * ITEMS_PER_THREAD)))


class Room:
    """Memory for the panels of several layers, on large pages where the system has them.

    With pages of 4 KiB, looking up where they are takes time of its own.
    Memory counts as used only once panels are written to it.

    Args:
        shapes: outputs and inputs of the layers.
        dtype: of their weights.
    """

    def __init__(
        self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype = torch.float32
    ) -> None:
        sizes = (-(-outputs // PANEL) * PANEL * inputs for outputs, inputs in shapes)
        self._numbers = torch.empty(sum(sizes), dtype=dtype)
        self._taken = 0
        _ask_for_large_pages(self._numbers)

    def take(self, size: int) -> torch.Tensor:
        """The next so many numbers, as they come."""
        begin, self._taken = self._taken, self._taken + size
        return self._numbers[begin : self._taken]


def _ask_for_large_pages(numbers: torch.Tensor) -> None:
    begin = -(-numbers.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = numbers.data_ptr() + numbers.nbytes - begin
    if sys.platform == "linux" and size > 0:
        # What it answers does not matter: it is a wish.
        _MADVISE(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


if sys.platform == "linux":
    _MADVISE = ctypes.CDLL(None).madvise


def _row_products(*, of_bytes: bool) -> Callable[..., Any]:
    """Make a numba function that multiplies the first of so many rows; how many those were.

    Not always as many as fit: one or two that are left over take as long as four.
    """
    tile_1, tile_2, tile_3, tile_4, tile_5, tile_6, tile_8, tile_12 = (
        product_tile(rows, of_bytes=of_bytes) for rows in (1, 2, 3, 4, 5, 6, 8, 12)
    )

    def some_rows(
        rows: int, x: int, x_bytes: int, panel: int, count: int, start: int, start_bytes: int,
        to: int, to_bytes: int, ahead: int, step: int,
    ) -> int:  # fmt: skip
        if TILE_ROWS >= 12 and (rows >= 15 or rows == 12):
            tile_12(x, x_bytes, panel, count, start, start_bytes, to, to_bytes, ahead, step)
            return 12
        if TILE_ROWS >= 12 and (rows >= 11 or rows == 8):
            tile_8(x, x_bytes, panel, count, start, start_bytes, to, to_bytes, ahead, step)
            return 8
        if rows >= 10 or rows == 6:
            tile_6(x, x_bytes, panel, count, start, start_bytes, to, to_bytes, ahead, step)
            return 6
        if rows in (5, 9):
            tile_5(x, x_bytes, panel, count, start, start_bytes, to, to_bytes, ahead, step)
            return 5
        if rows >= 4:
            tile_4(x, x_bytes, panel, count, start, start_bytes, to, to_bytes, ahead, step)
            return 4
        if rows == 3:
            tile_3(x, x_bytes, panel, count, start, start_bytes, to, to_bytes, ahead, step)
        elif rows == 2:
            tile_2(x, x_bytes, panel, count, start, start_bytes, to, to_bytes, ahead, step)
        else:
            tile_1(x, x_bytes, panel, count, start, start_bytes, to, to_bytes, ahead, step)
        return rows

    return cast(Callable[..., Any], _compiled(some_rows))


_some_rows = _row_products(of_bytes=False)
_some_rows_of_bytes = _row_products(of_bytes=True)


@_compiled
def multiply_panels(job: Any, item: int) -> None:
    """One group of panels of a job of `cpu_rows`, with all rows."""
    first = item * job.panels_per_item
    last = min(first + job.panels_per_item, job.num_panels)
    for panel in range(first, last):
        # As long as threads take turns, the others take what lies between this item and the next.
        later = panel + 1 if panel + 1 < last else last + job.panels_between
        if job.scales:
            _multiply_bytes(job, panel, later)
            _scale(job, panel)
        else:
            _multiply_floats(job, panel, later)
        if job.gated:
            _gate(job, panel)


@_compiled
def silu_times(gate: Any, up: Any) -> Any:
    """`silu(gate) * up` of vectors (Shazeer, 2020)."""
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    # The sigmoid, from an exponential that cannot overflow.
    decay = exp(zero - magnitude(gate))
    return gate * (select_less(gate, zero, decay, one) / (one + decay)) * up


@_compiled
def _gate(job: Any, panel: int) -> None:
    """Multiply the first vector of a panel, as gates, with the second."""
    for row in range(job.num_rows):
        gate = job.result + row * job.result_row_bytes + panel * PANEL * 4
        to = job.gated + row * job.gated_row_bytes + panel * LANES * 4
        store(to, silu_times(load(gate), load(gate + LANES * 4)))


@_compiled
def _step(num_rows: int, line_bytes: int) -> int:
    """Bytes to ask for at each input, so that the next panel is there when this one is done."""
    tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    return min((line_bytes + tiles - 1) // tiles, CACHE_LINE_BYTES)


@_compiled
def _multiply_floats(job: Any, panel: int, later: int) -> None:
    line_bytes = PANEL * 4
    slice_inputs = job.inputs if job.num_rows <= TILE_ROWS else SLICE_INPUTS
    # With one or two rows there is nothing to do meanwhile; the processor reads ahead by itself.
    step = 0 if job.num_rows <= 2 else _step(job.num_rows, line_bytes)
    result = job.result + panel * line_bytes
    for begin in range(0, job.inputs, slice_inputs):
        count = min(slice_inputs, job.inputs - begin)
        weights = job.weight + (panel * job.inputs + begin) * line_bytes
        ahead = weights + count * line_bytes
        if begin + count == job.inputs:
            ahead = job.weight + later * job.inputs * line_bytes
        row = 0
        while row < job.num_rows:
            to = result + row * job.result_row_bytes
            start, start_bytes = job.bias + panel * line_bytes, 0
            if begin > 0:
                start, start_bytes = to, job.result_row_bytes
            row += _some_rows(
                job.num_rows - row, job.source + row * job.source_row_bytes + begin * 4,
                job.source_row_bytes, weights, count, start, start_bytes,
                to, job.result_row_bytes, ahead, step,
            )  # fmt: skip
            ahead += step * count


@_compiled
def _multiply_bytes(job: Any, panel: int, later: int) -> None:
    ahead = job.weight + later * job.inputs * PANEL
    result, widened = job.result + panel * PANEL * 4, _slice_floats()
    few = job.num_rows <= WIDENED_ROWS
    slice_inputs = job.inputs if job.num_rows <= TILE_ROWS else SLICE_INPUTS
    step = _step(job.num_rows, PANEL)
    for begin in range(0, job.inputs, slice_inputs):
        count = min(slice_inputs, job.inputs - begin)
        weights = job.weight + (panel * job.inputs + begin) * PANEL
        if not few:
            for i in range(0, count * PANEL, LANES):
                store(widened + i * 4, load_bytes(weights + i))
        row = 0
        while row < job.num_rows:
            x = job.source + row * job.source_row_bytes + begin * 4
            to = result + row * job.result_row_bytes
            start, start_bytes = job.zeros, 0
            if begin > 0:
                start, start_bytes = to, job.result_row_bytes
            if few:
                row += _some_rows_of_bytes(
                    job.num_rows - row, x, job.source_row_bytes, weights, count,
                    start, start_bytes, to, job.result_row_bytes, ahead, step,
                )  # fmt: skip
            else:
                row += _some_rows(
                    job.num_rows - row, x, job.source_row_bytes, widened, count,
                    start, start_bytes, to, job.result_row_bytes, ahead, step,
                )  # fmt: skip
            ahead += step * count


@_compiled
def _scale(job: Any, panel: int) -> None:
    """Give each output its scale and its bias."""
    for row in range(job.num_rows):
        to = job.result + row * job.result_row_bytes + panel * PANEL * 4
        for i in range(0, PANEL * 4, LANES * 4):
            at = panel * PANEL * 4 + i
            store(to + i, load(to + i) * load(job.scales + at) + load(job.bias + at))
