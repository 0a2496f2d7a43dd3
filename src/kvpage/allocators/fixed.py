"""`fixed`: one block at a time, from a stack of free blocks.

The strategy of PagedAttention (Kwon et al., SOSP 2023, section 4.3): a sequence borrows a block
when its last one is full, wherever one is free. External waste is nil by construction; internal
waste is the unused part of each sequence's last block, `(block_size - 1) / 2` slots on average.
"""

from collections.abc import Iterable

from kvpage.allocators.base import NOTHING, AllocatorPlugin, Grant
from kvpage.blocks import AllocatorStatistics, BlockId, Extent, PoolGeometry, SequenceId
from kvpage.errors import OutOfBlocks
from kvpage.hookspecs import hookimpl


class FixedAllocator:
    """Grants blocks one by one, the most recently freed first (its memory is the warmest)."""

    sharing = True

    def __init__(self, geometry: PoolGeometry) -> None:
        self._geometry = geometry
        self._free = [BlockId(b) for b in range(geometry.num_blocks - 1, -1, -1)]
        self._granted_blocks: dict[SequenceId, int] = {}

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        """See `Allocator.admit`. Cost: linear in the blocks granted."""
        held = shared_tokens // self._geometry.block_size
        wanted = self._geometry.blocks_for(num_tokens)
        grant = self._take(wanted - held)
        self._granted_blocks[seq] = wanted
        return grant

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        """See `Allocator.extend`. Cost: linear in the blocks granted."""
        wanted = self._geometry.blocks_for(num_tokens)
        missing = wanted - self._granted_blocks[seq]
        if missing <= 0:
            return NOTHING
        grant = self._take(missing)
        self._granted_blocks[seq] = wanted
        return grant

    def free(self, blocks: Iterable[BlockId]) -> None:
        """See `Allocator.free`."""
        self._free.extend(blocks)

    def finish(self, seq: SequenceId) -> None:
        """See `Allocator.finish`."""
        del self._granted_blocks[seq]

    def statistics(self) -> AllocatorStatistics:
        """Free blocks; any free block serves anybody, so the largest extent is one block."""
        return AllocatorStatistics(len(self._free), min(1, len(self._free)))

    def _take(self, num_blocks: int) -> Grant:
        if num_blocks > len(self._free):
            raise OutOfBlocks(num_blocks, len(self._free))
        return Grant(tuple(Extent(self._free.pop(), 1) for _ in range(num_blocks)))


@hookimpl
def kvpage_allocators() -> list[AllocatorPlugin]:
    """The `fixed` strategy."""
    return [AllocatorPlugin("fixed", FixedAllocator, "one block at a time, as in PagedAttention")]
