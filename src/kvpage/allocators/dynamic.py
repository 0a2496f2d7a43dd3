"""`dynamic`: extents of a power-of-two number of blocks, small where a sequence ends, large before.

A buddy system (Knowlton, CACM 8(10), 1965) over the whole pool. The pool is cut into aligned
*frames* of `max_extent` blocks, and a frame's free blocks are the set bits of one integer, so that
splitting and coalescing are masks instead of lists, and any part of an extent can be freed::

    frame 0              frame 1              frame 2 (the pool ends inside it)
    |0 1 2 3 4 5 6 7|    |0 1 2 3 4 5 6 7|    |0 1 2|
     1 1 1 1 0 0 1 0      1 1 1 1 1 1 1 1      0 1 1      1: free
    longest: 4           longest: 8           longest: 1

A sequence's *tail* grows by small extents, taken from the most broken frames; when the tail is as
long as a frame, it is copied into a whole one (`Grant.moves`) and is a *body* from then on. So
internal waste is that of the small extent, the number of extents stays near that of the large one.
`docs/decisions/002-dynamic-extents.md` has the measurements behind this.
"""

from collections.abc import Iterable, Sequence

import attrs

from kvpage.allocators.base import NOTHING, AllocatorPlugin, Grant
from kvpage.blocks import AllocatorStatistics, BlockId, Extent, PoolGeometry, SequenceId
from kvpage.errors import OutOfBlocks
from kvpage.hookspecs import hookimpl

FULL = -1
"""The order of a frame without a free block."""


class BuddyPool:
    """Free blocks by frame, frames by the order of their longest free extent.

    An extent of order k is `2**k` blocks that start at a multiple of `2**k`.

    Args:
        num_blocks: blocks in the pool; the last frame may be cut short.
        max_order: frames have `2**max_order` blocks.

    Attributes:
        num_free: free blocks.
    """

    def __init__(self, num_blocks: int, max_order: int) -> None:
        self.num_free = num_blocks
        self._max_order = max_order
        self._aligned = [_every(1 << order, 1 << max_order) for order in range(max_order + 1)]
        starts = range(0, num_blocks, 1 << max_order)
        self._free_bits = [_ones(min(1 << max_order, num_blocks - first)) for first in starts]
        self._orders = [FULL] * len(starts)
        # Dicts as ordered sets: the frame that entered last is taken first.
        self._frames: list[dict[int, None]] = [{} for _ in range(max_order + 1)]
        for frame in reversed(range(len(starts))):
            self._enter(frame)

    @property
    def longest(self) -> int:
        """The order of the longest free extent; `FULL` if there is none."""
        orders = range(self._max_order, -1, -1)
        return next((order for order in orders if self._frames[order]), FULL)

    def take(self, order: int) -> Extent | None:
        """Take an extent of this order from the most broken frame that has one."""
        for frames in self._frames[order:]:
            if frames:
                frame, _ = frames.popitem()
                return self._take_bits(frame, self._best_fit(frame, order), 1 << order)
        return None

    def take_at(self, first: int, order: int) -> Extent | None:
        """Take the extent of this order that starts at block `first`, if there is one."""
        frame, offset = first >> self._max_order, first & _ones(self._max_order)
        bits = _ones(1 << order) << offset
        aligned = not offset & _ones(order)
        if not aligned or frame >= len(self._orders) or self._free_bits[frame] & bits != bits:
            return None
        self._leave(frame)
        return self._take_bits(frame, offset, 1 << order)

    def put(self, blocks: Iterable[BlockId]) -> None:
        """Free these blocks; they coalesce with their buddies. Cost: linear in the blocks."""
        freed: dict[int, int] = {}
        for block in blocks:
            frame = block >> self._max_order
            freed[frame] = freed.get(frame, 0) | 1 << (block & _ones(self._max_order))
        for frame, bits in freed.items():
            self._leave(frame)
            self._free_bits[frame] |= bits
            self._enter(frame)
            self.num_free += bits.bit_count()

    def _best_fit(self, frame: int, order: int) -> int:
        """Where to cut an extent of this order so that the longest free ones stay whole."""
        starts = self._free_bits[frame]
        for k in range(order):
            starts = self._paired(starts, k)
        for k in range(order, self._max_order):
            longer = self._paired(starts, k)
            unpaired = starts & ~(longer | longer << (1 << k))
            if unpaired:
                return _lowest_bit(unpaired)
            starts = longer
        return _lowest_bit(starts)

    def _take_bits(self, frame: int, offset: int, num_blocks: int) -> Extent:
        """Take free blocks of a frame that is in no set; it enters the set it belongs to now."""
        self._free_bits[frame] ^= _ones(num_blocks) << offset
        self._enter(frame)
        self.num_free -= num_blocks
        return Extent(BlockId((frame << self._max_order) + offset), num_blocks)

    def _paired(self, starts: int, order: int) -> int:
        """From where free extents of an order start (as bits), where those of the next do."""
        return starts & starts >> (1 << order) & self._aligned[order + 1]

    def _enter(self, frame: int) -> None:
        """Put a frame in the set of its longest free extent."""
        starts, order = self._free_bits[frame], FULL
        while starts:
            order += 1
            starts = self._paired(starts, order) if order < self._max_order else 0
        self._orders[frame] = order
        if order != FULL:
            self._frames[order][frame] = None

    def _leave(self, frame: int) -> None:
        order = self._orders[frame]
        if order != FULL:
            del self._frames[order][frame]


@attrs.define(eq=False)
class _Table:
    """What the strategy knows of a live sequence's block table.

    Attributes:
        num_blocks: blocks in it, shared ones included.
        tail: its last blocks, those that are in no body yet.
        end: one past the block granted last; the best place for the next one.
    """

    num_blocks: int
    tail: list[BlockId] = attrs.field(factory=list)
    end: int = 0

    def append(self, extent: Extent, frame_length: int) -> None:
        """Enter a granted extent; a whole frame that follows a body is a body."""
        self.num_blocks += extent.num_blocks
        self.end = extent.end
        if self.tail or extent.num_blocks < frame_length:
            self.tail.extend(BlockId(block) for block in extent)


class DynamicAllocator:
    """Grants buddies; copies a tail of small ones into a large one when it is long enough.

    Args:
        geometry: the pool. Its block is the small unit; a `block_size` of 8 suits the defaults.
        min_block: blocks that a tail grows by, a power of two.
        max_extent: blocks of the longest extent, a power of two.

    Raises:
        ValueError: an option is no power of two, or the two are in the wrong order.
    """

    sharing = True

    def __init__(self, geometry: PoolGeometry, *, min_block: int = 1, max_extent: int = 8) -> None:
        _check_power_of_two("min_block", min_block)
        _check_power_of_two("max_extent", max_extent)
        if min_block > max_extent:
            raise ValueError(f"min_block {min_block} is above max_extent {max_extent}")
        self._geometry = geometry
        self._min_block = min_block
        self._max_extent = max_extent
        self._max_order = max_extent.bit_length() - 1
        self._pool = BuddyPool(geometry.num_blocks, self._max_order)
        self._tables: dict[SequenceId, _Table] = {}

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        """See `Allocator.admit`. Cost: linear in the blocks granted."""
        table = _Table(shared_tokens // self._geometry.block_size)
        extents = self._grow(table, self._geometry.blocks_for(num_tokens) - table.num_blocks)
        self._tables[seq] = table
        return Grant(extents)

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        """See `Allocator.extend`. Cost: linear in the blocks granted and moved."""
        table = self._tables[seq]
        missing = self._geometry.blocks_for(num_tokens) - table.num_blocks
        if missing <= 0:
            return NOTHING
        filled = table.tail[: self._max_extent]
        extents = self._grow(table, missing)
        if len(filled) < self._max_extent:
            return Grant(extents)
        return Grant(extents, self._promote(table, filled))

    def free(self, blocks: Iterable[BlockId]) -> None:
        """See `Allocator.free`. Cost: linear in the blocks."""
        self._pool.put(blocks)

    def finish(self, seq: SequenceId) -> None:
        """See `Allocator.finish`."""
        del self._tables[seq]

    def slide(self, seq: SequenceId, num_tokens: int) -> None:
        """See `Slidable.slide`. A tail that was left behind is not copied into a body."""
        table = self._tables[seq]
        first_of_tail = table.num_blocks - len(table.tail)
        del table.tail[: max(0, num_tokens // self._geometry.block_size - first_of_tail)]

    def trim(self, seq: SequenceId, num_tokens: int) -> Sequence[BlockId]:
        """See `Trimmable.trim`. There is something to give where `min_block` is above 1."""
        table = self._tables[seq]
        unused = min(table.num_blocks - self._geometry.blocks_for(num_tokens), len(table.tail))
        if unused <= 0:
            return ()
        blocks = table.tail[-unused:]
        del table.tail[-unused:]
        table.num_blocks -= unused
        table.end = blocks[0]
        self._pool.put(blocks)
        return blocks

    def statistics(self) -> AllocatorStatistics:
        """Free blocks and the longest free extent."""
        longest = self._pool.longest
        return AllocatorStatistics(self._pool.num_free, 0 if longest == FULL else 1 << longest)

    def _grow(self, table: _Table, num_blocks: int) -> tuple[Extent, ...]:
        """Append at least `num_blocks` blocks, in extents as long as they come.

        Raises:
            OutOfBlocks: nothing has changed.
        """
        if num_blocks > self._pool.num_free:
            raise OutOfBlocks(num_blocks, self._pool.num_free)
        extents: list[Extent] = []
        while num_blocks > 0:
            extent = self._take(max(num_blocks, self._min_block), table.end)
            table.append(extent, self._max_extent)
            extents.append(extent)
            num_blocks -= extent.num_blocks
        return tuple(extents)

    def _take(self, num_blocks: int, near: int) -> Extent:
        """Take the longest extent of at most `num_blocks` blocks, at block `near` if it is free."""
        order = min(num_blocks.bit_length() - 1, self._max_order)
        extent = self._pool.take_at(near, order) or self._pool.take(order)
        while extent is None:  # a single block serves anybody, and one is free
            order -= 1
            extent = self._pool.take(order)
        return extent

    def _promote(
        self, table: _Table, filled: Sequence[BlockId]
    ) -> tuple[tuple[BlockId, BlockId], ...]:
        """Make the filled part of a tail a body, by a copy unless it is one run of blocks."""
        if filled[-1] - filled[0] == len(filled) - 1 and sorted(filled) == filled:
            del table.tail[: len(filled)]
            return ()
        body = self._pool.take(self._max_order)
        if body is None:  # tried again when the tail grows next
            return ()
        del table.tail[: len(filled)]
        return tuple(zip(filled, map(BlockId, body), strict=True))


def _check_power_of_two(name: str, value: int) -> None:
    if value < 1 or value & (value - 1):
        raise ValueError(f"{name} must be a power of two of blocks, got {value}")


def _ones(number: int) -> int:
    """An integer with the lowest `number` bits set."""
    return (1 << number) - 1


def _every(step: int, length: int) -> int:
    """An integer with bits `0, step, 2 * step, ...` below `length` set."""
    return _ones(length) // _ones(step)


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


@hookimpl
def kvpage_allocators() -> list[AllocatorPlugin]:
    """The `dynamic` strategy."""
    return [
        AllocatorPlugin(
            "dynamic", DynamicAllocator, "buddy extents, small at the tail and large before it"
        )
    ]
