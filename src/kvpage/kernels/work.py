"""Host side of paged attention: what a step asks of the kernel, and how the work is cut up.

Pure numpy over integers. A GPU kernel takes one fixed-size record per program; this module turns
a step, in which one sequence may have ten keys and another a hundred thousand, into a flat list
of records of about equal work. Nothing here depends on anything but a sequence's own lengths:
the cuts of a sequence are the same alone and in any batch, so its results are too, bit for bit.

Dims: S sequences, T query tokens, E entries of the flat block table, N items, M merges.

A *work item* is `int32[8]`, "attend these queries to these keys":

    [table_start, first_token, num_queries, first_position, kv_begin, kv_end, part, 0]

Queries are tokens `first_token, ...` of the step, at positions `first_position, ...`; keys are
positions `[kv_begin, kv_end)`, whose blocks are named by the flat table from `table_start` on. An
item with `part == -1` sees all the keys of its queries and writes their final output. Otherwise
its keys are one part of several, and it writes partial result number `part`. `table_start == -1`
marks padding: nothing to do.

A *merge* is `int32[4]`, `[first_token, num_queries, first_part, num_parts]`: combine adjacent
partial results into the final output. `num_queries < 1` marks padding.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import attrs
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
PlanT = TypeVar("PlanT")

ITEM_WORDS = 8
MERGE_WORDS = 4
TABLE_START, FIRST_TOKEN, NUM_QUERIES, FIRST_POSITION, KV_BEGIN, KV_END, PART = range(7)
PADDING = -1
WHOLE = -1


@attrs.frozen
class Capacity:
    """Upper bounds for the decode steps that a captured graph may replay.

    Attributes:
        num_items: work items of a step.
        table_entries: blocks of all sequences of a step together.
    """

    num_items: int
    table_entries: int


@attrs.frozen(eq=False)
class AttentionBatch:
    """Which tokens of a step attend to which slots. One object a step, shared by all layers.

    A step packs the queries of S sequences into T tokens without padding. Sequence `i` owns
    `query_lens[i]` adjacent tokens; its queries are the last ones of its `kv_lens[i]` tokens, so
    query `j` sits at position `kv_lens[i] - query_lens[i] + j` and attends to every position up
    to its own. Position `p` lives in slot `block_table[rows[i], p // block_size] * block_size +
    p % block_size`. Entries behind a sliding window may be -1 and are never read.

    Attributes:
        block_table: `int32[R, W]`, the block ids of R rows.
        rows: `int32[S]`, the row of each sequence.
        query_lens: `int32[S]`, each at least 1, sum T.
        kv_lens: `int32[S]`, tokens in the cache once this step's K and V are written.
        block_size: tokens per block.
        capacity: set if this batch stands for others of at most this size in a captured graph.
    """

    block_table: Ints
    rows: Ints
    query_lens: Ints
    kv_lens: Ints
    block_size: int
    capacity: Capacity | None = None
    # Any: each kernel keeps plans of types of its own here.
    _plans: dict[Hashable, Any] = attrs.field(factory=dict, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """T, the queries of all sequences."""
        return int(self.query_lens.sum())

    @property
    def plans(self) -> tuple[object, ...]:
        """All that `planned` has built, in order."""
        return tuple(self._plans.values())

    def planned(self, key: Hashable, build: Callable[[], PlanT]) -> PlanT:
        """What a kernel derives from this batch: built for the first layer that asks, then kept.

        Args:
            key: everything beside the batch that the plan depends on.
            build: makes the plan; its type must follow from the key.
        """
        if key not in self._plans:
            self._plans[key] = build()
        return cast(PlanT, self._plans[key])


@attrs.frozen
class Cut:
    """The largest piece of work that one item may hold.

    Attributes:
        queries: queries per item.
        keys: keys per item; a sequence is cut at the multiples of this position.
    """

    queries: int
    keys: int


@attrs.frozen
class WorkShape:
    """What a plan depends on beside the batch.

    Attributes:
        decode: for sequences with one query.
        extend: for sequences with several.
        window: width of the sliding window in tokens, 0 for none.
    """

    decode: Cut
    extend: Cut
    window: int = 0


@attrs.frozen(eq=False)
class WorkList:
    """The records of one kernel launch, longest items first.

    Attributes:
        items: `int32[N, 8]`.
        merges: `int32[M, 4]`.
        num_parts: partial results that the items write and the merges read.
    """

    items: Ints
    merges: Ints
    num_parts: int


NO_WORK = WorkList(np.zeros((0, ITEM_WORDS), np.int32), np.zeros((0, MERGE_WORDS), np.int32), 0)


@attrs.frozen(eq=False)
class StepWork:
    """The work of a step: one launch for its decoding sequences, one for the others.

    Attributes:
        table: `int32[E]`, the used parts of the block table's rows, one behind the other.
        decode: items of one query.
        extend: items of several queries.
    """

    table: Ints
    decode: WorkList
    extend: WorkList


def plan_step(batch: AttentionBatch, shape: WorkShape) -> StepWork:
    """Cut a step into work items. Cost: a fixed number of numpy calls, linear in their output.

    Raises:
        ValueError: a sequence has no queries, or more than tokens, or the table is too short.
    """
    _check(batch)
    table, table_starts = flat_table(batch)
    first_tokens = np.cumsum(batch.query_lens) - batch.query_lens
    sequences = np.stack([table_starts, first_tokens, batch.query_lens, batch.kv_lens], axis=1)
    decoding = batch.query_lens == 1
    return StepWork(
        table,
        plan_launch(sequences[decoding], shape.decode, shape.window),
        plan_launch(sequences[~decoding], shape.extend, shape.window),
    )


def flat_table(batch: AttentionBatch) -> tuple[Ints, Ints]:
    """Only what a step reads of the block table, so that only that travels to the device.

    Returns:
        `int32[E]`, block ids, and `int32[S]`, where in it each sequence begins.
    """
    blocks = -(-batch.kv_lens // batch.block_size)
    owner, column = _expand(blocks)
    table = batch.block_table[batch.rows[owner], column].astype(np.int32, copy=False)
    return table, (np.cumsum(blocks) - blocks).astype(np.int32)


def _check(batch: AttentionBatch) -> None:
    wrong = np.flatnonzero((batch.query_lens < 1) | (batch.query_lens > batch.kv_lens))
    if len(wrong):
        i = wrong[0]
        raise ValueError(
            f"sequence {i} has {batch.query_lens[i]} queries and {batch.kv_lens[i]} tokens; "
            "there must be a query, and its K and V among the tokens"
        )
    blocks = -(-int(batch.kv_lens.max(initial=0)) // batch.block_size)
    if blocks > batch.block_table.shape[1]:
        raise ValueError(
            f"the longest sequence has {blocks} blocks, a row of the block table has "
            f"{batch.block_table.shape[1]} entries"
        )


def plan_launch(sequences: npt.NDArray[np.integer[Any]], cut: Cut, window: int) -> WorkList:
    """Cut sequences into work items.

    Args:
        sequences: `[S, 4]`, a row `(table_start, first_token, query_len, kv_len)` for each.
        cut: the largest item.
        window: width of the sliding window in tokens, 0 for none.
    """
    if not len(sequences):
        return NO_WORK  # most steps only decode, and numpy takes its time over nothing, too
    return _cut_keys(_cut_queries(sequences, cut.queries, window), cut.keys)


def _cut_queries(sequences: npt.NDArray[np.integer[Any]], queries: int, window: int) -> Ints:
    """Items of at most this many queries, each with all the keys that its queries see."""
    owner, index = _expand(-(-sequences[:, 2] // queries))
    table_start, first_token, query_len, kv_len = sequences[owner].T
    offset = index * queries

    items = np.zeros((len(owner), ITEM_WORDS), np.int32)
    items[:, TABLE_START] = table_start
    items[:, FIRST_TOKEN] = first_token + offset
    items[:, NUM_QUERIES] = np.minimum(queries, query_len - offset)
    items[:, FIRST_POSITION] = kv_len - query_len + offset
    items[:, KV_END] = items[:, FIRST_POSITION] + items[:, NUM_QUERIES]
    if window:
        items[:, KV_BEGIN] = np.maximum(0, items[:, FIRST_POSITION] - window + 1)
    return items


def _cut_keys(whole: Ints, keys: int) -> WorkList:
    """Cut items at the multiples of `keys`; those that fall into several parts need a merge."""
    first_cut = whole[:, KV_BEGIN] // keys
    num_parts = (whole[:, KV_END] - 1) // keys - first_cut + 1
    origin, index = _expand(num_parts)
    boundary = (first_cut[origin] + index) * keys

    items = whole[origin]
    items[:, KV_BEGIN] = np.maximum(items[:, KV_BEGIN], boundary)
    items[:, KV_END] = np.minimum(items[:, KV_END], boundary + keys)
    is_part = num_parts[origin] > 1
    items[:, PART] = np.where(is_part, np.cumsum(is_part) - 1, WHOLE)
    # Longest first: a long item that starts last would keep the whole GPU waiting.
    order = np.argsort(items[:, KV_BEGIN] - items[:, KV_END], kind="stable")
    return WorkList(items[order], _merges(whole, num_parts), int(is_part.sum()))


def _merges(whole: Ints, num_parts: npt.NDArray[np.integer[Any]]) -> Ints:
    """`int32[M, 4]`: one merge for each item that was cut into several parts."""
    cut = num_parts > 1
    parts = num_parts[cut]
    tokens = whole[cut][:, [FIRST_TOKEN, NUM_QUERIES]]
    columns = [tokens, (np.cumsum(parts) - parts)[:, None], parts[:, None]]
    return np.concatenate(columns, axis=1, dtype=np.int32, casting="same_kind")


def _expand(counts: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.intp], ...]:
    """For each of `counts[i]` pieces of every i: its i, and its index among them."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
