"""Work lists in device buffers."""

import numpy as np
import pytest
import torch

from kvpage.kernels.device_work import DeviceWork, Layout, device_work
from kvpage.kernels.work import AttentionBatch, Capacity, Cut, StepWork, WorkShape, plan_step

CPU = torch.device("cpu")
SHAPE = WorkShape(decode=Cut(1, 16), extend=Cut(4, 64))


def batch_of(*lengths: tuple[int, int], capacity: Capacity | None = None) -> AttentionBatch:
    """Sequences of `(query_len, kv_len)` in blocks of 8."""
    query_lens, kv_lens = np.array(lengths, np.int32).T
    rows = np.arange(len(lengths), dtype=np.int32)
    table = np.arange(len(lengths) * 20, dtype=np.int32).reshape(-1, 20)
    return AttentionBatch(table, rows, query_lens, kv_lens, 8, capacity)


def sections(work: DeviceWork) -> list[list[int]]:
    """All that a kernel would find on the device."""
    tensors = (work.decode.items, work.decode.merges, work.extend.items, work.extend.merges)
    return [t.flatten().tolist() for t in tensors] + [work.table.tolist()]


def records(work: StepWork) -> list[list[int]]:
    """The same of a plan on the host."""
    arrays = (work.decode.items, work.decode.merges, work.extend.items, work.extend.merges)
    return [a.flatten().tolist() for a in arrays] + [work.table.tolist()]


def test_a_batch_s_work_arrives_whole() -> None:
    """Both launches and the table, exactly as planned."""
    batch = batch_of((1, 50), (7, 100), (1, 3))
    assert sections(device_work(batch, SHAPE, CPU)) == records(plan_step(batch, SHAPE))


def test_a_step_is_planned_once_for_each_shape() -> None:
    """All layers with the same window share one copy."""
    batch = batch_of((1, 50))
    windowed = WorkShape(SHAPE.decode, SHAPE.extend, window=9)
    first = device_work(batch, SHAPE, CPU)
    assert device_work(batch, windowed, CPU) is not first
    assert device_work(batch, SHAPE, CPU) is first
    assert batch.plans == (first, device_work(batch, windowed, CPU))


def test_sections_are_aligned() -> None:
    """Each begins at a multiple of 16 bytes, or a kernel would be compiled anew."""
    work = device_work(batch_of((1, 50), (7, 100), (1, 30)), SHAPE, CPU)
    base = work.decode.items.data_ptr()
    for tensor in (work.decode.merges, work.extend.items, work.extend.merges, work.table):
        assert (tensor.data_ptr() - base) % 16 == 0


def words(work: DeviceWork) -> set[int]:
    """All numbers in the buffer."""
    return {word for section in sections(work) for word in section}


def padded_work() -> DeviceWork:
    """Room for two decoding sequences, five items and twelve blocks."""
    placeholder = batch_of((1, 1), (1, 1), capacity=Capacity(5, 12))
    return device_work(placeholder, SHAPE, CPU)


def test_static_buffers_begin_as_padding() -> None:
    """A warm-up runs over them and does nothing."""
    assert words(padded_work()) == {-1}


def test_static_buffers_take_one_step_after_another() -> None:
    """At the same addresses, padded behind the records of the step."""
    work = padded_work()
    addresses = [work.decode.items.data_ptr(), work.table.data_ptr()]
    for batch in (batch_of((1, 50)), batch_of((1, 3), (1, 20))):
        plan = plan_step(batch, SHAPE)
        work.load(plan)
        for found, expected in zip(sections(work)[:4], records(plan)[:4], strict=True):
            assert found == expected + [-1] * (len(found) - len(expected))
        assert sections(work)[4][: len(plan.table)] == plan.table.tolist()
    assert addresses == [work.decode.items.data_ptr(), work.table.data_ptr()]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([(1, 96), (1, 1)], "7 decode_items, there is room for 5"),
        ([(1, 1)] * 3 + [(3, 9)], "1 extend_items, there is room for 0"),
    ],
)
def test_a_step_that_is_too_large_is_refused(lengths: list[tuple[int, int]], message: str) -> None:
    """Before anything is overwritten."""
    work = padded_work()
    with pytest.raises(ValueError, match=message):
        work.load(plan_step(batch_of(*lengths), SHAPE))
    assert words(work) == {-1}


def test_a_layout_has_room_for_its_step() -> None:
    """In the order of the buffer."""
    assert Layout.of(plan_step(batch_of((1, 50), (7, 100)), SHAPE)) == Layout(4, 1, 4, 2, 20)
