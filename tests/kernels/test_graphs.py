"""Buckets and static buffers of decode steps. Kernels in them: `triton_kernels/test_replay.py`."""

import numpy as np
import torch

from kvpage.kernels.graphs import (
    Bucket,
    DecodeGraphs,
    DecodeInputs,
    DecodeLimits,
    DecodeStep,
    Run,
    decode_buckets,
)
from kvpage.kernels.work import AttentionBatch

CPU = torch.device("cpu")
LIMITS = DecodeLimits(
    max_sequences=4, max_model_len=2048, block_size=16, split=256, table_entries=300
)


class PlainRecorder:
    """Repeats a computation by running it again, and keeps account."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def warm_up(self, run: Run) -> None:
        self.log.append(f"warm up {len(run())}")

    def record(self, run: Run) -> Run:
        self.log.append(f"record {len(run())}")
        return run


def columns(inputs: DecodeInputs) -> torch.Tensor:
    """A model whose output shows its inputs: `[B, 3]`."""
    return torch.stack([inputs.token_ids, inputs.positions, inputs.slots], dim=1)


def step_of(kv_lens: list[int]) -> DecodeStep:
    """Sequences of these lengths, with slots 100, 101, ..."""
    lengths = np.array(kv_lens, np.int32)
    rows = np.arange(len(lengths), dtype=np.int32)
    table = np.zeros((len(lengths), 1 + max(kv_lens) // 16), np.int32)
    batch = AttentionBatch(table, rows, np.ones_like(rows), lengths, 16)
    index = rows.astype(np.int64)
    return DecodeStep(index + 7, lengths.astype(np.int64) - 1, index + 100, batch)


def test_buckets_hold_every_step_within_the_limits() -> None:
    """The largest has the limits' sizes: 8 parts of 256 keys for each sequence."""
    buckets = decode_buckets(LIMITS)
    assert buckets[-1] == Bucket(4, 32)
    assert [b.num_sequences for b in buckets] == [1, 1, 2, 2, 4, 4]


def test_bucket_sizes_grow_in_steps() -> None:
    """Small batches have buckets of their own, large ones every 16."""
    limits = DecodeLimits(50, 256, 16, split=256, table_entries=300)
    sizes = [b.num_sequences for b in decode_buckets(limits)]
    assert sizes == [1, 2, 4, 8, 16, 32, 48, 50]


def test_one_sequence_has_one_size() -> None:
    """The smallest limits there are."""
    assert decode_buckets(DecodeLimits(1, 100, 16, 256, 300)) == (Bucket(1, 1),)


def test_all_buckets_are_warm_before_the_first_is_recorded() -> None:
    """And the largest is recorded first, so that its memory serves the others."""
    recorder = PlainRecorder()
    DecodeGraphs(columns, LIMITS, recorder, CPU)
    sizes = [4, 4, 2, 2, 1, 1]
    assert recorder.log == [f"warm up {n}" for n in sizes] + [f"record {n}" for n in sizes]


def test_a_step_is_padded_and_its_own_rows_returned() -> None:
    """Three sequences in a bucket of four; the fourth row has no slot."""
    outputs: list[torch.Tensor] = []

    def spied(inputs: DecodeInputs) -> torch.Tensor:
        outputs.append(columns(inputs))
        return outputs[-1]

    graphs = DecodeGraphs(spied, LIMITS, PlainRecorder(), CPU)
    out = graphs.run(step_of([5, 9, 17]))
    assert out is not None
    assert out.tolist() == [[7, 4, 100], [8, 8, 101], [9, 16, 102]]
    assert outputs[-1].tolist() == [*out.tolist(), [0, 0, -1]]


def test_nothing_of_a_larger_step_is_left() -> None:
    """The next step in the same bucket sees its own tokens and padding."""
    outputs: list[torch.Tensor] = []

    def spied(inputs: DecodeInputs) -> torch.Tensor:
        outputs.append(columns(inputs))
        return outputs[-1]

    graphs = DecodeGraphs(spied, LIMITS, PlainRecorder(), CPU)
    graphs.run(step_of([5, 9, 17, 3]))
    graphs.run(step_of([6, 7, 8]))
    assert outputs[-1][3].tolist() == [0, 0, -1]


def test_long_contexts_take_a_bucket_with_more_items() -> None:
    """One sequence of 300 tokens needs two items, and gets the bucket of eight."""
    sizes: list[int] = []

    class SizeRecorder(PlainRecorder):
        def record(self, run: Run) -> Run:
            number = len(self.log)
            self.log.append("")

            def noted() -> torch.Tensor:
                sizes.append(number)
                return run()

            return noted

    graphs = DecodeGraphs(columns, LIMITS, SizeRecorder(), CPU)
    graphs.run(step_of([256]))
    graphs.run(step_of([257]))
    # Recorded largest first after six warm-ups: the smallest bucket last.
    assert sizes == [11, 10]


def test_a_step_beyond_the_limits_is_not_replayed() -> None:
    """Too many sequences or blocks: the caller runs it without a graph."""
    graphs = DecodeGraphs(columns, LIMITS, PlainRecorder(), CPU)
    assert graphs.run(step_of([5] * 5)) is None
    assert graphs.run(step_of([2048, 2048, 1000])) is None
