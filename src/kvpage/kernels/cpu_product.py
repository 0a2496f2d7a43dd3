"""Matrix products with packed weights on a CPU: the inside, for `cpu_rows`.

Weights lie in panels of `PANEL` outputs, `float32[inputs, PANEL]` each, one behind the other: with
few rows, a product reads them from memory once and in order, which no library's layout allows for
as well. Each panel is multiplied with up to `TILE_ROWS` rows at a time, all sums in registers. A
group of panels stays in the second-level cache while all rows pass by (Goto and van de Geijn,
2008); a panel too long for that is cut into slices of inputs.

The sum of each output is taken over the inputs in their order, whatever the number of rows.
"""

import ctypes
import functools
import mmap
import sys
from collections.abc import Iterable
from typing import Any

import attrs
import numba
import torch

from kvpage.kernels.simd import LANES, PANEL, product_tile

TILE_ROWS = 6 if LANES == 8 else 12
"""Sums of a tile and what they are made from just fit into the registers."""

GROUP_BYTES = 128 * 1024
"""Of the panels that wait in the second-level cache."""

SLICE_INPUTS = GROUP_BYTES // (PANEL * 4)

ITEMS_PER_THREAD = 4

_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6, _tile_8, _tile_12 = map(
    product_tile, (1, 2, 3, 4, 5, 6, 8, 12)
)
_compiled = functools.partial(numba.njit, error_model="numpy")


@attrs.frozen(eq=False)
class Panels:
    """Weights of a linear layer, packed.

    Attributes:
        weight: `float32[panels, inputs, PANEL]`; outputs that the layer does not have are zero.
        bias: `float32[panels * PANEL]`; zeros if the layer has none.
        outputs: of the layer.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    outputs: int

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, room: "Room") -> "Panels":
        """Pack `float32[outputs, inputs]`."""
        outputs, inputs = weight.shape
        panels = -(-outputs // PANEL)
        packed = room.take(panels * inputs * PANEL).view(panels, inputs, PANEL)
        whole = outputs // PANEL
        packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, inputs).transpose(1, 2)
        if whole < panels:
            packed[whole] = 0
            packed[whole, :, : outputs - whole * PANEL] = weight[whole * PANEL :].T
        start = weight.new_zeros(panels * PANEL)
        if bias is not None:
            start[:outputs] = bias
        return cls(packed, start, outputs)

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
        fitting = GROUP_BYTES // (min(self.inputs, SLICE_INPUTS) * PANEL * 4)
        return max(1, min(fitting, len(self.weight) // (threads * ITEMS_PER_THREAD)))


class Room:
    """Memory for the panels of several layers, on large pages where the system has them.

    With pages of 4 KiB, looking up where they are takes time of its own.
    Memory counts as used only once panels are written to it.

    Args:
        shapes: outputs and inputs of the layers.
    """

    def __init__(self, shapes: Iterable[tuple[int, int]]) -> None:
        sizes = (-(-outputs // PANEL) * PANEL * inputs for outputs, inputs in shapes)
        self._floats = torch.empty(sum(sizes))
        self._taken = 0
        _ask_for_large_pages(self._floats)

    def take(self, size: int) -> torch.Tensor:
        """The next so many floats, as they come."""
        begin, self._taken = self._taken, self._taken + size
        return self._floats[begin : self._taken]


def _ask_for_large_pages(floats: torch.Tensor) -> None:
    begin = -(-floats.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = floats.data_ptr() + floats.nbytes - begin
    if sys.platform == "linux" and size > 0:
        # What it answers does not matter: it is a wish.
        _MADVISE(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


if sys.platform == "linux":
    _MADVISE = ctypes.CDLL(None).madvise


@_compiled
def _some_rows(
    rows: int, x: int, x_row_bytes: int, panel: int, count: int,
    start: int, start_row_bytes: int, to: int, to_row_bytes: int,
) -> int:  # fmt: skip
    """Multiply the first rows of so many; how many those were.

    Not always as many as fit: one or two that are left over take as long as four.
    """
    if TILE_ROWS >= 12 and (rows >= 15 or rows == 12):
        _tile_12(x, x_row_bytes, panel, count, start, start_row_bytes, to, to_row_bytes)
        return 12
    if TILE_ROWS >= 12 and (rows >= 11 or rows == 8):
        _tile_8(x, x_row_bytes, panel, count, start, start_row_bytes, to, to_row_bytes)
        return 8
    if rows >= 10 or rows == 6:
        _tile_6(x, x_row_bytes, panel, count, start, start_row_bytes, to, to_row_bytes)
        return 6
    if rows in (5, 9):
        _tile_5(x, x_row_bytes, panel, count, start, start_row_bytes, to, to_row_bytes)
        return 5
    if rows >= 4:
        _tile_4(x, x_row_bytes, panel, count, start, start_row_bytes, to, to_row_bytes)
        return 4
    if rows == 3:
        _tile_3(x, x_row_bytes, panel, count, start, start_row_bytes, to, to_row_bytes)
    elif rows == 2:
        _tile_2(x, x_row_bytes, panel, count, start, start_row_bytes, to, to_row_bytes)
    else:
        _tile_1(x, x_row_bytes, panel, count, start, start_row_bytes, to, to_row_bytes)
    return rows


@_compiled
def multiply_panels(job: Any, item: int) -> None:
    """One group of panels of a job of `cpu_rows`, with all rows."""
    first = item * job.panels_per_item
    last = min(first + job.panels_per_item, job.num_panels)
    slice_inputs = job.inputs if job.num_rows <= TILE_ROWS else SLICE_INPUTS
    for begin in range(0, job.inputs, slice_inputs):
        count = min(slice_inputs, job.inputs - begin)
        row = 0
        while row < job.num_rows:
            x = job.source + row * job.source_row_bytes + begin * 4
            rows = 0
            for panel in range(first, last):
                weights = job.weight + (panel * job.inputs + begin) * PANEL * 4
                to = job.result + row * job.result_row_bytes + panel * PANEL * 4
                start, start_row_bytes = job.bias + panel * PANEL * 4, 0
                if begin > 0:
                    start, start_row_bytes = to, job.result_row_bytes
                rows = _some_rows(
                    job.num_rows - row, x, job.source_row_bytes, weights, count,
                    start, start_row_bytes, to, job.result_row_bytes,
                )  # fmt: skip
            row += rows
