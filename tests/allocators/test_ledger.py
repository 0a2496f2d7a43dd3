"""The ledger is right after every operation, and survives every answer of an allocator."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import attrs
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.allocators.machines import run_machine

from kvpage.allocators.base import Grant
from kvpage.allocators.dynamic import DynamicAllocator
from kvpage.allocators.fixed import FixedAllocator
from kvpage.block_manager import BlockManager
from kvpage.blocks import BlockId, Extent, PoolGeometry, SequenceId
from kvpage.errors import AllocatorFault, OutOfBlocks
from kvpage.prefix import ChainedKeys
from kvpage.testing.conformance import AllocatorUnderTest

ROWS = 5


@attrs.define(eq=False)
class Known:
    """A live sequence as the test knows it."""

    row: int
    num_tokens: int
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    keys: ChainedKeys
    published: int = 0


class Operations(RuleBasedStateMachine):
    """Operations of a block manager in any order, recounted after each."""

    def __init__(self, factory: AllocatorUnderTest) -> None:
        super().__init__()
        self._factory = factory
        self._next = 0
        self._live: dict[SequenceId, Known] = {}
        self._blocks: BlockManager

    @initialize(
        num_blocks=st.integers(1, 40),
        block_size=st.sampled_from((4, 1, 3)),
        prefix_cache=st.sampled_from((True, False)),
    )
    def build(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        geometry = PoolGeometry(num_blocks, block_size, 80)
        self._blocks = BlockManager(
            geometry, self._factory(geometry), max_num_seqs=ROWS, prefix_cache=prefix_cache
        )

    @precondition(lambda self: len(self._live) < ROWS)
    @rule(num_tokens=st.integers(1, 80), content=st.sampled_from((0, 1)))
    def admit(self, num_tokens: int, content: int) -> None:
        """Of few different contents, so that prefixes are shared."""
        block_size = self._blocks.geometry.block_size
        row = min(set(range(ROWS)) - {known.row for known in self._live.values()})
        tokens = np.full(80, content, np.int32)
        keys = ChainedKeys(block_size, secret=b"key")
        seq, before = SequenceId(self._next), self._blocks.available_blocks
        shared = self._blocks.match(keys.first(num_tokens // block_size, tokens), num_tokens)
        try:
            self._blocks.admit(seq, row, num_tokens, max_tokens=80, shared=shared)
        except OutOfBlocks:
            assert self._blocks.available_blocks == before
            return
        assert len(shared) * block_size < num_tokens
        self._next += 1
        self._live[seq] = Known(row, num_tokens, tokens, keys)

    @precondition(lambda self: self._live)
    @rule(data=st.data(), num_tokens=st.integers(0, 20))
    def extend(self, data: st.DataObject, num_tokens: int) -> None:
        """All or nothing."""
        seq = self._draw_live(data)
        known = self._live[seq]
        wanted = min(80, known.num_tokens + num_tokens)
        before = self._blocks.blocks_of(seq)
        try:
            self._blocks.extend(seq, wanted)
        except OutOfBlocks:
            assert self._blocks.blocks_of(seq) == before
            return
        known.num_tokens = wanted
        assert self._blocks.capacity_tokens[known.row] >= wanted

    @precondition(lambda self: self._live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """The blocks that are full by now."""
        seq = self._draw_live(data)
        known = self._live[seq]
        full = known.num_tokens // self._blocks.geometry.block_size
        keys = known.keys.first(full, known.tokens)[known.published :]
        self._blocks.publish(seq, keys, known.published)
        known.published = full

    @precondition(lambda self: self._live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Afterwards it holds nothing."""
        seq = self._draw_live(data)
        known = self._live.pop(seq)
        self._blocks.release(seq)
        assert (self._blocks.tables[known.row] == -1).all()

    @rule()
    def trim(self) -> None:
        """Free blocks become more by what the strategy gave."""
        tokens = np.zeros(ROWS, np.int64)
        for known in self._live.values():
            tokens[known.row] = known.num_tokens
        before = self._blocks.statistics().free_blocks
        trimmed = self._blocks.trim(tokens)
        assert self._blocks.statistics().free_blocks == before + trimmed

    @rule()
    def step(self) -> None:
        """Copies are taken once."""
        self._blocks.take_copies()
        assert len(self._blocks.take_copies()) == 0

    @invariant()
    def recount(self) -> None:
        if hasattr(self, "_blocks"):
            self._blocks.verify()
            pool = self._blocks.statistics()
            assert pool.free_blocks + pool.used_blocks + pool.cached_blocks == pool.num_blocks
            assert sum(self._blocks.cached_flags) == pool.cached_blocks
            for seq in self._live:
                assert self._blocks.table_of(seq).tolist() == list(self._blocks.blocks_of(seq))

    def teardown(self) -> None:
        for seq in self._live:
            self._blocks.release(seq)
        if hasattr(self, "_blocks"):
            assert self._blocks.statistics().used_blocks == 0

    def _draw_live(self, data: st.DataObject) -> SequenceId:
        return data.draw(st.sampled_from(sorted(self._live)))


def test_every_operation_keeps_the_ledger_right(factory: AllocatorUnderTest) -> None:
    """A few histories of each strategy, on every run of the suite."""
    run_machine(Operations, factory, max_examples=10, steps=30)


def test_a_table_longer_than_any_sequence_is_told_whole() -> None:
    """A strategy may round up beyond `max_model_len`; the rows of `tables` end there."""
    geometry = PoolGeometry(64, 3, 80)
    allocator = DynamicAllocator(geometry, min_block=4, max_extent=8)
    blocks = BlockManager(geometry, allocator, max_num_seqs=1)
    blocks.admit(SequenceId(7), 0, 80, max_tokens=80)
    assert blocks.tables.shape == (1, 27)
    assert blocks.table_of(SequenceId(7)).tolist() == list(blocks.blocks_of(SequenceId(7)))
    assert len(blocks.table_of(SequenceId(7))) == 28


@pytest.mark.slow
def test_every_operation_keeps_the_ledger_right_at_length(factory: AllocatorUnderTest) -> None:
    """A thousand histories of fifty operations."""
    run_machine(Operations, factory, max_examples=1000, steps=50)


# -- answers that break the contract -----------------------------------------------------------


class Liar(FixedAllocator):
    """Tells the truth until `lie` is set, which turns a grant into something else."""

    lie: Callable[[Grant], Any] | None = None

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        return self._told(
            super().admit(seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens)
        )

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        return self._told(super().extend(seq, num_tokens))

    def _told(self, grant: Grant) -> Grant:
        return cast("Grant", self.lie(grant)) if self.lie is not None else grant


def _more(*extents: Any) -> Callable[[Grant], Grant]:
    return lambda grant: attrs.evolve(grant, extents=(*grant.extents, *extents))


def _moving(*moves: Any) -> Callable[[Grant], Grant]:
    return lambda grant: attrs.evolve(grant, moves=moves)


def _raising(_grant: Grant) -> Grant:
    raise ZeroDivisionError("a bug")


TAKEN = BlockId(0)
"""A block of the sequence that lives on."""

LIES: dict[str, tuple[Callable[[Grant], Any], str]] = {
    "raises": (_raising, "raised ZeroDivisionError in .*: a bug"),
    "none": (lambda _: None, "returned None where a Grant was due"),
    "taken": (_more(Extent(TAKEN, 1)), "granted block 0, which is not free"),
    "outside": (_more(Extent(BlockId(64), 1)), "granted block 64 of a pool of 64"),
    "negative": (_more(Extent(BlockId(-1), 1)), "granted block -1 of a pool of 64"),
    "endless": (
        _more(Extent(BlockId(0), 10**18)),
        "granted 1000000000000000000 blocks of a pool of 64",
    ),
    "twice": (_more(Extent(BlockId(60), 1), Extent(BlockId(60), 1)), "a block twice"),
    "pairs": (_more((1, 2)), "which is not an Extent"),
    "words": (_more(Extent(cast("BlockId", "one"), 1)), "cannot be read"),
    "fractions": (_more(Extent(BlockId(9), cast("int", 0.5))), "granted 0.5 blocks of a pool"),
    "nothing": (lambda _: Grant(cast("tuple[Extent, ...]", None)), "cannot be read"),
    "too little": (lambda _: Grant(), "made room for .* tokens where .* were asked"),
    "foreign move": (_moving((TAKEN, 60)), "not all of them blocks of the sequence"),
    "move onto lent": (_moving((TAKEN, TAKEN)), "granted block 0, which is not free"),
    "odd move": (_moving((1, 2, 3)), "cannot be read"),
}


@pytest.mark.parametrize(("lie", "sentence"), LIES.values(), ids=list(LIES))
@pytest.mark.parametrize("method", ["admit", "extend"])
def test_a_lie_fails_one_request_and_leaves_no_trace(
    method: str, lie: Callable[[Grant], Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The fault names the plugin and the lie; others go on; nothing is held in the end."""
    caplog.set_level(logging.CRITICAL, "kvpage")
    geometry = PoolGeometry(64, 4, 80)
    allocator = Liar(geometry)
    blocks = BlockManager(geometry, allocator, max_num_seqs=2, name="liar")
    blocks.admit(SequenceId(0), 0, 8, max_tokens=80)
    if method == "extend":
        blocks.admit(SequenceId(1), 1, 8, max_tokens=80)
    before = blocks.statistics()

    calls: dict[str, Callable[[], object]] = {
        "admit": lambda: blocks.admit(SequenceId(1), 1, 8, max_tokens=80),
        "extend": lambda: blocks.extend(SequenceId(1), 24),
    }
    allocator.lie = lie
    with pytest.raises(AllocatorFault, match=f"allocator 'liar' .*{sentence}"):
        calls[method]()
    allocator.lie = None

    assert blocks.statistics() == before
    if method == "extend":
        blocks.release(SequenceId(1))
    blocks.extend(SequenceId(0), 40)
    blocks.release(SequenceId(0))
    assert blocks.statistics().used_blocks == 0


class Unwilling(DynamicAllocator):
    """Trims what it may not, in a way that the test sets."""

    answer: Any = ()

    def trim(self, seq: SequenceId, num_tokens: int) -> list[BlockId]:
        return cast("list[BlockId]", self.answer)


@pytest.mark.parametrize("answer", [[0], [7], ["x"], [None, 3], 5, [3, 3], [3, 2, 1, 0]])
def test_a_trim_that_is_no_tail_is_ignored(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The sequence keeps its blocks and the ledger stays right."""
    caplog.set_level(logging.CRITICAL, "kvpage")
    geometry = PoolGeometry(64, 4, 80)
    allocator = Unwilling(geometry, min_block=4)
    blocks = BlockManager(geometry, allocator, max_num_seqs=1, name="unwilling")
    blocks.admit(SequenceId(0), 0, 5, max_tokens=80)
    held = blocks.blocks_of(SequenceId(0))

    allocator.answer = answer

    assert blocks.trim(np.array([5], np.int64)) == 0
    assert blocks.blocks_of(SequenceId(0)) == held
    blocks.verify()


def test_a_strategy_that_fails_to_take_back_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    """Freeing and finishing raise: the ledger counts on, the log has the reason."""

    class Stubborn(FixedAllocator):
        def free(self, blocks: Iterable[BlockId]) -> None:
            raise RuntimeError("I keep them")

    geometry = PoolGeometry(8, 4, 80)
    blocks = BlockManager(geometry, Stubborn(geometry), max_num_seqs=1, name="stubborn")
    blocks.admit(SequenceId(0), 0, 8, max_tokens=80)

    blocks.release(SequenceId(0))

    assert blocks.statistics().used_blocks == 0
    assert "allocator 'stubborn' raised in free" in caplog.text


def test_a_second_release_is_refused_and_frees_nothing() -> None:
    """Neither a sequence that is over nor one that never was gives blocks back."""
    geometry = PoolGeometry(8, 4, 80)
    blocks = BlockManager(geometry, FixedAllocator(geometry), max_num_seqs=2)
    for seq in (SequenceId(0), SequenceId(1)):
        blocks.admit(seq, seq, 8, max_tokens=80)
    blocks.release(SequenceId(0))
    before = blocks.statistics()

    for seq in (SequenceId(0), SequenceId(7)):
        with pytest.raises(KeyError):
            blocks.release(seq)

    assert blocks.statistics() == before
    blocks.verify()


def test_the_cost_of_growth_does_not_grow_with_the_sequence() -> None:
    """A grant is checked against its own blocks, not against the whole table."""

    def seconds(num_blocks: int) -> float:
        geometry = PoolGeometry(num_blocks + 100, 1, num_blocks + 100)
        blocks = BlockManager(geometry, FixedAllocator(geometry), max_num_seqs=1)
        blocks.admit(SequenceId(0), 0, num_blocks, max_tokens=num_blocks + 100)
        start = time.thread_time()
        for num_tokens in range(num_blocks, num_blocks + 100):
            blocks.extend(SequenceId(0), num_tokens + 1)
        return time.thread_time() - start

    short, long = (min(seconds(num_blocks) for _ in range(3)) for num_blocks in (100, 50_000))
    assert long < 8 * short
