"""Ids, extents and the shape of a pool: the vocabulary of block management.

A *token slot* has room for the K and V of one token in every layer. A *block* is `block_size`
adjacent slots. A *sequence* reads its tokens through a *block table*: entry `i` names the block
that holds tokens `[i * block_size, (i + 1) * block_size)`.
"""

from collections.abc import Iterator, Mapping
from typing import NewType

import attrs

BlockId = NewType("BlockId", int)
"""Index of a physical block in the pool, `0 <= id < num_blocks`."""

HostBlockId = NewType("HostBlockId", int)
"""Index of a block of swap space in host memory, `0 <= id < num_blocks` of that space."""

SequenceId = NewType("SequenceId", int)
"""Number of a sequence, unique in one engine and never used again."""


@attrs.frozen
class Extent:
    """A run of adjacent blocks: `first_block, first_block + 1, ...`, `num_blocks` of them."""

    first_block: BlockId
    num_blocks: int

    @property
    def end(self) -> int:
        """One past the last block."""
        return self.first_block + self.num_blocks

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first_block, self.end))


def _positive(_instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if value < 1:
        raise ValueError(f"{attribute.name} must be at least 1, got {value}")


@attrs.frozen
class PoolGeometry:
    """What an allocator may know of the pool that it hands out.

    Attributes:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        max_model_len: longest sequence, in tokens, that will ever be asked for.
    """

    num_blocks: int = attrs.field(validator=_positive)
    block_size: int = attrs.field(validator=_positive)
    max_model_len: int = attrs.field(validator=_positive)

    @property
    def num_slots(self) -> int:
        """Token slots in the pool."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_for_window(self, window: int) -> int:
        """In how many blocks any `window` adjacent tokens of a sequence may lie."""
        return self.blocks_for(window - 1) + 1

    def window_fits(self, window: int) -> bool:
        """Does the pool hold what a token attends to, itself included, wherever a block begins?"""
        return self.blocks_for_window(window) <= self.num_blocks


@attrs.frozen
class AllocatorStatistics:
    """A snapshot of what an allocator knows of its own free space.

    Attributes:
        free_blocks: blocks that are granted to nobody.
        largest_extent: the longest run of blocks it could grant at once.
        extra: whatever else the strategy counts, by name.
    """

    free_blocks: int
    largest_extent: int
    extra: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class PoolStatistics:
    """Blocks by state at one moment; `free + used + cached == num_blocks`.

    Attributes:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        free_blocks: blocks that can be granted.
        used_blocks: blocks held by a sequence.
        cached_blocks: blocks held by nobody, kept for prefix reuse, given up on demand.
    """

    num_blocks: int
    block_size: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
