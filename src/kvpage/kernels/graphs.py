"""Decode steps as captured CUDA graphs.

A decode step launches some hundred small kernels, and launching them one by one takes the host
longer than computing them takes the GPU. A graph is captured once and replayed by one call, but
with the same grids over the same addresses. So a step is copied into static buffers of the next
larger bucket: more sequences than it has, padded by tokens whose slot is -1, and more work items,
padded by records that return at once.

Everything but the capture itself is device-free and goes through a `Recorder`.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvpage.kernels.device_work import DeviceWork, TwinBuffer
from kvpage.kernels.work import AttentionBatch, Capacity, plan_step

_FINE_SIZES = (1, 2, 4, 8)
_SIZE_STEP = 16
_ITEM_FACTOR = 8
_NOTHING = np.empty(0, np.int64)


@attrs.frozen
class DecodeLimits:
    """The largest decode step that is ever replayed; larger ones run without a graph.

    Attributes:
        max_sequences: sequences of a step.
        max_model_len: tokens of a sequence.
        block_size: tokens per block.
        split: keys of a work item, `paged_attention.decode_split` of the model's group size.
        table_entries: blocks of all sequences of a step together.
    """

    max_sequences: int
    max_model_len: int
    block_size: int
    split: int
    table_entries: int


@attrs.frozen
class Bucket:
    """A size that is captured.

    Attributes:
        num_sequences: tokens of the step, as each sequence has one.
        num_items: programs of the attend kernel for each KV head.
    """

    num_sequences: int
    num_items: int

    def holds(self, num_sequences: int, num_items: int) -> bool:
        """Whether a step of this size can be padded to this bucket."""
        return num_sequences <= self.num_sequences and num_items <= self.num_items


def decode_buckets(limits: DecodeLimits) -> tuple[Bucket, ...]:
    """The sizes to capture, smallest first.

    Batch sizes 1, 2, 4, 8, 16, 32, 48, ... For each of them the items may be as many as the
    sequences, eight times as many, and so on up to the longest context: an empty program costs
    little but not nothing, and short contexts should not pay for long ones.
    """
    sizes = {*_FINE_SIZES, *range(_SIZE_STEP, limits.max_sequences, _SIZE_STEP)}
    sizes = {size for size in sizes if size < limits.max_sequences} | {limits.max_sequences}
    most_parts = -(-limits.max_model_len // limits.split)
    parts = {most_parts}
    while (smaller := _ITEM_FACTOR ** (len(parts) - 1)) < most_parts:
        parts.add(smaller)
    return tuple(Bucket(size, size * n) for size in sorted(sizes) for n in sorted(parts))


@attrs.frozen(eq=False)
class DecodeInputs:
    """What a model's forward pass reads in a decode step, in buffers that never move.

    Attributes:
        token_ids: `int64[B]`.
        positions: `int64[B]`, 0 for padding.
        slots: `int64[B]`, where K and V of the tokens go, -1 for padding.
        batch: the batch for `paged_attention`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    batch: AttentionBatch


@attrs.frozen(eq=False)
class DecodeStep:
    """A decode step on the host.

    Attributes:
        token_ids: `int64[S]`.
        positions: `int64[S]`.
        slots: `int64[S]`.
        batch: each sequence has one query.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    batch: AttentionBatch


Forward = Callable[[DecodeInputs], torch.Tensor]
Run = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Turns a computation on static buffers into something that is quick to repeat."""

    def warm_up(self, run: Run) -> None:
        """Run once, so that all that is compiled or allocated once is done."""

    def record(self, run: Run) -> Run:
        """A callable that repeats `run` and returns the same tensor each time."""


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, as only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def warm_up(self, run: Run) -> None:
        """Run on a side stream, as a capture will."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, run: Run) -> Run:
        """Capture `run`; the kernels in it stay loaded, as Triton's cache holds them for good."""
        graph = torch.cuda.CUDAGraph()
        # Other threads of the host program may use the GPU meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


class StaticDecode:
    """The static buffers of one bucket."""

    def __init__(self, bucket: Bucket, limits: DecodeLimits, device: torch.device) -> None:
        self.bucket = bucket
        self._buffer = TwinBuffer(3 * bucket.num_sequences, torch.int64, device)
        token_ids, positions, slots = self._buffer.device.view(3, -1)
        self.inputs = DecodeInputs(token_ids, positions, slots, _placeholder(bucket, limits))
        self._fill(_NOTHING, _NOTHING, _NOTHING)

    def load(self, step: DecodeStep) -> None:
        """Put a step in the place of the last one; the copies are queued on the current stream.

        The caller must not load again before the device has done them. A step that ends by
        reading its sampled tokens has waited for them.
        """
        self._fill(step.token_ids, step.positions, step.slots)
        for work in self._work():
            work.load(plan_step(step.batch, work.shape))

    def _fill(self, *columns: npt.NDArray[np.int64]) -> None:
        rows = self._buffer.host.numpy().reshape(3, -1)
        for row, column, padding in zip(rows, columns, (0, 0, -1), strict=True):
            row[: len(column)] = column
            row[len(column) :] = padding
        self._buffer.send()

    def _work(self) -> tuple[DeviceWork, ...]:
        """One for each sliding window that the model asked for in its warm-up."""
        return tuple(w for w in self.inputs.batch.plans if isinstance(w, DeviceWork))


class DecodeGraphs:
    """A model's decode steps, captured for every bucket."""

    def __init__(
        self, forward: Forward, limits: DecodeLimits, recorder: Recorder, device: torch.device
    ) -> None:
        """Warm up every bucket, then capture every bucket, the largest first.

        A compilation or a first allocation inside a capture would break it, so no capture begins
        before the last warm-up has ended; and what the largest graph needs serves the others.

        Args:
            forward: computes a decode step, reading nothing that changes but its inputs.
            limits: the largest step to capture.
            recorder: `CudaRecorder()` on a GPU.
            device: where the buffers live.
        """
        self._limits = limits
        largest_first = reversed(decode_buckets(limits))
        static = [StaticDecode(bucket, limits, device) for bucket in largest_first]
        for s in static:
            recorder.warm_up(partial(forward, s.inputs))
        replays = [recorder.record(partial(forward, s.inputs)) for s in static]
        self._smallest_first = list(zip(static, replays, strict=True))[::-1]

    def run(self, step: DecodeStep) -> torch.Tensor | None:
        """Replay a step.

        Returns:
            The first S rows of what `forward` returned, valid until the next run; none if the
            step is larger than all buckets.
        """
        num_sequences = len(step.batch.rows)
        num_items = int((-(-step.batch.kv_lens // self._limits.split)).sum())
        blocks = int((-(-step.batch.kv_lens // self._limits.block_size)).sum())
        if blocks > self._limits.table_entries:
            return None
        for static, replay in self._smallest_first:
            if static.bucket.holds(num_sequences, num_items):
                static.load(step)
                return replay()[:num_sequences]
        return None


def _placeholder(bucket: Bucket, limits: DecodeLimits) -> AttentionBatch:
    """A batch of the bucket's size for the kernel's checks; its plans are what gets loaded."""
    ones = np.ones(bucket.num_sequences, np.int32)
    most_entries = bucket.num_sequences * -(-limits.max_model_len // limits.block_size)
    return AttentionBatch(
        block_table=np.zeros((1, 1), np.int32),
        rows=np.zeros_like(ones),
        query_lens=ones,
        kv_lens=ones,
        block_size=limits.block_size,
        capacity=Capacity(bucket.num_items, min(most_entries, limits.table_entries)),
    )
