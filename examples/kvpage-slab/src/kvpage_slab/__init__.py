"""`slab`: extents of one size a sequence, chosen at admission by how long it may become.

The slab allocator of SunOS (Bonwick, USENIX Summer 1994) applied to a KV cache. The pool is cut
into slabs of `slab_blocks` adjacent blocks. A slab that is in use is cut into extents of one size;
when all of them are free again, it can be cut into another size::

    slab 0 (size 4)    slab 1 (size 1)      slab 2 (not in use)
    |AAAA|BBBB|        |C|D|.|C|C|.|D|.|    |........|

A request of a few tokens borrows single blocks; one that may become long borrows long extents, so
that no sequence has more than about eight of them when it has grown as far as it may.
"""

from collections.abc import Iterable

import attrs

import kvpage


@attrs.define(eq=False)
class _Slab:
    """A slab that is in use.

    Attributes:
        size: blocks in each of its extents.
        num_extents: how many extents it is cut into.
        free: first blocks of the extents that can be granted.
        returned: how many blocks of a granted extent have come back, by its first block.
    """

    size: int
    num_extents: int
    free: list[int]
    returned: dict[int, int] = attrs.field(factory=dict)


@attrs.define(eq=False)
class _Table:
    """A live sequence: blocks that it holds, and the size of extents that suits it."""

    num_blocks: int
    size: int


class SlabAllocator:
    """Grants extents of one size to a sequence, as long as there are some.

    Args:
        geometry: the pool.
        slab_blocks: blocks of a slab, a power of two; the longest extent.

    Raises:
        ValueError: `slab_blocks` is no power of two.
    """

    sharing = True

    def __init__(self, geometry: kvpage.PoolGeometry, *, slab_blocks: int = 8) -> None:
        if slab_blocks < 1 or slab_blocks & (slab_blocks - 1):
            raise ValueError(f"slab_blocks must be a power of two, got {slab_blocks}")
        self._geometry = geometry
        self._slab_blocks = slab_blocks
        self._sizes = [1 << order for order in range(slab_blocks.bit_length())]
        self._tables: dict[kvpage.SequenceId, _Table] = {}
        self._slabs: dict[int, _Slab] = {}
        # Dicts as ordered sets. Slabs with a free extent, by its size; slabs that are not in use.
        self._with_room: dict[int, dict[int, None]] = {size: {} for size in self._sizes}
        self._unused = list(range(geometry.num_blocks // slab_blocks))[::-1]
        self._free_blocks = self._grantable = geometry.num_blocks
        self._cut_last_slab(geometry.num_blocks % slab_blocks)

    def admit(
        self,
        seq: kvpage.SequenceId,
        num_tokens: int,
        *,
        max_tokens: int,
        shared_tokens: int = 0,
    ) -> kvpage.Grant:
        """See `kvpage.Allocator.admit`."""
        table = _Table(shared_tokens // self._geometry.block_size, self._size_for(max_tokens))
        grant = self._grow(table, self._geometry.blocks_for(num_tokens))
        self._tables[seq] = table
        return grant

    def extend(self, seq: kvpage.SequenceId, num_tokens: int) -> kvpage.Grant:
        """See `kvpage.Allocator.extend`."""
        return self._grow(self._tables[seq], self._geometry.blocks_for(num_tokens))

    def free(self, blocks: Iterable[kvpage.BlockId]) -> None:
        """See `kvpage.Allocator.free`. An extent is granted again once all of it is free."""
        for block in blocks:
            number = block // self._slab_blocks
            slab = self._slabs[number]
            first = block - block % slab.size
            slab.returned[first] = slab.returned.get(first, 0) + 1
            self._free_blocks += 1
            if slab.returned[first] == slab.size:
                del slab.returned[first]
                self._put(number, slab, first)

    def finish(self, seq: kvpage.SequenceId) -> None:
        """See `kvpage.Allocator.finish`."""
        del self._tables[seq]

    def statistics(self) -> kvpage.AllocatorStatistics:
        """Free blocks; `grantable_blocks` of them are in extents that are free as a whole."""
        longest = max((size for size in self._sizes if self._with_room[size]), default=0)
        return kvpage.AllocatorStatistics(
            free_blocks=self._free_blocks,
            largest_extent=self._slab_blocks if self._unused else longest,
            extra={"grantable_blocks": self._grantable, "slabs_in_use": len(self._slabs)},
        )

    def _size_for(self, max_tokens: int) -> int:
        """The longest size of which a full-grown sequence has eight extents or more; else 1."""
        num_blocks = self._geometry.blocks_for(max_tokens)
        return max((size for size in self._sizes if 8 * size <= num_blocks), default=1)

    def _grow(self, table: _Table, num_blocks: int) -> kvpage.Grant:
        """Take extents until the table has `num_blocks` blocks; all or nothing."""
        missing = num_blocks - table.num_blocks
        if missing > self._grantable:
            raise kvpage.OutOfBlocks(missing, self._grantable)
        extents = []
        while table.num_blocks < num_blocks:
            extent = self._take(table.size)
            table.num_blocks += extent.num_blocks
            extents.append(extent)
        return kvpage.Grant(tuple(extents))

    def _take(self, size: int) -> kvpage.Extent:
        """An extent of this size, or of the longest other one that there is."""
        if not self._with_room[size] and self._unused:
            self._cut(self._unused.pop(), size, self._slab_blocks // size)
        if not self._with_room[size]:
            size = max(size for size in self._sizes if self._with_room[size])
        number = next(iter(self._with_room[size]))
        slab = self._slabs[number]
        first = slab.free.pop()
        if not slab.free:
            del self._with_room[size][number]
        self._free_blocks -= size
        self._grantable -= size
        return kvpage.Extent(kvpage.BlockId(first), size)

    def _put(self, number: int, slab: _Slab, first: int) -> None:
        """An extent is free as a whole; so may be its slab."""
        slab.free.append(first)
        self._grantable += slab.size
        self._with_room[slab.size][number] = None
        if len(slab.free) == slab.num_extents and self._is_whole(number):
            del self._slabs[number], self._with_room[slab.size][number]
            self._unused.append(number)

    def _cut(self, number: int, size: int, num_extents: int) -> None:
        first = number * self._slab_blocks
        starts = range(first, first + size * num_extents, size)
        self._slabs[number] = _Slab(size, num_extents, list(starts)[::-1])
        self._with_room[size][number] = None

    def _cut_last_slab(self, num_blocks: int) -> None:
        """What remains of the pool is a shorter slab, cut into single blocks for good."""
        if num_blocks:
            self._cut(self._geometry.num_blocks // self._slab_blocks, 1, num_blocks)

    def _is_whole(self, number: int) -> bool:
        return (number + 1) * self._slab_blocks <= self._geometry.num_blocks


@kvpage.hookimpl
def kvpage_allocators() -> list[kvpage.AllocatorPlugin]:
    """The `slab` strategy."""
    return [
        kvpage.AllocatorPlugin(
            "slab", SlabAllocator, "extents of one size per sequence, by how long it may become"
        )
    ]
