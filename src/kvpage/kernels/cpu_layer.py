"""A decoder layer on a CPU in one call, or in two: before attention, and after it.

Between two calls of the host, at few rows, the processor waits: a layer of a small model takes
about as long as the dozen operators that transformers makes of it need to be called. Here all of it
is one `Program`, and each half is, for whoever attends in a way of his own.
"""

import threading
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch

from kvpage.kernels.cpu_product import Panels
from kvpage.kernels.cpu_rows import (
    ADD,
    CALL,
    GATE,
    NORM,
    ROTATE,
    WRITE,
    WRITERS,
    Job,
    Program,
    job,
    product_job,
)

Norm: TypeAlias = tuple[torch.Tensor, float]
"""Weight and epsilon."""

Heads: TypeAlias = tuple[int, int]
"""Their number and their dim."""

Attention: TypeAlias = tuple[int, int, int]
"""The address of a C function, its argument, and how many items it has for threads to share."""


class LayerKernel:
    """The weights of a layer, and what is computed with them. Threads may share it.

    Args:
        qkv: weights of Q, K and V side by side.
        out: of the output projection.
        gate_up: of gate and up, side by side.
        down: of the way back.
        norms: before attention and before the MLP.
        heads: of Q, K and V; those of Q and K have the same dim.

    Attributes:
        shape: layers of the same one can share what lies between their passes.
    """

    def __init__(
        self,
        qkv: Panels,
        out: Panels,
        gate_up: Panels,
        down: Panels,
        *,
        norms: tuple[Norm, Norm],
        heads: tuple[Heads, Heads, Heads],
    ) -> None:
        self.qkv, self.out, self.gate_up, self.down = qkv, out, gate_up, down
        self.norms = norms
        self.heads = heads
        panels = (qkv, out, gate_up, down)
        self.shape = tuple((each.inputs, each.padded_outputs) for each in panels)
        self._thread = threading.local()

    def before_attention(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm, project and rotate.

        Args:
            x: `float32[T, hidden]`, contiguous.
            cos: `float32[T, R]`, of positions, contiguous; both halves of it.
            sin: likewise.

        Returns:
            Q, K and V, `[T, heads, dim]` each, which this thread's next call overwrites.
        """
        num_rows = x.shape[0]
        programs = self._programs(num_rows)
        norm, _, rotation = programs.before.jobs
        _set_inputs(norm, rotation, x, cos, sin)
        programs.before.run(num_rows)
        return programs.space.heads(self.heads, num_rows)

    def between(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where `compute` puts Q, and where it wants the output of attention: `[T, heads, dim]`."""
        space = self._programs(num_rows).space
        (num_q, _), _, (_, v_dim) = self.heads
        return space.heads(self.heads, num_rows)[0], space.attended[:num_rows].view(
            num_rows, num_q, v_dim
        )

    def compute(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """All of the layer.

        Args:
            x: as in `before_attention`, and so are `cos` and `sin`.
            cos: of positions.
            sin: of positions.
            pools: of K and V, for which `can_write` is true; written.
            slots: `int64[T]`, contiguous, where K and V go.
            attention: what to call when they are written, with Q and the output `between`.

        Returns:
            `float32[T, hidden]`: the layer's output.
        """
        num_rows = x.shape[0]
        programs = self._programs(num_rows)
        norm, _, rotation, *writers, call, _, first_sum, second_norm, _, _, _, last_sum = (
            programs.whole_jobs
        )
        result = torch.empty_like(x)
        _set_inputs(norm, rotation, x, cos, sin)
        at = slots.data_ptr()
        for writer, pool in zip(writers, pools, strict=True):
            writer.operation, writer.slots, writer.result = WRITERS[pool.dtype], at, pool.data_ptr()
            writer.result_row_bytes = pool.stride(0) * pool.element_size()
        call.entry, call.argument, call.num_items = attention
        _set_sums(first_sum, second_norm, last_sum, x, result)
        programs.whole.run(num_rows)
        return result

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Project, add, norm, and the MLP.

        Args:
            x: what went into `before_attention`.
            attended: `float32[T, heads, dim]`.

        Returns:
            `float32[T, hidden]`: the layer's output.
        """
        attended = attended.contiguous()
        num_rows = x.shape[0]
        program = self._programs(num_rows).after
        result = torch.empty_like(x)
        out, first_sum, norm, _, _, _, last_sum = program.jobs
        out.source = attended.data_ptr()
        _set_sums(first_sum, norm, last_sum, x, result)
        program.run(num_rows)
        return result

    def _programs(self, num_rows: int) -> "_Programs":
        """This thread's, over a space of at least so many rows and less than twice as many."""
        capacity = 1 << max(0, num_rows - 1).bit_length()
        made: _Programs | None = getattr(self._thread, "programs", None)
        if made is None or made.space.capacity != capacity:
            made = self._thread.programs = _Programs(self, _workspace(self, capacity))
        return made


def _set_inputs(
    norm: Job, rotation: Job, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    norm.source = x.data_ptr()
    rotation.cos, rotation.sin = cos.data_ptr(), sin.data_ptr()
    rotation.rotary_dim, rotation.table_row_bytes = cos.shape[1], cos.shape[1] * 4


def _set_sums(
    first_sum: Job, norm: Job, last_sum: Job, x: torch.Tensor, result: torch.Tensor
) -> None:
    first_sum.addend = x.data_ptr()
    first_sum.result = norm.source = last_sum.addend = last_sum.result = result.data_ptr()


class _Programs:
    """A layer's passes over a workspace; sources and results outside of it are set for each call.

    Attributes:
        space: what lies between the passes.
        before: norm, product, rotation.
        after: product, sum, norm, product, gate, product, sum.
        whole: `before`, K and V written, a call, `after`.
        whole_jobs: its jobs.
    """

    def __init__(self, kernel: LayerKernel, space: "_Workspace") -> None:
        self.space = space
        before, after = self._before(kernel), self._after(kernel)
        self.before, self.after = Program(before), Program(after)
        self.whole = Program([*before, *self._writers(kernel), Job(operation=CALL), *after])
        self.whole_jobs = tuple(self.whole.jobs)

    def _writers(self, kernel: LayerKernel) -> list[Job]:
        """Of K and V as they lie behind Q."""
        widths = [heads * dim for heads, dim in kernel.heads]
        row_bytes = self.space.qkv.shape[1] * 4
        return [
            job(
                WRITE, 0, width=width, bytes_per_row=8 * width, source_row_bytes=row_bytes,
                source=self.space.qkv.data_ptr() + 4 * begin,
            )
            for width, begin in zip(widths[1:], accumulate(widths), strict=False)
        ]  # fmt: skip

    def _before(self, kernel: LayerKernel) -> list[Job]:
        (num_q, head_dim), (num_k, _), _ = kernel.heads
        rotation = job(
            ROTATE, 0, bytes_per_row=8 * (num_q + num_k) * head_dim,
            num_heads=num_q + num_k, head_dim=head_dim,
            source=self.space.qkv.data_ptr(), source_row_bytes=self.space.qkv.shape[1] * 4,
        )  # fmt: skip
        return [
            self._norm(kernel, 0),
            _product(kernel.qkv, self.space.normed, self.space.qkv),
            rotation,
        ]

    def _after(self, kernel: LayerKernel) -> list[Job]:
        width = kernel.down.inputs
        out = _product(kernel.out, self.space.attended, self.space.projected)
        gate = job(
            GATE, 0, bytes_per_row=12 * width, width=width,
            source=self.space.gate_up.data_ptr(), source_row_bytes=self.space.gate_up.shape[1] * 4,
            result=self.space.gated.data_ptr(), result_row_bytes=width * 4,
        )  # fmt: skip
        return [
            out,
            self._sum(kernel),
            self._norm(kernel, 1),
            _product(kernel.gate_up, self.space.normed, self.space.gate_up),
            gate,
            _product(kernel.down, self.space.gated, self.space.projected),
            self._sum(kernel),
        ]

    def _norm(self, kernel: LayerKernel, which: int) -> Job:
        weight, eps = kernel.norms[which]
        row_bytes = len(weight) * 4
        return job(
            NORM, 0, bytes_per_row=2 * row_bytes, width=len(weight), weight=weight.data_ptr(),
            eps=eps, source_row_bytes=row_bytes,
            result=self.space.normed.data_ptr(), result_row_bytes=row_bytes,
        )  # fmt: skip

    def _sum(self, kernel: LayerKernel) -> Job:
        width, projected = kernel.qkv.inputs, self.space.projected
        return job(
            ADD, 0, bytes_per_row=12 * width, width=width, addend_row_bytes=width * 4,
            source=projected.data_ptr(), source_row_bytes=projected.shape[1] * 4,
            result_row_bytes=width * 4,
        )  # fmt: skip


class _Workspace:
    """What lies between the passes of a layer, for layers of one shape and up to so many rows."""

    def __init__(self, kernel: LayerKernel, capacity: int) -> None:
        def rows(width: int) -> torch.Tensor:
            return torch.empty(capacity, width)

        self.capacity = capacity
        self.normed = rows(kernel.qkv.inputs)
        self.qkv = rows(kernel.qkv.padded_outputs)
        self.attended = rows(kernel.out.inputs)
        self.projected = rows(max(kernel.out.padded_outputs, kernel.down.padded_outputs))
        self.gate_up = rows(kernel.gate_up.padded_outputs)
        self.gated = rows(kernel.down.inputs)
        self._heads: tuple[Any, tuple[torch.Tensor, ...]] = (None, ())

    def heads(
        self, shapes: tuple[Heads, Heads, Heads], num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K and V as they lie in `qkv`."""
        key = (shapes, num_rows)
        if self._heads[0] != key:
            ends = list(accumulate((number * dim for number, dim in shapes), initial=0))
            rows = self.qkv[:num_rows]
            views = (
                rows[:, begin:end].view(-1, *heads)
                for heads, (begin, end) in zip(shapes, pairwise(ends), strict=True)
            )
            self._heads = key, tuple(views)
        q, k, v = self._heads[1]
        return q, k, v


def _product(panels: Panels, source: torch.Tensor, result: torch.Tensor) -> Job:
    made = product_job(panels, 0)
    made.source, made.source_row_bytes = source.data_ptr(), source.shape[1] * 4
    made.result, made.result_row_bytes = result.data_ptr(), result.shape[1] * 4
    return made


_thread = threading.local()


def _workspace(kernel: LayerKernel, capacity: int) -> _Workspace:
    """This thread's space for layers of this shape and so many rows."""
    key = (capacity, kernel.shape)
    if getattr(_thread, "key", None) != key:
        _thread.key, _thread.space = key, _Workspace(kernel, capacity)
    space: _Workspace = _thread.space
    return space
