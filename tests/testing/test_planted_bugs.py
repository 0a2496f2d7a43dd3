"""The kit finds what is wrong: allocators with one bug each, and the sentence that names it."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import attrs
import pytest
from hypothesis import Phase, settings

from kvpage.allocators.base import NOTHING, Allocator, Grant
from kvpage.allocators.contiguous import ContiguousAllocator
from kvpage.allocators.dynamic import DynamicAllocator
from kvpage.allocators.fixed import FixedAllocator
from kvpage.blocks import AllocatorStatistics, BlockId, Extent, PoolGeometry, SequenceId
from kvpage.errors import OutOfBlocks
from kvpage.testing import ContractViolation, check_allocator

BUGS: list[tuple[Callable[[PoolGeometry], Any], str]] = []


def planted(sentence: str) -> Callable[[type[Any]], type[Any]]:
    """Register an allocator with a bug, and a part of the sentence that must name it."""

    def register(bug: type[Any]) -> type[Any]:
        BUGS.append((bug, sentence))
        return bug

    return register


# -- places ------------------------------------------------------------------------------------


@planted("granted block .*, which is not free")
class LendsTwice(FixedAllocator):
    """Looks at the top of the stack, counts it as lent, and forgets to take it."""

    def __init__(self, geometry: PoolGeometry) -> None:
        super().__init__(geometry)
        self._not_taken = 0

    def _take(self, num_blocks: int) -> Grant:
        if num_blocks == 1 and len(self._free) > self._not_taken:
            self._not_taken += 1
            return Grant((Extent(self._free[-1], 1),))
        return super()._take(num_blocks)

    def statistics(self) -> AllocatorStatistics:
        return AllocatorStatistics(len(self._free) - self._not_taken, 0)


@planted("granted a block twice in one answer")
class RepeatsItself(FixedAllocator):
    """Names the last extent of a long grant twice."""

    def _take(self, num_blocks: int) -> Grant:
        grant = super()._take(num_blocks)
        if num_blocks < 3:
            return grant
        return attrs.evolve(grant, extents=(*grant.extents, grant.extents[-1]))


@planted("counts .* free blocks|granted block .* of a pool of")
class OneTooMany(FixedAllocator):
    """Numbers the blocks from 1."""

    def __init__(self, geometry: PoolGeometry) -> None:
        super().__init__(geometry)
        self._free = [BlockId(block + 1) for block in self._free]


@planted("which is no Extent of blocks")
class GrantsNothingAsSomething(FixedAllocator):
    """Adds an empty extent."""

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        grant = super().extend(seq, num_tokens)
        return attrs.evolve(grant, extents=(*grant.extents, Extent(BlockId(0), 0)))


@planted("where a Grant was due")
class ReturnsBlocks(FixedAllocator):
    """Returns a list of blocks from extend."""

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        return list(super().extend(seq, num_tokens).extents)  # type: ignore[return-value]


@planted("granted block .*, which is not free|names a largest extent of")
class MergesStrangers(DynamicAllocator):
    """Takes the buddy of every block that comes back for free."""

    def free(self, blocks: Iterable[BlockId]) -> None:
        blocks = list(blocks)
        super().free(blocks)
        counted = self._pool.num_free
        buddies = [BlockId(block ^ 1) for block in blocks]
        self._pool.put([buddy for buddy in buddies if buddy < self._geometry.num_blocks])
        self._pool.num_free = counted


# -- room --------------------------------------------------------------------------------------


@planted("leaves the sequence room for .* tokens")
class RoundsDown(FixedAllocator):
    """Forgets the last, partial block of a prompt."""

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        whole = max(shared_tokens + 1, num_tokens - num_tokens % self._geometry.block_size)
        return super().admit(seq, whole, max_tokens=max_tokens, shared_tokens=shared_tokens)


@planted("leaves the sequence room for .* tokens")
class OffByOne(FixedAllocator):
    """Makes room for the tokens before the last one."""

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        return super().extend(seq, num_tokens - 1)


@planted("leaves the sequence room for .* tokens")
class CountsSharedTwice(FixedAllocator):
    """Takes the shared blocks off the room that is needed, and off the tokens as well."""

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        rest = max(shared_tokens + 1, num_tokens - shared_tokens)
        return super().admit(seq, rest, max_tokens=max_tokens, shared_tokens=shared_tokens)


@planted("which those tokens need|leaves the sequence room")
class ForgetsTrims(DynamicAllocator):
    """Gives blocks back and still counts them as the sequence's."""

    def trim(self, seq: SequenceId, num_tokens: int) -> Sequence[BlockId]:
        held = self._tables[seq].num_blocks
        blocks = super().trim(seq, num_tokens)
        self._tables[seq].num_blocks = held
        return blocks


# -- conservation ------------------------------------------------------------------------------


@planted("was out of blocks and yet changed")
class TakesThenRefuses(FixedAllocator):
    """Takes what there is before it finds that it is not enough."""

    def _take(self, num_blocks: int) -> Grant:
        extents: list[Extent] = []
        for _ in range(num_blocks):
            if not self._free:
                raise OutOfBlocks(num_blocks, len(extents))
            extents.append(Extent(self._free.pop(), 1))
        return Grant(tuple(extents))


@planted("counts .* free blocks")
class DropsTheLast(FixedAllocator):
    """Loses the last block of every long return."""

    def free(self, blocks: Iterable[BlockId]) -> None:
        blocks = list(blocks)
        super().free(blocks[:-1] if len(blocks) > 4 else blocks)


@planted("counts .* free blocks")
class ReadsTwice(FixedAllocator):
    """Goes through an iterable twice."""

    def free(self, blocks: Iterable[BlockId]) -> None:
        if any(block < 0 for block in blocks):
            raise ValueError("a negative block")
        super().free(blocks)


@planted("counts .* free blocks")
class FreesAtFinish(FixedAllocator):
    """Frees a sequence's blocks when it is over, though they came back one by one before."""

    def __init__(self, geometry: PoolGeometry) -> None:
        super().__init__(geometry)
        self._blocks_of: dict[SequenceId, list[BlockId]] = {}

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        grant = super().admit(seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens)
        self._blocks_of[seq] = [extent.first_block for extent in grant.extents]
        return grant

    def finish(self, seq: SequenceId) -> None:
        super().finish(seq)
        self._free.extend(self._blocks_of.pop(seq))


@planted("counts .* free blocks")
class ForgetsTheDead(FixedAllocator):
    """Ignores blocks that come back after the sequence they were granted to is over."""

    def __init__(self, geometry: PoolGeometry) -> None:
        super().__init__(geometry)
        self._owners: dict[BlockId, SequenceId] = {}

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        grant = super().admit(seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens)
        self._owners.update((extent.first_block, seq) for extent in grant.extents)
        return grant

    def free(self, blocks: Iterable[BlockId]) -> None:
        live = self._granted_blocks
        super().free(b for b in blocks if self._owners.get(b) in live or b not in self._owners)


@planted("counts .* free blocks")
class ForgetsTheLiving(FixedAllocator):
    """Takes blocks back at the end only, and so loses what comes back before."""

    def __init__(self, geometry: PoolGeometry) -> None:
        super().__init__(geometry)
        self._owners: dict[BlockId, SequenceId] = {}
        self._sliding: set[SequenceId] = set()

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        grant = super().admit(seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens)
        self._owners.update((extent.first_block, seq) for extent in grant.extents)
        return grant

    def slide(self, seq: SequenceId, num_tokens: int) -> None:
        self._sliding.add(seq)

    def free(self, blocks: Iterable[BlockId]) -> None:
        super().free(block for block in blocks if self._owners.get(block) not in self._sliding)


@planted("counts .* free blocks")
class LosesABody(DynamicAllocator):
    """Takes a whole extent to promote a tail and does not say so."""

    def __init__(self, geometry: PoolGeometry) -> None:
        super().__init__(geometry, max_extent=4)

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        return attrs.evolve(super().extend(seq, num_tokens), moves=())


@planted("counts .* free blocks")
class KeepsWhatItTrims(DynamicAllocator):
    """Names trimmed blocks and does not free them."""

    def trim(self, seq: SequenceId, num_tokens: int) -> Sequence[BlockId]:
        blocks = super().trim(seq, num_tokens)
        for block in blocks:
            self._pool.take_at(block, 0)
        return blocks


@planted("names a largest extent of")
class Boasts(FixedAllocator):
    """Claims that the whole pool is one extent, however much of it is lent."""

    def statistics(self) -> AllocatorStatistics:
        return AllocatorStatistics(len(self._free), self._geometry.num_blocks)


@planted("statistics.. returned")
class CountsInTuples(FixedAllocator):
    """Returns bare numbers."""

    def statistics(self) -> AllocatorStatistics:
        return (len(self._free), 1)  # type: ignore[return-value]


@planted("with nothing live, it is out of blocks")
class NeverJoins(ContiguousAllocator):
    """Leaves freed blocks as the single blocks that they came as."""

    def free(self, blocks: Iterable[BlockId]) -> None:
        self._free = [*self._free, *(Extent(block, 1) for block in blocks)]


@planted("with nothing live, it is out of blocks")
class SparesTheLast(FixedAllocator):
    """Refuses what would use up the pool."""

    def _take(self, num_blocks: int) -> Grant:
        if num_blocks >= self._geometry.num_blocks:
            raise OutOfBlocks(num_blocks, num_blocks - 1)
        return super()._take(num_blocks)


# -- moves -------------------------------------------------------------------------------------


class Moves(FixedAllocator):
    """Moves the first block of a sequence whenever it grows. Correct; the bugs derive from it."""

    def __init__(self, geometry: PoolGeometry) -> None:
        super().__init__(geometry)
        self._first: dict[SequenceId, BlockId] = {}

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        grant = super().admit(seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens)
        self._first[seq] = grant.extents[0].first_block
        return grant

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        grant = super().extend(seq, num_tokens)
        if grant is NOTHING or not self._free or seq not in self._first:
            return grant
        source, to = self._first[seq], self._free.pop()
        self._first[seq] = to
        return attrs.evolve(grant, moves=self._pairs(source, to, grant))

    def slide(self, seq: SequenceId, num_tokens: int) -> None:
        if num_tokens:
            self._first.pop(seq, None)

    def _pairs(
        self, source: BlockId, to: BlockId, grant: Grant
    ) -> tuple[tuple[BlockId, BlockId], ...]:
        return ((source, to),)


@planted("not all of them in the table")
class MovesWhatIsBehind(DynamicAllocator):
    """Does not hear that a part of a tail is no longer the sequence's."""

    def __init__(self, geometry: PoolGeometry) -> None:
        super().__init__(geometry, max_extent=4)

    def slide(self, seq: SequenceId, num_tokens: int) -> None:
        pass


@planted("which cannot be read")
class MovesInTriples(Moves):
    """Says more about a move than from where and to where."""

    def _pairs(
        self, source: BlockId, to: BlockId, grant: Grant
    ) -> tuple[tuple[BlockId, BlockId], ...]:
        return ((source, to, self._geometry.block_size),)  # type: ignore[return-value]


@planted("not all of them in the table")
class MovesTwice(Moves):
    """Copies one block to two places."""

    def _pairs(
        self, source: BlockId, to: BlockId, grant: Grant
    ) -> tuple[tuple[BlockId, BlockId], ...]:
        return ((source, to), (source, self._free.pop())) if self._free else ((source, to),)


@planted("not all of them in the table")
class MovesOthers(Moves):
    """Moves a block of whichever sequence came first."""

    def _pairs(
        self, source: BlockId, to: BlockId, grant: Grant
    ) -> tuple[tuple[BlockId, BlockId], ...]:
        return ((next(iter(self._first.values())), to),)


@planted("granted block .*, which is not free")
class MovesOntoItself(Moves):
    """Copies a block onto a block that is lent."""

    def _pairs(
        self, source: BlockId, to: BlockId, grant: Grant
    ) -> tuple[tuple[BlockId, BlockId], ...]:
        return ((source, source),)


@planted("granted a block twice in one answer")
class MovesIntoTheGrant(Moves):
    """Copies a block into one that it grants beside."""

    def _pairs(
        self, source: BlockId, to: BlockId, grant: Grant
    ) -> tuple[tuple[BlockId, BlockId], ...]:
        return ((source, grant.extents[0].first_block),)


# -- refusals ----------------------------------------------------------------------------------


@planted("raised IndexError")
class FallsOver(FixedAllocator):
    """Meets an empty stack unprepared."""

    def _take(self, num_blocks: int) -> Grant:
        return Grant(tuple(Extent(self._free.pop(), 1) for _ in range(num_blocks)))


@planted("was out of blocks: .* needed")
class SwapsTheNumbers(FixedAllocator):
    """Says that less is needed than is there."""

    def _take(self, num_blocks: int) -> Grant:
        if num_blocks > len(self._free):
            raise OutOfBlocks(len(self._free), num_blocks)
        return super()._take(num_blocks)


@planted("raised OutOfBlocks, which only asking for room may")
class RefusesReturns(FixedAllocator):
    """Is out of blocks when it is given some."""

    def free(self, blocks: Iterable[BlockId]) -> None:
        if not self._free:
            raise OutOfBlocks(1, 0)
        super().free(blocks)


@planted("raised ValueError: sequence .* is live")
class RemembersTheRefused(FixedAllocator):
    """Counts a sequence as live before it has room for it."""

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        if seq in self._granted_blocks:
            raise ValueError(f"sequence {seq} is live")
        self._granted_blocks[seq] = 0
        return super().admit(seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens)


# -- trims -------------------------------------------------------------------------------------


@planted("which those tokens need")
class TrimsTooMuch(DynamicAllocator):
    """Gives back one block more than is unused."""

    def trim(self, seq: SequenceId, num_tokens: int) -> Sequence[BlockId]:
        return super().trim(seq, max(0, num_tokens - self._geometry.block_size))


@planted("no tail of the table")
class TrimsTheHead(FixedAllocator):
    """Gives back any block that was granted once."""

    def trim(self, seq: SequenceId, num_tokens: int) -> Sequence[BlockId]:
        taken = set(range(self._geometry.num_blocks)) - set(self._free)
        return [BlockId(min(taken))]


# -- determinism, isolation, cost --------------------------------------------------------------


@planted("something other than the calls")
class SharesItsStack(FixedAllocator):
    """Keeps its free blocks on the class, for all allocators together."""

    _stacks: ClassVar[dict[PoolGeometry, list[BlockId]]] = {}

    def __init__(self, geometry: PoolGeometry) -> None:
        super().__init__(geometry)
        self._free = self._stacks.setdefault(geometry, self._free)


@planted("something other than the calls")
class AsksTheClock(FixedAllocator):
    """Takes from either end of its stack, depending on the time."""

    def _take(self, num_blocks: int) -> Grant:
        if time.perf_counter_ns() // 100 % 2:
            self._free.reverse()
        return super()._take(num_blocks)


@planted("it started threads")
class WorksInTheBackground(FixedAllocator):
    """Starts a thread at its first grant."""

    _done = threading.Event()
    _thread: threading.Thread | None = None

    def _take(self, num_blocks: int) -> Grant:
        if WorksInTheBackground._thread is None:
            WorksInTheBackground._thread = threading.Thread(target=self._done.wait, daemon=True)
            WorksInTheBackground._thread.start()
        return super()._take(num_blocks)


@planted("raised ModuleNotFoundError")
class ThinksInTensors(FixedAllocator):
    """Imports torch where it grants."""

    def _take(self, num_blocks: int) -> Grant:
        import torch

        return super()._take(int(torch.tensor(num_blocks)))


@planted("extend costs .* times as much")
class SearchesThePool(FixedAllocator):
    """Takes the lowest free block, found by going through all of them."""

    def _take(self, num_blocks: int) -> Grant:
        self._free.sort(key=lambda block: -block)
        return super()._take(num_blocks)


@planted("extend costs .* times as much")
class WalksTheTable(FixedAllocator):
    """Counts a sequence's blocks one by one, each time."""

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        assert sum(1 for _ in range(self._granted_blocks[seq])) == self._granted_blocks[seq]
        return super().extend(seq, num_tokens)


# -- shape -------------------------------------------------------------------------------------


@planted("lacks finish of the Allocator protocol")
class HasNoEnd:
    """Lacks a method."""

    sharing = True
    admit = FixedAllocator.admit
    extend = FixedAllocator.extend
    free = FixedAllocator.free
    statistics = FixedAllocator.statistics

    def __init__(self, geometry: PoolGeometry) -> None:
        pass


@planted("sharing must be True or False")
class SharesPerhaps(FixedAllocator):
    """Answers a question of yes or no with a word."""

    sharing = "no"  # type: ignore[assignment]


@pytest.fixture
def unshrunk() -> Iterator[None]:
    """Takes findings as they come: looking for the shortest history is slow and changes nothing."""
    settings.register_profile("unshrunk", phases=[Phase.generate])
    settings.load_profile("unshrunk")
    yield
    settings.load_profile("default")


RARE = {MovesWhatIsBehind}
"""Bugs that few histories show."""


@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize(
    ("bug", "sentence"), BUGS, ids=[getattr(bug, "__name__", "") for bug, _ in BUGS]
)
def test_finds(bug: Callable[[PoolGeometry], Allocator], sentence: str) -> None:
    """Each bug is found, and named as what it is."""
    with pytest.raises(ContractViolation, match=sentence):
        check_allocator(bug, max_examples=400 if bug in RARE else 40)


def test_a_correct_relative_passes() -> None:
    """`Moves`, which the bugs in moving derive from, breaks nothing itself."""
    check_allocator(Moves, max_examples=30)
