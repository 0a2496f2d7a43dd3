"""Decode steps in static buffers: what a captured graph replays, without the capture."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvpage.kernels import attention_backend, cache_write
from kvpage.kernels.graphs import (
    CudaRecorder,
    DecodeGraphs,
    DecodeInputs,
    DecodeLimits,
    DecodeStep,
    Recorder,
    Run,
)
from kvpage.kernels.paged_attention import decode_split, paged_attention
from kvpage.kernels.work import AttentionBatch
from kvpage.model import KVPools, share_model
from kvpage.testing.attention import AttentionProblem, AttentionShape, attention_problem
from tests.model.tiny import tiny_model

SHAPE = AttentionShape(num_heads=2, num_kv_heads=1)
ROWS = np.arange(4, dtype=np.int32)
LIMITS = DecodeLimits(
    max_sequences=4, max_model_len=600, block_size=8, split=decode_split(2), table_entries=150
)


class PlainRecorder:
    """Repeats a computation by running it again, as a machine without graphs must."""

    def warm_up(self, run: Run) -> None:
        """Run once."""
        run()

    def record(self, run: Run) -> Run:
        """The computation itself."""
        return run


@pytest.fixture
def recorder(device: str) -> Recorder:
    """The capture of the device."""
    return CudaRecorder() if device == "cuda" else PlainRecorder()


def layer(
    problem: AttentionProblem, windows: tuple[int, ...]
) -> Callable[[DecodeInputs], torch.Tensor]:
    """A model of attention layers with these windows, whose Q, K and V are its token ids' rows."""
    table = torch.randn(50, 2, 16, generator=torch.Generator().manual_seed(9)).to(problem.q.device)

    @torch.inference_mode()
    def forward(inputs: DecodeInputs) -> torch.Tensor:
        x = table[inputs.token_ids]
        cache_write.write_kv(x[:, :1], x[:, 1:], problem.k_pool, problem.v_pool, inputs.slots)
        outs = [
            paged_attention(
                x, problem.k_pool, problem.v_pool, inputs.batch, window=window, **problem.options
            )
            for window in windows
        ]
        return torch.stack(outs, dim=1)

    return forward


def step_of(batch: AttentionBatch) -> DecodeStep:
    """A step of the batch, each sequence continued by a token of its own."""
    last = batch.kv_lens.astype(np.int64) - 1
    blocks = batch.block_table[batch.rows, last // 8].astype(np.int64)
    tokens = np.arange(len(last), dtype=np.int64) + 7
    return DecodeStep(tokens, last, blocks * 8 + last % 8, batch)


def eagerly(step: DecodeStep, device: str) -> DecodeInputs:
    """The step without static buffers, planned afresh."""
    b = step.batch
    fresh = AttentionBatch(b.block_table, b.rows, b.query_lens, b.kv_lens, b.block_size)
    token_ids, positions, slots = (
        torch.from_numpy(column).to(device)
        for column in (step.token_ids, step.positions, step.slots)
    )
    return DecodeInputs(token_ids, positions, slots, fresh)


def with_lengths(problem: AttentionProblem, kv_lens: list[int]) -> AttentionBatch:
    """A decode step of the problem's first sequences, as long as this."""
    rows = np.arange(len(kv_lens), dtype=np.int32)
    lengths = np.array(kv_lens, np.int32)
    return AttentionBatch(problem.batch.block_table, rows, np.ones_like(rows), lengths, 8)


def test_a_replayed_step_equals_an_eager_one(recorder: Recorder, device: str) -> None:
    """Padding to a bucket changes no bit, for layers with different windows, step after step."""
    problem = attention_problem(SHAPE, [1, 1, 1], [300, 5, 33], device=device)
    forward = layer(problem, windows=(0, 20))
    graphs = DecodeGraphs(forward, LIMITS, recorder, torch.device(device))
    # The second step has the bucket of the first and less to do: nothing may be left over.
    for kv_lens in ([300, 5, 33], [16, 5, 33], [299, 4], [16]):
        step = step_of(with_lengths(problem, kv_lens))
        expected = forward(eagerly(step, device)).clone()
        out = graphs.run(step)
        assert out is not None
        assert torch.equal(expected, out)


def test_padding_rows_write_nothing_and_are_zero(device: str) -> None:
    """Rows that pad a step touch no slot, and carry zeros, not what was in memory before."""
    problem = attention_problem(SHAPE, [1, 1, 1], [20, 5, 33], device=device)
    seen: list[torch.Tensor] = []

    class Spy(PlainRecorder):
        def record(self, run: Run) -> Run:
            def spied() -> torch.Tensor:
                seen.append(run())
                return seen[-1]

            return spied

    graphs = DecodeGraphs(layer(problem, (0,)), LIMITS, Spy(), torch.device(device))
    pools_before = problem.k_pool.clone()
    step = step_of(problem.batch)
    graphs.run(step)
    assert len(seen[0]) == 4
    assert (seen[0][3] == 0).all()
    untouched = torch.ones(len(pools_before), dtype=torch.bool)
    untouched[torch.from_numpy(step.slots)] = False
    torch.testing.assert_close(
        problem.k_pool[untouched], pools_before[untouched], rtol=0, atol=0, equal_nan=True
    )


def test_a_model_s_decode_step_replayed(recorder: Recorder, device: str) -> None:
    """A whole model behind static buffers gives the logits of the plain step.

    Gemma 2 has layers with and without a window, so two work lists follow the step. A matrix
    product may round a row by the number of rows, so the logits are close, not equal.
    """
    model = share_model(tiny_model("gemma2").to(device))
    kernels = attention_backend("triton")
    pools = KVPools(model.layers, 160, kernels, dtype=model.dtype, device=model.device)
    for k_pool, v_pool in pools.layers:
        k_pool.normal_()
        v_pool.normal_()
    table = np.random.default_rng(0).permutation(20).astype(np.int32).reshape(2, 10)
    lengths = np.array([70, 9], np.int32)
    step = step_of(AttentionBatch(table, ROWS[:2], np.ones_like(ROWS[:2]), lengths, 8))

    def forward(inputs: DecodeInputs) -> torch.Tensor:
        keep = torch.arange(len(inputs.token_ids), device=device)
        attention = pools.step(inputs.batch, inputs.slots)
        return model.logits(inputs.token_ids, inputs.positions, attention, keep)

    limits = DecodeLimits(2, max_model_len=80, block_size=8, split=256, table_entries=20)
    graphs = DecodeGraphs(forward, limits, recorder, torch.device(device))
    expected = forward(eagerly(step, device))
    out = graphs.run(step)
    assert out is not None
    torch.testing.assert_close(expected, out, rtol=0, atol=1e-5)
