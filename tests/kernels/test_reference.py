"""The reference kernel against torch's own attention, and by hand."""

import numpy as np
import pytest
import torch

from kvpage.kernels import reference
from kvpage.kernels.work import AttentionBatch
from kvpage.testing.attention import PLACEMENTS, AttentionShape, Placement, attention_problem

SHAPE = AttentionShape(dtype=torch.float32)


def contents(seed: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V of a sequence as one contiguous piece, KV heads repeated, in float64."""
    problem = attention_problem(SHAPE, [kv_len], [kv_len], seeds=[seed], placement="contiguous")
    k, v = (pool[:kv_len].double() for pool in (problem.k_pool, problem.v_pool))
    return problem.q.double(), k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)


def dense(seed: int, query_len: int, kv_len: int, window: int = 0) -> torch.Tensor:
    """What torch's attention gives for the last queries of a sequence."""
    q, k, v = (t.transpose(0, 1) for t in contents(seed, kv_len))
    distance = torch.arange(kv_len)[-query_len:, None] - torch.arange(kv_len)
    visible = (distance >= 0) & ((distance < window) if window else True)
    out = torch.nn.functional.scaled_dot_product_attention(
        q[:, -query_len:], k, v, attn_mask=visible, scale=16**-0.5
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("window", [0, 7])
def test_equals_dense_attention(placement: Placement, window: int) -> None:
    """Gathered through any table, in a batch of decode, chunk and prompt."""
    query_lens, kv_lens = [1, 5, 9], [33, 24, 9]
    problem = attention_problem(SHAPE, query_lens, kv_lens, placement=placement, window=window)
    expected = [
        dense(i, *lengths, window)
        for i, lengths in enumerate(zip(query_lens, kv_lens, strict=True))
    ]
    torch.testing.assert_close(problem.answer(), torch.cat(expected), rtol=0, atol=1e-12)


def two_tokens(**options: object) -> torch.Tensor:
    """Scores 2 and 0 before options, values 1 and 0: the output is the first token's weight."""
    k_pool = torch.tensor([[[2.0]], [[0.0]]], dtype=torch.float64)
    v_pool = torch.tensor([[[1.0]], [[0.0]]], dtype=torch.float64)
    one = np.ones(1, np.int32)
    batch = AttentionBatch(np.array([[0, 1]], np.int32), 0 * one, one, 2 * one, 1)
    q = torch.ones(1, 1, 1, dtype=torch.float64)
    return reference.paged_attention(q, k_pool, v_pool, batch, scale=1.0, **options).squeeze()  # type: ignore[arg-type]


def softmax_of(*scores: float) -> float:
    """The weight of the first score."""
    return float(torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)[0])


def test_softcap_by_hand() -> None:
    """A cap of 1 makes the score of 2 tanh(2)."""
    assert float(two_tokens(softcap=1.0)) == pytest.approx(softmax_of(np.tanh(2.0), 0.0))


def test_sinks_by_hand() -> None:
    """A sink takes its share of the weight and gives nothing."""
    out = two_tokens(sinks=torch.tensor([1.5]))
    assert float(out) == pytest.approx(softmax_of(2.0, 0.0, 1.5))


def test_alibi_by_hand() -> None:
    """The token that is one further away loses one slope."""
    out = two_tokens(alibi_slopes=torch.tensor([0.5]))
    assert float(out) == pytest.approx(softmax_of(1.5, 0.0))


def test_scales_by_hand() -> None:
    """K's scale multiplies the score, V's the output."""
    out = two_tokens(kv_scales=(torch.tensor([0.5]), torch.tensor([3.0])))
    assert float(out) == pytest.approx(3 * softmax_of(1.0, 0.0))


def test_half_precision_is_computed_in_float32() -> None:
    """Only the output is rounded."""
    problem = attention_problem(AttentionShape(dtype=torch.bfloat16), [4], [40])
    out = problem.solve(reference.paged_attention)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), problem.answer(), rtol=2**-8, atol=1e-6)


def test_writes_into_the_given_output() -> None:
    """`out` is what is returned."""
    problem = attention_problem(SHAPE, [4], [40])
    out = torch.empty(4, 4, 16)
    assert problem.solve(reference.paged_attention, out=out) is out
    assert torch.equal(out, problem.solve(reference.paged_attention))


def test_slot_minus_one_is_skipped() -> None:
    """Only the token with a slot is written."""
    k_pool, v_pool = torch.zeros(3, 1, 2), torch.zeros(3, 1, 2)
    new = torch.ones(2, 1, 2)
    reference.write_kv(new, 2 * new, k_pool, v_pool, torch.tensor([-1, 1]))
    assert k_pool[:, 0, 0].tolist() == [0, 1, 0]
    assert v_pool[:, 0, 0].tolist() == [0, 2, 0]


def test_block_copies_read_before_they_write() -> None:
    """A swap and a chain."""
    k_pool = torch.arange(8.0).view(8, 1, 1)
    v_pool = 10 * k_pool
    copies = torch.tensor([[0, 1], [1, 0], [1, 2]])
    reference.copy_blocks(k_pool, v_pool, copies, block_size=2)
    assert k_pool.flatten().tolist() == [2, 3, 0, 1, 2, 3, 6, 7]
    assert torch.equal(v_pool, 10 * k_pool)
