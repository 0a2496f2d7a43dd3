"""The planner: steps cut into work items."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage.kernels.work import (
    FIRST_POSITION,
    FIRST_TOKEN,
    KV_BEGIN,
    KV_END,
    NUM_QUERIES,
    PART,
    TABLE_START,
    WHOLE,
    AttentionBatch,
    Cut,
    StepWork,
    WorkList,
    WorkShape,
    flat_table,
    plan_step,
)

BLOCK_SIZE = 8
SHAPE = WorkShape(decode=Cut(1, 256), extend=Cut(16, 1024))


def batch_of(*lengths: tuple[int, int]) -> AttentionBatch:
    """Sequences of `(query_len, kv_len)`; block j of sequence i is `1000 * i + j`."""
    query_lens, kv_lens = np.array(lengths, np.int32).reshape(-1, 2).T
    rows = np.arange(len(lengths), dtype=np.int32)
    width = -(-int(kv_lens.max(initial=1)) // BLOCK_SIZE) + 2
    table = (1000 * rows[:, None] + np.arange(width)).astype(np.int32)
    return AttentionBatch(table, rows, query_lens, kv_lens, BLOCK_SIZE)


def test_a_short_decode_is_one_item() -> None:
    """One query, all its keys, no part."""
    work = plan_step(batch_of((1, 100)), SHAPE)
    assert work.decode.items.tolist() == [[0, 0, 1, 99, 0, 100, WHOLE, 0]]
    assert work.decode.merges.tolist() == []
    assert work.extend.items.tolist() == []


def test_a_long_decode_is_cut_at_multiples_and_merged() -> None:
    """600 keys are cut at 256 and 512; the longest parts come first."""
    work = plan_step(batch_of((1, 600)), SHAPE)
    assert work.decode.items[:, [KV_BEGIN, KV_END, PART]].tolist() == [
        [0, 256, 0],
        [256, 512, 1],
        [512, 600, 2],
    ]
    assert work.decode.merges.tolist() == [[0, 1, 0, 3]]
    assert work.decode.num_parts == 3


def test_a_window_begins_in_the_middle_of_a_part() -> None:
    """Of 600 keys the last 100 are seen, on both sides of the cut at 512."""
    work = plan_step(batch_of((1, 600)), WorkShape(SHAPE.decode, SHAPE.extend, window=100))
    assert sorted(work.decode.items[:, [KV_BEGIN, KV_END]].tolist()) == [[500, 512], [512, 600]]


def test_a_prompt_is_cut_into_blocks_of_queries() -> None:
    """20 queries behind 30 cached tokens: 16 and 4 of them, each with the keys up to its last."""
    work = plan_step(batch_of((20, 50)), SHAPE)
    columns = [FIRST_TOKEN, NUM_QUERIES, FIRST_POSITION, KV_BEGIN, KV_END]
    assert work.extend.items[:, columns].tolist() == [[16, 4, 46, 0, 50], [0, 16, 30, 0, 46]]
    assert work.decode.items.tolist() == []


def test_decoding_and_extending_sequences_go_into_separate_launches() -> None:
    """Each launch has its own parts; tokens are counted over the whole step."""
    work = plan_step(batch_of((1, 300), (5, 2000), (1, 10)), SHAPE)
    assert sorted(work.decode.items[:, FIRST_TOKEN].tolist()) == [0, 0, 6]
    assert work.extend.items[:, FIRST_TOKEN].tolist() == [1, 1]
    assert work.decode.merges.tolist() == [[0, 1, 0, 2]]
    assert work.extend.merges.tolist() == [[1, 5, 0, 2]]


def test_the_flat_table_has_only_what_is_read() -> None:
    """Three blocks of the first sequence, one of the second, whatever their rows are."""
    batch = batch_of((1, 17), (1, 8))
    swapped = AttentionBatch(
        batch.block_table, batch.rows[::-1], batch.query_lens, batch.kv_lens, BLOCK_SIZE
    )
    table, starts = flat_table(swapped)
    assert table.tolist() == [1000, 1001, 1002, 0]
    assert starts.tolist() == [0, 3]


def test_an_empty_step_has_no_work() -> None:
    """No sequences, no records."""
    work = plan_step(batch_of(), SHAPE)
    assert [len(work.table), len(work.decode.items), len(work.extend.merges)] == [0, 0, 0]


lengths = st.tuples(st.integers(1, 70), st.integers(0, 3000)).map(lambda n: (n[0], sum(n)))


def own_work(work: StepWork, first_token: int, num_tokens: int) -> list[npt.NDArray[np.int32]]:
    """The records of one sequence, with tokens counted from its first and parts left out."""
    records = []
    for launch in (work.decode, work.extend):
        for rows, ignored in ((launch.items, [TABLE_START, PART]), (launch.merges, [2])):
            first = rows[:, FIRST_TOKEN if rows is launch.items else 0]
            mine = rows[(first >= first_token) & (first < first_token + num_tokens)].copy()
            mine[:, FIRST_TOKEN if rows is launch.items else 0] -= first_token
            mine[:, ignored] = 0
            records.append(mine)
    return records


@given(st.lists(lengths, min_size=1, max_size=5), st.sampled_from([0, 1, 100, 300]))
def test_a_sequence_is_cut_the_same_alone_and_in_any_batch(
    sequences: list[tuple[int, int]], window: int
) -> None:
    """Its records, in their order, depend on nothing but its own lengths."""
    shape = WorkShape(SHAPE.decode, SHAPE.extend, window)
    together = plan_step(batch_of(*sequences), shape)
    first_token = 0
    for query_len, kv_len in sequences:
        alone = plan_step(batch_of((query_len, kv_len)), shape)
        for mine, others in zip(
            own_work(alone, 0, query_len),
            own_work(together, first_token, query_len),
            strict=True,
        ):
            np.testing.assert_array_equal(mine, others)
        first_token += query_len


def keys_of_queries(launch: WorkList) -> dict[int, list[tuple[int, int]]]:
    """For each token, the key ranges of the items that hold it, in order."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for item in launch.items:
        for token in range(item[FIRST_TOKEN], item[FIRST_TOKEN] + item[NUM_QUERIES]):
            seen.setdefault(token, []).append((int(item[KV_BEGIN]), int(item[KV_END])))
    return {token: sorted(ranges) for token, ranges in seen.items()}


@given(st.lists(lengths, min_size=1, max_size=5), st.sampled_from([0, 1, 100, 300]))
def test_every_query_sees_each_of_its_keys_once(
    sequences: list[tuple[int, int]], window: int
) -> None:
    """The ranges of a query adjoin, and cover what it attends to."""
    work = plan_step(batch_of(*sequences), WorkShape(SHAPE.decode, SHAPE.extend, window))
    seen = keys_of_queries(work.decode) | keys_of_queries(work.extend)
    token = 0
    for query_len, kv_len in sequences:
        for position in range(kv_len - query_len, kv_len):
            ranges = seen.pop(token)
            assert ranges[0][0] <= (max(0, position - window + 1) if window else 0)
            assert ranges[-1][1] > position
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
            token += 1
    assert not seen


@given(st.lists(lengths, min_size=1, max_size=5))
def test_every_part_is_written_once_and_merged_once(sequences: list[tuple[int, int]]) -> None:
    """Items and merges agree on parts and tokens."""
    work = plan_step(batch_of(*sequences), SHAPE)
    for launch in (work.decode, work.extend):
        written = {
            int(item[PART]): (int(item[FIRST_TOKEN]), int(item[NUM_QUERIES]))
            for item in launch.items
            if item[PART] != WHOLE
        }
        merged = {
            part: (int(token), int(queries))
            for token, queries, first, count in launch.merges
            for part in range(first, first + count)
        }
        assert written == merged
        assert sorted(written) == list(range(launch.num_parts))


def test_longest_items_come_first() -> None:
    """A long item that starts last would be waited for."""
    items = plan_step(batch_of((1, 10), (1, 300), (1, 100)), SHAPE).decode.items
    spans = (items[:, KV_END] - items[:, KV_BEGIN]).tolist()
    assert spans == sorted(spans, reverse=True)


def test_plans_are_made_once_for_each_key() -> None:
    """Layers that ask for the same plan share it."""
    batch = batch_of((1, 10))
    made: list[str] = []

    def plan(name: str) -> str:
        made.append(name)
        return name

    for name in ("window 0", "window 8", "window 0"):
        assert batch.planned(name, lambda name=name: plan(name)) == name  # type: ignore[misc]
    assert made == ["window 0", "window 8"]
    assert batch.plans == ("window 0", "window 8")


@pytest.mark.parametrize("bad", [(0, 5), (6, 5)])
def test_lengths_that_cannot_be_are_refused(bad: tuple[int, int]) -> None:
    """A sequence has at least one query, and no more queries than tokens."""
    with pytest.raises(ValueError, match=f"{bad[0]} queries and {bad[1]} tokens"):
        plan_step(batch_of((1, 10), bad), SHAPE)


def test_a_table_that_is_too_short_is_refused() -> None:
    """The message has both numbers."""
    batch = batch_of((1, 10))
    short = AttentionBatch(batch.block_table[:, :1], batch.rows, batch.query_lens, batch.kv_lens, 8)
    with pytest.raises(ValueError, match=r"2 blocks, .* has 1 entries"):
        plan_step(short, SHAPE)
