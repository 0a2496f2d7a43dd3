"""Decoder layers on a CPU in one call, or each in two: before attention, and after it.

Between two calls of the host, at few rows, the processor waits: a layer of a small model takes
about as long as the dozen operators that transformers makes of it need to be called. Here all of it
is passes of a `Program`: as many layers as follow upon each other, and each half of a layer, for
whoever attends in a way of his own.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvpage.kernels.cpu_product import Panels
from kvpage.kernels.cpu_rows import (
    ADD,
    CALL,
    JOB,
    NORM,
    ROTATE,
    WRITE,
    WRITERS,
    Job,
    Program,
    job,
    product_job,
)

T = TypeVar("T")

Norm: TypeAlias = tuple[torch.Tensor, float]
"""Weight and epsilon."""

Heads: TypeAlias = tuple[int, int]
"""Their number and their dim."""

Pools: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Of K and V, `[slots, heads, dim]` each."""

# The passes of a layer, in order.
(
    FIRST_NORM, QKV, ROTATION, WRITE_K, WRITE_V, ATTENTION,
    OUT, FIRST_SUM, SECOND_NORM, GATE_UP, DOWN, LAST_SUM, NUM_PASSES,
) = range(13)  # fmt: skip


@attrs.frozen(eq=False)
class Attention:
    """What each layer of a run calls once its K and V are written.

    Attributes:
        entry: address of a C function.
        arguments: `int64[layers]`.
        num_items: `int64[layers]`, how many items threads may share.
    """

    entry: int
    arguments: npt.NDArray[np.int64]
    num_items: npt.NDArray[np.int64]


class LayerKernel:
    """The weights of a layer, and what is computed with them. Threads may share it.

    Args:
        qkv: weights of Q, K and V side by side.
        out: of the output projection.
        gate_up: of gate and up, `LANES` outputs of each in turns.
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

    def is_like(self, other: "LayerKernel") -> bool:
        """Whether both can be in one run."""
        return (self.shape, self.heads) == (other.shape, other.heads)

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
        halves = self._halves(num_rows)
        norm, _, rotation = halves.before.jobs
        norm.source = x.data_ptr()
        rotation.cos, rotation.sin = cos.data_ptr(), sin.data_ptr()
        rotation.rotary_dim, rotation.table_row_bytes = cos.shape[1], cos.shape[1] * 4
        halves.before.run(num_rows)
        return halves.space.heads(self.heads, num_rows)

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
        program = self._halves(num_rows).after
        result = torch.empty_like(x)
        out, first_sum, norm, _, _, last_sum = program.jobs
        out.source, first_sum.addend = attended.data_ptr(), x.data_ptr()
        first_sum.result = norm.source = last_sum.addend = last_sum.result = result.data_ptr()
        program.run(num_rows)
        return result

    def _halves(self, num_rows: int) -> "_Halves":
        """This thread's, over a space of at least so many rows and less than twice as many."""
        capacity = _capacity(num_rows)
        made: _Halves | None = getattr(self._thread, "halves", None)
        if made is None or made.space.capacity != capacity:
            made = self._thread.halves = _Halves(self, _workspace(self, capacity))
        return made


class LayerRun:
    """Layers that follow upon each other, in one call. Threads may share it.

    Args:
        layers: of the same shape and heads.
    """

    def __init__(self, layers: Sequence[LayerKernel]) -> None:
        self.layers = tuple(layers)
        self._thread = threading.local()

    @property
    def heads(self) -> tuple[Heads, Heads, Heads]:
        """Of Q, K and V."""
        return self.layers[0].heads

    def of_pools(self, pools: Sequence[Pools], build: Callable[[], T]) -> T:
        """What is derived from pools, which it must not keep: built when others come."""
        known: _Known | None = getattr(self._thread, "known", None)
        if known is None or not known.are(pools):
            self._thread.derived, self._thread.known = build(), _Known(pools)
        derived: T = self._thread.derived
        return derived

    def between(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each layer puts Q, and where it wants the output of attention: `[T, heads, dim]`.

        Valid until this thread computes another number of rows.
        """
        space = self._whole(num_rows).space
        (num_q, _), _, (_, v_dim) = self.heads
        return space.heads(self.heads, num_rows)[0], space.attended[:num_rows].view(
            num_rows, num_q, v_dim
        )

    def compute(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pools: Sequence[Pools],
        slots: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """All of the layers.

        Args:
            x: `float32[T, hidden]`, contiguous.
            cos: `float32[T, R]`, of positions, contiguous; both halves of it.
            sin: likewise.
            pools: of each layer, for which `is_writable` is true; written.
            slots: `int64[T]`, contiguous, where K and V go.
            attention: what to call when they are written, with Q and the output `between`.

        Returns:
            `float32[T, hidden]`: the last layer's output.
        """
        num_rows = x.shape[0]
        whole = self._whole(num_rows)
        jobs, result = whole.jobs, torch.empty_like(x)
        # The first layer adds to `x`, each other one to what the one before it gave.
        sources = np.full(len(jobs), result.data_ptr())
        sources[0] = x.data_ptr()
        jobs[:, FIRST_NORM]["source"] = jobs[:, FIRST_SUM]["addend"] = sources
        jobs[:, FIRST_SUM]["result"] = jobs[:, SECOND_NORM]["source"] = result.data_ptr()
        jobs[:, LAST_SUM]["addend"] = jobs[:, LAST_SUM]["result"] = result.data_ptr()
        rotations, calls = jobs[:, ROTATION], jobs[:, ATTENTION]
        rotations["cos"], rotations["sin"] = cos.data_ptr(), sin.data_ptr()
        rotations["rotary_dim"], rotations["table_row_bytes"] = cos.shape[1], cos.shape[1] * 4
        whole.write_to(pools)
        jobs[:, WRITE_K : WRITE_V + 1]["slots"] = slots.data_ptr()
        calls["entry"], calls["argument"] = attention.entry, attention.arguments
        calls["num_items"] = attention.num_items
        whole.program.run(num_rows)
        return result

    def _whole(self, num_rows: int) -> "_Whole":
        """This thread's, over a space of at least so many rows and less than twice as many."""
        capacity = _capacity(num_rows)
        made: _Whole | None = getattr(self._thread, "whole", None)
        if made is None or made.space.capacity != capacity:
            made = _Whole(self.layers, _workspace(self.layers[0], capacity))
            self._thread.whole = made
        return made


class HeadKernel:
    """The last norm and the head, in one call. Threads may share it.

    Args:
        norm: of what the last layer gave.
        head: weights, from there to logits.
    """

    def __init__(self, norm: Norm, head: Panels) -> None:
        self._norm, self._head = norm, head
        self._thread = threading.local()

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """`float32[T, hidden]`, contiguous, to `float32[T, outputs]`, rows maybe farther apart."""
        normed = torch.empty_like(x)
        result = x.new_empty(len(x), self._head.padded_outputs)
        program: Program | None = getattr(self._thread, "program", None)
        if program is None:
            program = self._thread.program = Program(
                [_norm_job(self._norm, normed), _product(self._head, normed, result)]
            )
        norm, product = program.jobs
        norm.source, norm.result = x.data_ptr(), normed.data_ptr()
        product.source, product.result = normed.data_ptr(), result.data_ptr()
        program.run(len(x))
        return result[:, : self._head.outputs]


class _Known:
    """Pools, by weak references: an engine that ends gives their memory back."""

    def __init__(self, pools: Sequence[Pools]) -> None:
        self._pools = [weakref.ref(pool) for each in pools for pool in each]

    def are(self, pools: Sequence[Pools]) -> bool:
        """Whether these are the same."""
        given = [pool for each in pools for pool in each]
        return len(given) == len(self._pools) and all(
            known() is pool for known, pool in zip(self._pools, given, strict=True)
        )


class _Halves:
    """A layer's passes over a workspace; sources and results outside of it are set for each call.

    Attributes:
        space: what lies between the passes.
        before: norm, product, rotation.
        after: product, sum, norm, product, product, sum.
    """

    def __init__(self, kernel: LayerKernel, space: "_Workspace") -> None:
        self.space = space
        self.before = Program(_before(kernel, space))
        self.after = Program(_after(kernel, space))


class _Whole:
    """All passes of layers over a workspace, which all of them use.

    Attributes:
        space: what lies between the passes.
        program: the passes.
        jobs: the same as `[layers, NUM_PASSES]`, with the fields of `Job`.
    """

    def __init__(self, layers: Sequence[LayerKernel], space: "_Workspace") -> None:
        self.space = space
        self.program = Program(
            [
                each
                for kernel in layers
                for each in (
                    *_before(kernel, space),
                    *_writers(kernel, space),
                    Job(operation=CALL),
                    *_after(kernel, space),
                )
            ]
        )
        self.jobs = np.frombuffer(memoryview(self.program.jobs), JOB).reshape(
            len(layers), NUM_PASSES
        )
        self._known = _Known(())

    def write_to(self, pools: Sequence[Pools]) -> None:
        """Let K and V of each layer be written to its pools."""
        if self._known.are(pools):  # as in every step of an engine
            return
        self._known = _Known(pools)
        for which, of_layers in zip((WRITE_K, WRITE_V), zip(*pools, strict=True), strict=True):
            writers = self.jobs[:, which]
            writers["operation"] = [WRITERS[pool.dtype] for pool in of_layers]
            writers["result"] = [pool.data_ptr() for pool in of_layers]
            writers["result_row_bytes"] = [
                pool.stride(0) * pool.element_size() for pool in of_layers
            ]


def _capacity(num_rows: int) -> int:
    return 1 << max(0, num_rows - 1).bit_length()


def _before(kernel: LayerKernel, space: "_Workspace") -> list[Job]:
    (num_q, head_dim), (num_k, _), _ = kernel.heads
    rotation = job(
        ROTATE, 0, bytes_per_row=8 * (num_q + num_k) * head_dim,
        num_heads=num_q + num_k, head_dim=head_dim,
        source=space.qkv.data_ptr(), source_row_bytes=space.qkv.shape[1] * 4,
    )  # fmt: skip
    return [
        _norm_job(kernel.norms[0], space.normed),
        _product(kernel.qkv, space.normed, space.qkv),
        rotation,
    ]


def _writers(kernel: LayerKernel, space: "_Workspace") -> list[Job]:
    """Of K and V as they lie behind Q."""
    widths = [heads * dim for heads, dim in kernel.heads]
    row_bytes = space.qkv.shape[1] * 4
    return [
        job(
            WRITE, 0, width=width, bytes_per_row=8 * width, source_row_bytes=row_bytes,
            source=space.qkv.data_ptr() + 4 * begin,
        )
        for width, begin in zip(widths[1:], accumulate(widths), strict=False)
    ]  # fmt: skip


def _after(kernel: LayerKernel, space: "_Workspace") -> list[Job]:
    gate_up = _product(kernel.gate_up, space.normed, space.gate_up)
    gate_up.gated, gate_up.gated_row_bytes = space.gated.data_ptr(), space.gated.shape[1] * 4
    return [
        _product(kernel.out, space.attended, space.projected),
        _sum(kernel, space),
        _norm_job(kernel.norms[1], space.normed),
        gate_up,
        _product(kernel.down, space.gated, space.projected),
        _sum(kernel, space),
    ]


def _norm_job(norm: Norm, result: torch.Tensor) -> Job:
    weight, eps = norm
    row_bytes = len(weight) * 4
    return job(
        NORM, 0, bytes_per_row=2 * row_bytes, width=len(weight), weight=weight.data_ptr(),
        eps=eps, source_row_bytes=row_bytes,
        result=result.data_ptr(), result_row_bytes=row_bytes,
    )  # fmt: skip


def _sum(kernel: LayerKernel, space: "_Workspace") -> Job:
    width, projected = kernel.qkv.inputs, space.projected
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
