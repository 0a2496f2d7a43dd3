"""The Triton attention kernel against a float64 oracle."""

from typing import Any

import pytest
import torch

from kvpage.kernels.paged_attention import Tiling, Tilings, paged_attention
from kvpage.testing.attention import (
    PLACEMENTS,
    AttentionProblem,
    AttentionShape,
    Placement,
    attention_problem,
)

TOLERANCES = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
BLOCK_SIZES = (1, 3, 8, 16, 24, 64)
MANY_CUTS = Tilings(Tiling(16, 32, split=64), Tiling(64, 32, split=128))
"""So that short sequences are cut, which no default tiling does."""


def error(problem: AttentionProblem, **more: Any) -> float:
    """The largest deviation from the oracle; NaN if there is a NaN."""
    out = problem.solve(paged_attention, **more)
    return float((out.double() - problem.answer()).abs().max())


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_lengths_around_block_boundaries(block_size: int, device: str) -> None:
    """Sequences that just do not fill, fill, and just overflow their blocks are attended right."""
    lengths = [2 * block_size - 1, 2 * block_size, 2 * block_size + 1]
    shape = AttentionShape(block_size=block_size, num_kv_heads=1)
    problem = attention_problem(shape, [1, 1, 1], lengths, device=device)
    assert error(problem) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prompts_around_block_boundaries(block_size: int, device: str) -> None:
    """So are whole prompts of these lengths."""
    lengths = [max(2, block_size - 1), block_size + 1, 2 * block_size]
    shape = AttentionShape(block_size=block_size, num_kv_heads=1)
    problem = attention_problem(shape, lengths, lengths, device=device)
    assert error(problem) < TOLERANCES[torch.float32]


def test_decode_chunk_and_prompt_in_one_step(device: str) -> None:
    """A step may mix sequences with one query, with a chunk of a prompt and with all of it."""
    problem = attention_problem(AttentionShape(), [1, 40, 37, 1], [300, 150, 37, 1], device=device)
    assert error(problem) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (7, 1), (5, 1), (14, 2), (24, 1)])
def test_groups_of_any_size(heads: tuple[int, int], device: str) -> None:
    """Groups that do not fill the packed rows neither leak nor take in their neighbours."""
    shape = AttentionShape(num_heads=heads[0], num_kv_heads=heads[1])
    problem = attention_problem(shape, [1, 12], [20, 30], device=device)
    assert error(problem) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (112, 112), (192, 128), (24, 8), (256, 256)])
def test_head_dims_that_are_no_powers_of_two(dims: tuple[int, int], device: str) -> None:
    """Head dims are padded, and K and V may have different ones."""
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=dims[0], value_dim=dims[1])
    problem = attention_problem(shape, [1, 5], [40, 9], device=device)
    assert error(problem) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, device: str) -> None:
    """In 16 bits the error is that of the output's rounding, and of the weights' for V."""
    shape = AttentionShape(dtype=dtype, head_dim=64)
    problem = attention_problem(shape, [1, 33], [270, 120], device=device)
    assert error(problem) < TOLERANCES[dtype]


@pytest.mark.parametrize("length", [6, 7, 8, 14, 30])
@pytest.mark.parametrize("query_len", [1, 6])
def test_sliding_window(length: int, query_len: int, device: str) -> None:
    """Window 7: shorter, equal and longer sequences; what is behind it is evicted, and NaN."""
    shape = AttentionShape(block_size=3, num_kv_heads=1)
    problem = attention_problem(shape, [query_len], [length], window=7, device=device)
    assert error(problem) < TOLERANCES[torch.float32]


def test_a_window_much_shorter_than_the_sequence(device: str) -> None:
    """Tiles before the window are not read at all, in blocks that are larger than a tile too."""
    for block_size in (8, 128):
        shape = AttentionShape(block_size=block_size, num_kv_heads=1)
        problem = attention_problem(shape, [1, 70], [500, 400], window=50, device=device)
        assert (problem.batch.block_table[0, : 450 // block_size] == -1).all()
        assert error(problem) < TOLERANCES[torch.float32]


def test_softcap(device: str) -> None:
    """Scores are capped, from where a cap does little up to where it does all."""
    for softcap in (0.3, 5.0, 50.0):
        problem = attention_problem(
            AttentionShape(num_kv_heads=1), [1, 9], [40, 30], softcap=softcap, device=device
        )
        assert error(problem) < TOLERANCES[torch.float32]


def test_softcap_far_beyond_the_cap(device: str) -> None:
    """Scores of thousands of times the cap are plus or minus the cap, not NaN."""
    problem = attention_problem(
        AttentionShape(num_kv_heads=1), [1], [40], softcap=0.5, scale=3000.0, device=device
    )
    assert error(problem) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("tilings", [None, MANY_CUTS])
def test_sinks(tilings: Tilings | None, device: str) -> None:
    """A sink takes part in the softmax once, whether or not the sequence is cut."""
    sinks = torch.linspace(-2, 6, 4, device=device)
    problem = attention_problem(AttentionShape(), [1, 9], [150, 140], sinks=sinks, device=device)
    assert error(problem, tilings=tilings) < TOLERANCES[torch.float32]


def test_sinks_of_minus_infinity_change_nothing(device: str) -> None:
    """The neutral sink: the result is that without sinks, bit for bit."""
    sinks = torch.full((4,), float("-inf"), device=device)
    problem = attention_problem(AttentionShape(), [1, 9], [50, 40], device=device)
    plain = problem.solve(paged_attention)
    assert torch.equal(plain, problem.solve(paged_attention, sinks=sinks))


def test_alibi(device: str) -> None:
    """Each head's slope makes far keys count less."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    problem = attention_problem(
        AttentionShape(), [1, 9], [60, 40], alibi_slopes=slopes, device=device
    )
    assert error(problem) < TOLERANCES[torch.float32]


def test_all_options_together(device: str) -> None:
    """Window, cap, sinks and slopes do not get into each other's way, cut or not."""
    heads = torch.arange(4, device=device)
    problem = attention_problem(
        AttentionShape(), [1, 20], [150, 140], window=90, softcap=3.0, device=device,
        sinks=0.1 * heads, alibi_slopes=0.01 * heads,
    )  # fmt: skip
    assert error(problem) < TOLERANCES[torch.float32]
    assert error(problem, tilings=MANY_CUTS) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("length", [63, 64, 65, 128, 129, 200])
def test_cut_sequences(length: int, device: str) -> None:
    """Sequences cut into parts of 64 keys: one part, full parts, and a last part of one key."""
    shape = AttentionShape(num_kv_heads=1, block_size=24)
    problem = attention_problem(shape, [1], [length], device=device)
    assert error(problem, tilings=MANY_CUTS) < TOLERANCES[torch.float32]


def test_more_parts_than_one_round_of_the_merge(device: str) -> None:
    """The merge takes 16 parts at a time; 19 parts need two rounds."""
    tilings = Tilings(Tiling(16, 16, split=16), Tiling(64, 32, split=128))
    shape = AttentionShape(num_kv_heads=1, num_heads=1)
    problem = attention_problem(shape, [1], [16 * 18 + 3], device=device)
    assert error(problem, tilings=tilings) < TOLERANCES[torch.float32]


def test_cut_chunks_with_parts_that_some_queries_do_not_see(device: str) -> None:
    """The first queries of a chunk see no key of the last part: its weight is zero, not NaN."""
    problem = attention_problem(
        AttentionShape(num_kv_heads=1, num_heads=3), [21], [130], window=100, device=device
    )
    assert error(problem, tilings=MANY_CUTS) < TOLERANCES[torch.float32]


def test_large_scores(device: str) -> None:
    """Scores of hundreds overflow no exponential."""
    problem = attention_problem(
        AttentionShape(num_kv_heads=1), [1], [90], scale=60.0, device=device
    )
    assert error(problem, tilings=MANY_CUTS) < 1e-3


@pytest.mark.parametrize("tilings", [None, MANY_CUTS])
def test_very_negative_scores_behind_a_tile_without_keys(
    tilings: Tilings | None, device: str
) -> None:
    """A row that sees nothing of its first tile does not take 0 for its largest score so far.

    All scores are about -200, so that beside a score of 0 they would vanish.
    """
    shape = AttentionShape(num_kv_heads=1)
    problem = attention_problem(shape, [150], [150], window=5, scale=20.0, device=device)
    problem.k_pool.abs_()
    problem.q.copy_(-problem.q.abs())
    assert error(problem, tilings=tilings) < 1e-3


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_equal_bits_wherever_the_blocks_are(placement: Placement, device: str) -> None:
    """Tables of all allocators give the same output for the same contents."""
    lengths = [1, 1, 30], [200, 33, 60]
    problem = attention_problem(AttentionShape(), *lengths, placement=placement, device=device)
    in_order = attention_problem(AttentionShape(), *lengths, placement="contiguous", device=device)
    outs = [p.solve(paged_attention, tilings=MANY_CUTS) for p in (problem, in_order)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("block_size", [1, 8, 24])
def test_equal_bits_at_any_block_size(block_size: int, device: str) -> None:
    """The order of summation follows positions, not blocks."""
    outs = [
        attention_problem(
            AttentionShape(block_size=size, num_kv_heads=1), [1, 20], [150, 60], device=device
        ).solve(paged_attention, tilings=MANY_CUTS)
        for size in (block_size, 64)
    ]
    assert torch.equal(*outs)


def test_equal_bits_alone_and_in_any_batch(device: str) -> None:
    """A request's output depends on nothing beside it."""
    shape = AttentionShape()
    query_lens, kv_lens = [1, 17, 1, 5, 1], [150, 100, 3, 65, 64]
    together = attention_problem(shape, query_lens, kv_lens, device=device)
    outs = torch.split(together.solve(paged_attention, tilings=MANY_CUTS), query_lens)
    for i, out in enumerate(outs):
        alone = attention_problem(
            shape, [query_lens[i]], [kv_lens[i]], seeds=[i], device=device
        ).solve(paged_attention, tilings=MANY_CUTS)
        assert torch.equal(alone, out)


def test_equal_bits_however_a_prompt_is_chunked(device: str) -> None:
    """The queries of a chunk give what they give in the whole prompt.

    Chunks begin at multiples of an item's 16 queries here, since the interpreter's matrix product
    (numpy's) rounds a row by its place in the matrix.
    """
    shape = AttentionShape(num_kv_heads=1)
    whole = attention_problem(shape, [150], [150], seeds=[3], device=device)
    out = whole.solve(paged_attention, tilings=MANY_CUTS)
    for begin, end in ((0, 32), (32, 144), (144, 150)):
        chunk = attention_problem(shape, [end - begin], [150], seeds=[3], device=device)
        chunk.batch.kv_lens[0] = end
        q = whole.q[begin:end]
        part = paged_attention(
            q, chunk.k_pool, chunk.v_pool, chunk.batch, tilings=MANY_CUTS, **chunk.options
        )
        assert torch.equal(out[begin:end], part)


def test_queries_in_the_layout_of_the_projections(device: str) -> None:
    """Q may be a view with other strides: `[Hq, T, D]` transposed, or a slice of a fused QKV."""
    problem = attention_problem(AttentionShape(num_kv_heads=1), [1, 9], [20, 30], device=device)
    expected = problem.solve(paged_attention)
    transposed = problem.q.transpose(0, 1).contiguous().transpose(0, 1)
    fused = torch.cat([problem.q, problem.q.new_full(problem.q.shape, float("nan"))], dim=1)
    for q in (transposed, fused[:, :4]):
        out = paged_attention(q, problem.k_pool, problem.v_pool, problem.batch, **problem.options)
        assert torch.equal(expected, out)


def test_writes_into_the_given_output(device: str) -> None:
    """`out` is written and returned, and nothing beside it."""
    problem = attention_problem(AttentionShape(num_kv_heads=1), [1, 9], [20, 30], device=device)
    out = torch.full((12, 4, 16), 7.0, device=device)
    returned = problem.solve(paged_attention, out=out[1:11])
    assert returned.data_ptr() == out[1:].data_ptr()
    assert torch.equal(out[1:11], problem.solve(paged_attention))
    assert (out[[0, 11]] == 7.0).all()


def test_no_sequences(device: str) -> None:
    """An empty step has an empty output."""
    problem = attention_problem(AttentionShape(), [1], [5], device=device)
    nobody = problem.batch.rows[:0]
    batch = type(problem.batch)(problem.batch.block_table, nobody, nobody, nobody, 8)
    out = paged_attention(problem.q[:0], problem.k_pool, problem.v_pool, batch, **problem.options)
    assert out.shape == (0, 4, 16)
