"""A step's work list on the device, in one buffer and by one copy.

Five arrays of integers describe a step: items and merges of both launches, and the flat block
table. They lie behind one another in one buffer, of which pinned host memory holds a twin, so
that planning a step costs one asynchronous copy and no wait.

    [ decode items | decode merges | extend items | extend merges | table ]

A captured CUDA graph replays fixed grids over fixed addresses. For it the sections have room for
the largest step, the rest of them is padding, and `load` overwrites the buffer before a replay.
The table comes last, so that only its used part has to travel.
"""

import attrs
import torch

from kvpage.kernels.work import (
    ITEM_WORDS,
    MERGE_WORDS,
    PADDING,
    AttentionBatch,
    Capacity,
    Cut,
    StepWork,
    WorkShape,
    plan_step,
)


@attrs.frozen
class Layout:
    """How many records each section of the buffer has room for, in the order of the buffer."""

    decode_items: int
    decode_merges: int
    extend_items: int
    extend_merges: int
    table_entries: int

    @property
    def words(self) -> list[int]:
        """The length of each section in int32. All but the last are multiples of 16 bytes."""
        return [
            self.decode_items * ITEM_WORDS,
            self.decode_merges * MERGE_WORDS,
            self.extend_items * ITEM_WORDS,
            self.extend_merges * MERGE_WORDS,
            self.table_entries,
        ]

    @classmethod
    def of(cls, work: StepWork) -> "Layout":
        """Just enough room for a step."""
        return cls(
            len(work.decode.items),
            len(work.decode.merges),
            len(work.extend.items),
            len(work.extend.merges),
            len(work.table),
        )

    @classmethod
    def padded(cls, capacity: Capacity, num_sequences: int) -> "Layout":
        """Room for any decode step within these bounds."""
        return cls(capacity.num_items, num_sequences, 0, 0, capacity.table_entries)


@attrs.frozen(eq=False)
class Launch:
    """The records of one kernel launch on the device; the lengths give the grids.

    Attributes:
        items: `int32[N, 8]`, as in `work`.
        merges: `int32[M, 4]`, as in `work`.
        num_parts: upper bound of the partial results.
        queries: upper bound of the queries of an item.
    """

    items: torch.Tensor
    merges: torch.Tensor
    num_parts: int
    queries: int


class TwinBuffer:
    """Device memory and its twin on the host, which is page-locked so that copies do not block.

    Attributes:
        host: written by the owner.
        device: what `send` last sent, on the device.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.host = torch.full((size,), PADDING, dtype=dtype, pin_memory=device.type == "cuda")
        self.device = torch.full((size,), PADDING, dtype=dtype, device=device)

    # A model runs in inference mode, and what is made there can be changed only there.
    @torch.inference_mode()
    def send(self, size: int | None = None) -> None:
        """Queue a copy of the first `size` elements, or of all, on the current stream."""
        self.device[:size].copy_(self.host[:size], non_blocking=True)


class DeviceWork:
    """Two launches and a table in device memory.

    Attributes:
        shape: how steps are cut up.
        layout: room of the sections.
        table: `int32[E]` on the device.
        decode: for sequences with one query.
        extend: for sequences with several queries.
    """

    def __init__(
        self, shape: WorkShape, layout: Layout, parts: tuple[int, int], device: torch.device
    ) -> None:
        self.shape = shape
        self.layout = layout
        self._buffer = TwinBuffer(sum(layout.words), torch.int32, device)
        self._host_sections = [s.numpy() for s in torch.split(self._buffer.host, layout.words)]
        items, merges, more_items, more_merges, self.table = torch.split(
            self._buffer.device, layout.words
        )
        self.decode = _launch(items, merges, parts[0], shape.decode)
        self.extend = _launch(more_items, more_merges, parts[1], shape.extend)

    def load(self, work: StepWork) -> None:
        """Replace what the buffer holds; the copy is queued on the current stream.

        The caller must not load again before the device has done the copy. A step that ends by
        reading its sampled tokens has waited for it.

        Raises:
            ValueError: the step is larger than the layout.
        """
        self._refuse_if_larger(Layout.of(work))
        decode, extend = work.decode, work.extend
        records = (decode.items, decode.merges, extend.items, extend.merges)
        for room, section in zip(self._host_sections[:-1], records, strict=True):
            room[: section.size] = section.reshape(-1)
            room[section.size :] = PADDING
        self._host_sections[-1][: len(work.table)] = work.table
        self._buffer.send(sum(self.layout.words[:-1]) + len(work.table))

    def _refuse_if_larger(self, needed: Layout) -> None:
        for name, records in attrs.asdict(needed).items():
            room = getattr(self.layout, name)
            if records > room:
                raise ValueError(f"the step has {records} {name}, there is room for {room}")


def device_work(batch: AttentionBatch, shape: WorkShape, device: torch.device) -> DeviceWork:
    """The batch's work on the device, planned and copied for the first layer that asks."""
    return batch.planned((shape, device), lambda: _build(batch, shape, device))


def _build(batch: AttentionBatch, shape: WorkShape, device: torch.device) -> DeviceWork:
    if batch.capacity is not None:
        layout = Layout.padded(batch.capacity, len(batch.rows))
        return DeviceWork(shape, layout, (layout.decode_items, 0), device)
    work = plan_step(batch, shape)
    parts = (work.decode.num_parts, work.extend.num_parts)
    on_device = DeviceWork(shape, Layout.of(work), parts, device)
    on_device.load(work)
    return on_device


def _launch(items: torch.Tensor, merges: torch.Tensor, num_parts: int, cut: Cut) -> Launch:
    return Launch(items.view(-1, ITEM_WORDS), merges.view(-1, MERGE_WORDS), num_parts, cut.queries)
