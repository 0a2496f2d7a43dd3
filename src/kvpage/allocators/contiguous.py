"""`contiguous`: one extent per sequence, reserved at admission for all it may ever need.

The way of the engines before paging, kept as the honest baseline (Kwon et al., SOSP 2023, section
2 and figure 2, call the three reservations Orca (Max), Orca (Oracle) and Orca (Pow2)). What a
sequence does not use of its extent is internal waste; free extents that are each too small for the
next sequence are external waste.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

from kvpage.allocators.base import NOTHING, AllocatorPlugin, Grant
from kvpage.blocks import AllocatorStatistics, BlockId, Extent, PoolGeometry, SequenceId
from kvpage.errors import OutOfBlocks
from kvpage.hookspecs import hookimpl

Reserve = Literal["model", "request", "power_of_two"]
Fit = Literal["first", "best"]


class ContiguousAllocator:
    """Reserves one extent for the whole life of a sequence. Nothing is shared, nothing grows.

    Nothing shrinks either: what a sliding window has left behind stays reserved.

    Args:
        geometry: the pool.
        reserve: how much to reserve, never more than the pool: `"model"` the longest sequence
            that the model allows, `"request"` the most that this sequence may become,
            `"power_of_two"` the same rounded up to a power of two of tokens.
        fit: take the `"first"` free extent that is long enough, or the `"best"`, the shortest.

    Raises:
        ValueError: an option has none of these values.
    """

    sharing = False

    def __init__(
        self, geometry: PoolGeometry, *, reserve: Reserve = "model", fit: Fit = "first"
    ) -> None:
        _check_option("reserve", reserve, get_args(Reserve))
        _check_option("fit", fit, get_args(Fit))
        self._geometry = geometry
        self._reserve = reserve
        self._fit = fit
        # Sorted by place, no two adjacent: about as many as there are live sequences.
        self._free = [Extent(BlockId(0), geometry.num_blocks)]
        self._reserved_blocks: dict[SequenceId, int] = {}

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        """See `Allocator.admit`. Cost: linear in the free extents."""
        del shared_tokens  # always 0, since `sharing` is False
        wanted = self._blocks_to_reserve(num_tokens, max_tokens)
        extent = self._take(wanted)
        self._reserved_blocks[seq] = wanted
        return Grant((extent,))

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        """See `Allocator.extend`. Cost: constant; the room is there or never will be."""
        wanted = self._geometry.blocks_for(num_tokens)
        reserved = self._reserved_blocks[seq]
        if wanted > reserved:  # the pool is smaller than the sequence may become
            raise OutOfBlocks(wanted - reserved, 0)
        return NOTHING

    def free(self, blocks: Iterable[BlockId]) -> None:
        """See `Allocator.free`. Cost: linear in the blocks and in the free extents."""
        returned = [Extent(block, 1) for block in blocks]
        by_place = sorted([*self._free, *returned], key=_first_block)
        self._free = list(_joined(by_place))

    def finish(self, seq: SequenceId) -> None:
        """See `Allocator.finish`."""
        del self._reserved_blocks[seq]

    def statistics(self) -> AllocatorStatistics:
        """Free blocks, the longest free extent, and how many free extents there are."""
        lengths = [extent.num_blocks for extent in self._free]
        return AllocatorStatistics(
            sum(lengths), max(lengths, default=0), {"free_extents": len(lengths)}
        )

    def _blocks_to_reserve(self, num_tokens: int, max_tokens: int) -> int:
        """Blocks for the whole life, at most the pool, but never less than is needed now."""
        match self._reserve:
            case "model":
                tokens = self._geometry.max_model_len
            case "request":
                tokens = max_tokens
            case "power_of_two":
                tokens = min(_power_of_two_from(max_tokens), self._geometry.max_model_len)
        life = min(self._geometry.blocks_for(tokens), self._geometry.num_blocks)
        return max(life, self._geometry.blocks_for(num_tokens))

    def _take(self, num_blocks: int) -> Extent:
        fitting = (i for i, free in enumerate(self._free) if free.num_blocks >= num_blocks)
        if self._fit == "best":
            index = min(fitting, key=lambda i: self._free[i].num_blocks, default=None)
        else:
            index = next(fitting, None)
        if index is None:
            raise OutOfBlocks(num_blocks, self.statistics().largest_extent)
        free = self._free[index]
        rest = Extent(BlockId(free.first_block + num_blocks), free.num_blocks - num_blocks)
        self._free[index : index + 1] = [rest] if rest.num_blocks else []
        return Extent(free.first_block, num_blocks)


def _check_option(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _first_block(extent: Extent) -> BlockId:
    return extent.first_block


def _power_of_two_from(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _joined(extents: Sequence[Extent]) -> Iterator[Extent]:
    """Extents sorted by place, with adjacent ones made one."""
    current: Extent | None = None
    for extent in extents:
        if current is not None and current.end == extent.first_block:
            current = Extent(current.first_block, current.num_blocks + extent.num_blocks)
        else:
            if current is not None:
                yield current
            current = extent
    if current is not None:
        yield current


@hookimpl
def kvpage_allocators() -> list[AllocatorPlugin]:
    """The `contiguous` strategy."""
    return [
        AllocatorPlugin(
            "contiguous",
            ContiguousAllocator,
            "one extent reserved per sequence, the baseline before paging",
        )
    ]
