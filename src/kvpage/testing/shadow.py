"""A model of the pool that judges every answer of an allocator.

The shadow keeps its own block tables, counts its own references, and applies every grant literally
to a small memory: what each block holds is known at any time, and each live sequence must find its
own content through its table. Every call is made on two instances of the allocator, so that an
answer that depends on anything but the calls so far shows at once.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TypeVar

import attrs

from kvpage.allocators.base import Allocator, Grant, Slidable, Trimmable
from kvpage.blocks import AllocatorStatistics, BlockId, Extent, PoolGeometry, SequenceId
from kvpage.errors import OutOfBlocks

T = TypeVar("T")


class ContractViolation(AssertionError):  # noqa: N818  (reads as what was found)
    """The allocator broke its contract; the sentence says how."""


@attrs.define(eq=False)
class LiveSequence:
    """A sequence as the shadow knows it.

    Attributes:
        num_tokens: tokens that it was promised room for.
        max_tokens: it never grows beyond this.
        table: its blocks in order; None where a window has left one behind.
        content: what the first blocks of the table must hold, those that hold a token.
    """

    num_tokens: int
    max_tokens: int
    table: list[BlockId | None]
    content: list[int]

    @property
    def held(self) -> list[BlockId]:
        """Its blocks, without those left behind."""
        return [block for block in self.table if block is not None]

    @property
    def num_behind(self) -> int:
        """Entries of the table that a window has left behind."""
        return self.table.count(None)


class ShadowPool:
    """Calls an allocator the way the block manager does and checks what it answers.

    Every method raises `ContractViolation` at the first wrong answer. Where the allocator is out of
    blocks, `admit` and `extend` return False.

    Args:
        factory: makes the allocators under test, two equal ones.
        geometry: the pool.

    Attributes:
        geometry: the pool.
        live: the live sequences.
        cached: blocks that outlived their last sequence, the oldest first.
        sound: did the last call end with everything in order?
    """

    def __init__(
        self, factory: Callable[[PoolGeometry], Allocator], geometry: PoolGeometry
    ) -> None:
        self.geometry = geometry
        self.live: dict[SequenceId, LiveSequence] = {}
        self.cached: list[BlockId] = []
        self.sound = False
        self._allocators = (factory(geometry), factory(geometry))
        self._references = [0] * geometry.num_blocks
        self._memory: list[int | None] = [None] * geometry.num_blocks
        self._new_content = count()
        self._check_shape()
        self._check_everything()

    @property
    def sharing(self) -> bool:
        """Does the allocator allow blocks to be shared, and to outlive their sequence?"""
        return self._allocators[0].sharing

    @property
    def trimmable(self) -> bool:
        """Can the allocator take back an unused tail?"""
        return isinstance(self._allocators[0], Trimmable)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds and that are not cached."""
        return self._references.count(0) - len(self.cached)

    def shared_tokens(self, seq: SequenceId) -> int:
        """Leading tokens of `seq` whose blocks are not its own alone, or not its own any more."""
        table = self.live[seq].table
        shared = [i for i, block in enumerate(table) if block is None or self._is_shared(block)]
        return (shared[-1] + 1) * self.geometry.block_size if shared else 0

    def admit(
        self,
        seq: SequenceId,
        num_tokens: int,
        *,
        max_tokens: int,
        shared: Sequence[BlockId] = (),
    ) -> bool:
        """Start `seq`; `shared` are blocks, live or cached, that its first tokens have already."""
        sequence = LiveSequence(0, max_tokens, list(shared), [self._held(b) for b in shared])
        self._hold(shared)
        shared_tokens = len(shared) * self.geometry.block_size
        asked = f"admit({seq}, {num_tokens}, max_tokens={max_tokens}, shared={shared_tokens})"
        grant = self._ask_room(
            asked,
            lambda allocator: allocator.admit(
                seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens
            ),
        )
        if grant is None:
            self._let_go(shared, keep=shared)
            self._check_everything()
            return False
        self.live[seq] = sequence
        self._enter(sequence, grant, num_tokens, asked)
        return True

    def extend(self, seq: SequenceId, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens of `seq`."""
        asked = f"extend({seq}, {num_tokens})"
        grant = self._ask_room(asked, lambda allocator: allocator.extend(seq, num_tokens))
        if grant is None:
            self._check_everything()
            return False
        self._enter(self.live[seq], grant, num_tokens, asked)
        return True

    def slide(
        self,
        seq: SequenceId,
        num_blocks: int,
        order: Callable[[list[BlockId]], None],
        keep: Iterable[BlockId],
    ) -> None:
        """Leave the first `num_blocks` blocks of `seq` behind; free them, or keep some as cached.

        They are full: the sequence grows and is trimmed behind them only.
        """
        sequence = self.live[seq]
        behind = [block for block in sequence.table[:num_blocks] if block is not None]
        sequence.table[:num_blocks] = [None] * num_blocks
        num_tokens = num_blocks * self.geometry.block_size
        if isinstance(self._allocators[0], Slidable):
            self._tell(f"slide({seq}, {num_tokens})", lambda each: _slide(each, seq, num_tokens))
        freed = self._let_go(behind, keep=keep)
        order(freed)
        self._free(freed)
        self._check_everything()

    def trim(self, seq: SequenceId, num_tokens: int) -> None:
        """Ask for the tail of `seq` beyond `num_tokens` tokens."""
        sequence = self.live[seq]
        asked = f"trim({seq}, {num_tokens})"
        blocks = self._tell(asked, lambda allocator: _trim(allocator, seq, num_tokens))
        keep = max(0, len(sequence.table) - len(blocks))
        tail = [block for block in sequence.table[keep:] if block is not None]
        if sorted(blocks) != sorted(tail):
            raise ContractViolation(
                f"{asked} gave back {blocks}, no tail of the table {sequence.table}"
            )
        if keep < self.geometry.blocks_for(num_tokens):
            raise ContractViolation(f"{asked} gave back {blocks}, which those tokens need")
        self._let_go(tail, keep=())
        del sequence.table[keep:], sequence.content[self.geometry.blocks_for(num_tokens) :]
        sequence.num_tokens = num_tokens
        self._check_everything()

    def finish(
        self, seq: SequenceId, order: Callable[[list[BlockId]], None], keep: Iterable[BlockId]
    ) -> None:
        """End `seq`: free its blocks in some order, in two calls, and keep some as cached."""
        sequence = self.live.pop(seq)
        freed = self._let_go(sequence.held, keep=keep if self.sharing else ())
        order(freed)
        half = len(freed) // 2
        for blocks in (freed[:half], freed[half:]):
            self._free(blocks)
        self._tell(f"finish({seq})", lambda allocator: allocator.finish(seq))
        self._check_everything()

    def evict(self, blocks: Sequence[BlockId]) -> None:
        """Free cached blocks, whose sequences are over."""
        self.cached = [block for block in self.cached if block not in blocks]
        self._free(blocks)
        self._check_everything()

    def drain(self) -> None:
        """End everything, then ask for as much as the pool has: nothing may have been lost."""
        for seq in list(self.live):
            self.finish(seq, list.reverse, keep=())
        self.evict(list(self.cached))
        geometry = self.geometry
        for num_tokens in (1, min(geometry.num_slots, geometry.max_model_len)):
            seq = SequenceId(-num_tokens)
            if not self.admit(seq, num_tokens, max_tokens=num_tokens):
                raise ContractViolation(
                    f"with nothing live, it is out of blocks for {num_tokens} tokens in a pool of "
                    f"{geometry.num_blocks} blocks of {geometry.block_size} tokens"
                )
            self.finish(seq, list.reverse, keep=())

    # -- asking --------------------------------------------------------------------------------

    def _ask_room(self, asked: str, call: Callable[[Allocator], Grant]) -> Grant | None:
        """The grant that both allocators give; None if they are out of blocks."""
        before = self._statistics()
        answer = self._same_answer(asked, call)
        if not isinstance(answer, _Refusal):
            return answer
        if not 0 <= answer.available < answer.needed:
            raise ContractViolation(
                f"{asked} was out of blocks: {answer.needed} needed, {answer.available} available"
            )
        if self._statistics() != before:
            raise ContractViolation(
                f"{asked} was out of blocks and yet changed {before} to {self._statistics()}"
            )
        return None

    def _tell(self, asked: str, call: Callable[[Allocator], T]) -> T:
        """The answer that both allocators give, who may not be out of blocks here."""
        answer = self._same_answer(asked, call)
        if isinstance(answer, _Refusal):
            raise ContractViolation(f"{asked} raised OutOfBlocks, which only asking for room may")
        return answer

    def _same_answer(self, asked: str, call: Callable[[Allocator], T]) -> "T | _Refusal":
        self.sound = False
        first, second = (_answer(asked, call, allocator) for allocator in self._allocators)
        if first != second:
            raise ContractViolation(
                f"{asked} gave {first}, and on a second allocator with the same history {second}: "
                "the answer depends on something other than the calls"
            )
        return first

    def _free(self, blocks: Sequence[BlockId]) -> None:
        if blocks:  # as an iterator: the contract promises no more than an iterable
            self._tell(f"free({list(blocks)})", lambda allocator: allocator.free(iter(blocks)))

    def _statistics(self) -> AllocatorStatistics:
        return self._tell("statistics()", lambda allocator: allocator.statistics())

    # -- keeping track -------------------------------------------------------------------------

    def _enter(self, sequence: LiveSequence, grant: Grant, num_tokens: int, asked: str) -> None:
        """Check a grant, then do what it says to the table and to the memory."""
        try:
            blocks = _blocks_of(grant, asked)
            self._check_moves(sequence, grant, asked)
            self._check_free([*blocks, *(to for _, to in grant.moves)], asked)
        except (TypeError, ValueError) as error:  # no number, no pair where one was due
            raise ContractViolation(f"{asked} gave {grant!r}, which cannot be read") from error
        self._move(sequence, grant)
        sequence.table.extend(blocks)
        self._hold(blocks)
        room = len(sequence.table) * self.geometry.block_size
        if room < num_tokens:
            raise ContractViolation(f"{asked} leaves the sequence room for {room} tokens")
        sequence.num_tokens = num_tokens
        # Only full blocks are left behind, so these are held.
        for block in sequence.held[len(sequence.content) - sequence.num_behind :][
            : self.geometry.blocks_for(num_tokens) - len(sequence.content)
        ]:
            self._memory[block] = next(self._new_content)
            sequence.content.append(self._held(block))
        self._check_everything()

    def _move(self, sequence: LiveSequence, grant: Grant) -> None:
        held = [self._memory[source] for source, _ in grant.moves]
        for (source, to), content in zip(grant.moves, held, strict=True):
            sequence.table[sequence.table.index(source)] = to
            self._memory[to] = content
        self._hold([to for _, to in grant.moves])
        freed = self._let_go([source for source, _ in grant.moves], keep=())
        for block in freed:
            self._free([block])

    def _hold(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self._references[block] += 1
            if block in self.cached:
                self.cached.remove(block)

    def _let_go(self, blocks: Iterable[BlockId], *, keep: Iterable[BlockId]) -> list[BlockId]:
        """One holder less for each block; returns those that nobody holds, unless kept."""
        freed, kept = [], set(keep)
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0 and block in kept:
                self.cached.append(block)
            elif self._references[block] == 0:
                freed.append(block)
        return freed

    def _is_shared(self, block: BlockId) -> bool:
        return self._references[block] > 1

    def _held(self, block: BlockId) -> int:
        content = self._memory[block]
        assert content is not None, f"the shadow shares block {block}, which holds nothing"
        return content

    # -- judging -------------------------------------------------------------------------------

    def _check_shape(self) -> None:
        for allocator in self._allocators:
            if not isinstance(allocator, Allocator):
                missing = [name for name in _METHODS if not hasattr(allocator, name)]
                raise ContractViolation(f"it lacks {', '.join(missing)} of the Allocator protocol")
        if not isinstance(self.sharing, bool):
            raise ContractViolation(f"sharing must be True or False, got {self.sharing!r}")

    def _check_free(self, blocks: Sequence[BlockId], asked: str) -> None:
        for block in blocks:
            if not 0 <= block < self.geometry.num_blocks:
                raise ContractViolation(
                    f"{asked} granted block {block} of a pool of {self.geometry.num_blocks}"
                )
            if self._references[block] or block in self.cached:
                raise ContractViolation(f"{asked} granted block {block}, which is not free")
        if len(set(blocks)) != len(blocks):
            raise ContractViolation(f"{asked} granted a block twice in one answer: {blocks}")

    def _check_moves(self, sequence: LiveSequence, grant: Grant, asked: str) -> None:
        sources = [source for source, _ in grant.moves]
        if len(set(sources)) != len(sources) or not set(sources) <= set(sequence.held):
            raise ContractViolation(
                f"{asked} moves blocks {sources}, not all of them in the table {sequence.table}"
            )

    def _check_everything(self) -> None:
        """Every sequence finds its own content; the allocator counts free blocks as we do."""
        for seq, sequence in self.live.items():
            behind, content = sequence.num_behind, sequence.content
            found = [self._memory[block] for block in sequence.held[: len(content) - behind]]
            if found != content[behind:]:
                raise ContractViolation(
                    f"sequence {seq} finds {found} in its blocks {sequence.held}, "
                    f"where it left {content[behind:]}"
                )
        self._check_statistics()
        self.sound = True

    def _check_statistics(self) -> None:
        statistics = self._statistics()
        if not isinstance(statistics, AllocatorStatistics):
            raise ContractViolation(f"statistics() returned {statistics!r}")
        if statistics.free_blocks != self.free_blocks:
            raise ContractViolation(
                f"statistics() counts {statistics.free_blocks} free blocks, there are "
                f"{self.free_blocks}"
            )
        if not 0 <= statistics.largest_extent <= statistics.free_blocks:
            raise ContractViolation(
                f"statistics() names a largest extent of {statistics.largest_extent} among "
                f"{statistics.free_blocks} free blocks"
            )


_METHODS = ("sharing", "admit", "extend", "free", "finish", "statistics")


@attrs.frozen
class _Refusal:
    """An `OutOfBlocks` as a value, so that two of them compare."""

    needed: int
    available: int


def _answer(asked: str, call: Callable[[Allocator], T], allocator: Allocator) -> T | _Refusal:
    try:
        return call(allocator)
    except OutOfBlocks as signal:
        return _Refusal(signal.needed, signal.available)
    except Exception as error:
        raise ContractViolation(f"{asked} raised {type(error).__name__}: {error}") from error


def _trim(allocator: Allocator, seq: SequenceId, num_tokens: int) -> list[BlockId]:
    assert isinstance(allocator, Trimmable)
    return list(allocator.trim(seq, num_tokens))


def _slide(allocator: Allocator, seq: SequenceId, num_tokens: int) -> None:
    assert isinstance(allocator, Slidable)
    allocator.slide(seq, num_tokens)


def _blocks_of(grant: Grant, asked: str) -> list[BlockId]:
    """The blocks of all extents of a grant, in order."""
    if not isinstance(grant, Grant):
        raise ContractViolation(f"{asked} returned {grant!r} where a Grant was due")
    for extent in grant.extents:
        if not isinstance(extent, Extent) or extent.num_blocks < 1:
            raise ContractViolation(f"{asked} granted {extent!r}, which is no Extent of blocks")
    return [BlockId(block) for extent in grant.extents for block in extent]
