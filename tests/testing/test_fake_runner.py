"""`FakeRunner` gives a sequence its own tokens back and raises when it cannot."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpage import AsyncEngine, SamplingParams
from kvpage.blocks import PoolGeometry
from kvpage.plan import StepPlan
from kvpage.request import EngineModel
from kvpage.sampling import Logprobs, SamplingRows
from kvpage.testing import CorruptCache, FakeRunner, arbitrary_token, undisturbed

GEOMETRY = PoolGeometry(num_blocks=8, block_size=4, max_model_len=16)
FIRST = [5, 6, 7, 8, 9]
"""Tokens that fill one block and begin another."""


def plan(
    tokens: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    *,
    computed: Sequence[int] | None = None,
    copies: Sequence[tuple[int, int]] = (),
    sample: Sequence[int] = (),
) -> StepPlan:
    """A step of the rows 0, 1, ...: all their tokens, of which `computed` were there before."""
    known = [0] * len(tokens) if computed is None else list(computed)
    table = np.full((len(tables), 4), -1, np.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    new = [
        (row, position)
        for row, first in enumerate(known)
        for position in range(first, len(tokens[row]))
    ]
    positions = np.array([position for _, position in new], np.int64)
    blocks_of_new = table[[row for row, _ in new], positions // 4]
    lengths = np.array([len(t) for t in tokens], np.int32)
    return StepPlan(
        rows=np.arange(len(tokens), dtype=np.int32),
        query_lens=lengths - np.array(known, np.int32),
        kv_lens=lengths,
        token_ids=np.array([tokens[row][position] for row, position in new], np.int64),
        positions=positions,
        slots=blocks_of_new.astype(np.int64) * 4 + positions % 4,
        block_tables=table,
        copies=np.array(copies, np.int64).reshape(-1, 2),
        sample_tokens=np.zeros(len(sample), np.int64),
        sample_rows=np.array(sample, np.int64),
        sample_indices=np.zeros(len(sample), np.int64),
        sampling=SamplingRows.empty(len(sample)),
    )


def started(**options: Any) -> FakeRunner:
    """A runner that has computed `FIRST` for row 0, in blocks 2 and 5."""
    runner = FakeRunner(GEOMETRY, **options)
    runner.execute(plan([FIRST], [[2, 5]]))
    return runner


def test_the_next_token_is_chosen_from_what_the_sequence_reads() -> None:
    """The chooser sees exactly the sequence's tokens."""
    seen: list[list[int]] = []

    def three(tokens: npt.NDArray[np.int64]) -> int:
        seen.append(tokens.tolist())
        return 3

    runner = FakeRunner(GEOMETRY, next_token=three)

    result = runner.execute(plan([FIRST], [[2, 5]], sample=[0]))

    assert seen == [FIRST]
    assert result.token_ids.tolist() == [3]


def test_a_sequence_in_the_runner_is_an_undisturbed_one() -> None:
    """Step by step, the runner generates what `undisturbed` says."""
    runner = FakeRunner(GEOMETRY)
    tokens = list(FIRST)

    for computed in (0, 5, 6, 7):
        step = plan([tokens], [[2, 5]], computed=[computed], sample=[0])
        tokens.append(int(runner.execute(step).token_ids[0]))

    assert tokens[5:] == undisturbed(FIRST, 4)


def test_undisturbed_ends_with_a_stop_token() -> None:
    """The stop token is the last one."""
    second = undisturbed(FIRST, 5)[1]

    assert undisturbed(FIRST, 5, stop_token_ids=[second]) == undisturbed(FIRST, 5)[:2]


def test_the_arbitrary_token_depends_on_order() -> None:
    """Equal tokens in another order are followed by another token."""
    assert arbitrary_token(np.array([1, 2])) != arbitrary_token(np.array([2, 1]))


def test_a_move_with_its_copy_is_read() -> None:
    """After a copy, the sequence reads the new block."""
    runner = started()

    runner.execute(plan([[*FIRST, 1]], [[7, 5]], computed=[5], copies=[(2, 7)]))


def test_copies_read_all_sources_before_they_write() -> None:
    """Two blocks change places in one list."""
    runner = started()

    runner.execute(plan([[*FIRST, 1]], [[5, 2]], computed=[5], copies=[(2, 5), (5, 2)]))


def test_a_move_without_its_copy_is_found() -> None:
    """The new block holds nothing yet."""
    with pytest.raises(CorruptCache, match=r"row 0 reads token -1 at position 0 \(block 7\)"):
        started().execute(plan([[*FIRST, 1]], [[7, 5]], computed=[5]))


def test_a_block_in_the_wrong_place_is_found() -> None:
    """The right blocks in the wrong order."""
    with pytest.raises(CorruptCache, match="row 0 reads"):
        started().execute(plan([[*FIRST, 1]], [[5, 2]], computed=[5]))


def test_a_block_lent_twice_is_found() -> None:
    """What another sequence wrote shows where it ends and the first one's tokens go on."""
    runner = started()
    runner.execute(plan([[1, 2]], [[2]]))

    with pytest.raises(CorruptCache, match=r"row 0 reads token 7 at position 2 \(block 2\)"):
        runner.execute(plan([[*FIRST, 1]], [[2, 5]], computed=[5]))


def test_equal_tokens_after_another_beginning_are_found() -> None:
    """A block with the very tokens, but of a sequence that began otherwise, is not its own."""
    runner = started()
    runner.execute(plan([[0, 0, 0, 0, 9]], [[3, 4]]))

    with pytest.raises(CorruptCache, match=r"position 4 \(block 4\)"):
        runner.execute(plan([[*FIRST, 1]], [[2, 4]], computed=[5]))


def test_two_rows_that_write_one_slot_are_found() -> None:
    """Within a step, the one that wrote first reads what the other wrote."""
    with pytest.raises(CorruptCache, match="row 0 reads token 2"):
        FakeRunner(GEOMETRY).execute(plan([[1], [2]], [[3], [3]]))


def test_a_row_without_a_block_is_found() -> None:
    """A table that is too short is named, not read from its end."""
    step = plan([FIRST], [[2, 5]])
    step.block_tables[0, 1] = -1

    with pytest.raises(CorruptCache, match="a row of 5 tokens has blocks for the first 4 only"):
        FakeRunner(GEOMETRY).execute(step)


def test_known_tokens_find_a_table_swapped_as_a_whole() -> None:
    """A sequence that reads another one's beginning throughout is found by what it should read."""
    known: npt.NDArray[np.int32] = np.zeros((2, 16), np.int32)
    known[0, :6] = [*FIRST, 1]
    runner = started(known_tokens=known)
    known[0, :5] = [4, 4, 4, 4, 4]

    with pytest.raises(CorruptCache, match="row 0 reads token 5 at position 0"):
        runner.execute(plan([[*FIRST, 1]], [[2, 5]], computed=[5]))


def test_a_closed_runner_is_not_used_again() -> None:
    """Executing after close is an error."""
    runner = started()
    runner.close()

    with pytest.raises(RuntimeError, match="closed"):
        runner.execute(plan([FIRST], [[2, 5]]))


async def test_log_probabilities_are_given_where_they_are_asked_for() -> None:
    """One for each token, of the output and of the prompt: the runner is sure of all."""
    engine = AsyncEngine.from_runner(FakeRunner(GEOMETRY), GEOMETRY, EngineModel("fake", 251))
    params = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=0)
    async with engine:
        completion = await engine.complete(FIRST, params)
        silent = await engine.complete(FIRST, SamplingParams(max_tokens=4))
    of_output = [Logprobs(0.0, ((token, 0.0),)) for token in completion.token_ids]
    assert list(completion.logprobs) == of_output
    assert list(completion.prompt_logprobs) == [None, *[Logprobs(0.0, ())] * (len(FIRST) - 1)]
    assert silent.logprobs == ()
