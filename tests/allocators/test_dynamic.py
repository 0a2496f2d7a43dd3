"""`dynamic` keeps small blocks at the end of a sequence and long extents before it."""

import pytest

from kvpage.allocators.base import Grant
from kvpage.allocators.dynamic import FULL, BuddyPool, DynamicAllocator
from kvpage.blocks import BlockId, Extent, PoolGeometry, SequenceId
from kvpage.errors import OutOfBlocks

GEOMETRY = PoolGeometry(num_blocks=64, block_size=8, max_model_len=512)


def seq(number: int) -> SequenceId:
    return SequenceId(number)


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def lengths(grant: Grant) -> list[int]:
    return [extent.num_blocks for extent in grant.extents]


class TestBuddyPool:
    """Free blocks of a pool of 11: a frame of 8 and one cut short to 3."""

    @pytest.fixture
    def pool(self) -> BuddyPool:
        return BuddyPool(11, max_order=3)

    def test_the_frame_cut_short_serves_small_extents(self, pool: BuddyPool) -> None:
        """Its two buddies first, for the whole frame is worth more."""
        assert pool.take(1) == Extent(BlockId(8), 2)

    def test_the_shortest_extent_that_fits_is_cut(self, pool: BuddyPool) -> None:
        """A single block is taken where no pair has to be broken for it."""
        assert pool.take(0) == Extent(BlockId(10), 1)

    def test_a_whole_frame_is_taken_last(self, pool: BuddyPool) -> None:
        """Four blocks exist in the frame of 8 only."""
        assert pool.take(2) == Extent(BlockId(0), 4)
        assert pool.longest == 2

    def test_there_is_no_extent_longer_than_what_is_free(self, pool: BuddyPool) -> None:
        """Eleven free blocks hold one extent of 8."""
        assert pool.take(3) is not None
        assert pool.take(3) is None

    def test_buddies_coalesce_in_any_order(self, pool: BuddyPool) -> None:
        """Blocks that come back one by one make the frame whole again."""
        assert pool.take(3) == Extent(BlockId(0), 8)
        for block in (5, 0, 7, 2, 3, 1, 6):
            pool.put(ids(block))
        assert pool.longest == 2
        pool.put(ids(4))
        assert pool.longest == 3

    def test_neighbours_that_are_no_buddies_stay_apart(self, pool: BuddyPool) -> None:
        """Blocks 3 and 4 are adjacent, but no aligned pair."""
        for _ in range(11):
            pool.take(0)
        pool.put(ids(3, 4))
        assert pool.longest == 0

    def test_an_extent_at_a_place_must_be_aligned_free_and_inside(self, pool: BuddyPool) -> None:
        """Everything else is no extent."""
        assert pool.take_at(1, order=1) is None
        assert pool.take_at(10, order=1) is None
        assert pool.take_at(16, order=0) is None
        assert pool.take_at(2, order=1) == Extent(BlockId(2), 2)
        assert pool.take_at(2, order=1) is None

    def test_an_empty_pool_has_no_longest(self, pool: BuddyPool) -> None:
        """`FULL` is its order."""
        for _ in range(11):
            pool.take(0)
        assert pool.longest == FULL
        assert pool.num_free == 0


def test_a_prompt_is_granted_longest_extents_first() -> None:
    """Nineteen blocks are two bodies of 8, two blocks, one block: no block is wasted."""
    grant = DynamicAllocator(GEOMETRY).admit(seq(0), 150, max_tokens=512)

    assert lengths(grant) == [8, 8, 2, 1]


def test_growth_takes_the_block_behind_while_it_is_free() -> None:
    """A sequence alone grows into one run, without a copy."""
    allocator = DynamicAllocator(GEOMETRY)
    granted = list(allocator.admit(seq(0), 8, max_tokens=512).extents)
    for num_blocks in range(2, 33):
        grant = allocator.extend(seq(0), 8 * num_blocks)
        assert grant.moves == ()
        granted += grant.extents

    assert [extent.first_block for extent in granted] == list(range(32))


def side_by_side(allocator: DynamicAllocator) -> None:
    """Two sequences, 0 and 1, that grow in turns to eight blocks each, none of them in one run."""
    for number in (0, 1):
        allocator.admit(seq(number), 8, max_tokens=512)
    for num_blocks in range(2, 9):
        for number in (0, 1):
            assert allocator.extend(seq(number), 8 * num_blocks).moves == ()


def test_a_full_tail_is_copied_into_one_extent() -> None:
    """At the ninth block, the first eight are moved into a frame of their own, once."""
    allocator = DynamicAllocator(GEOMETRY)
    side_by_side(allocator)

    sources, targets = zip(*allocator.extend(seq(0), 72).moves, strict=True)

    assert len(sources) == 8
    assert list(targets) == list(range(targets[0], targets[0] + 8))
    assert targets[0] % 8 == 0
    assert allocator.extend(seq(0), 80).moves == ()


def test_a_full_tail_waits_for_a_whole_extent() -> None:
    """Without one it grows on by single blocks; it is moved as soon as there is one."""
    allocator = DynamicAllocator(PoolGeometry(32, 8, 512))
    side_by_side(allocator)
    others = allocator.admit(seq(2), 8 * 15, max_tokens=512)

    assert allocator.extend(seq(0), 72).moves == ()
    for extent in others.extents:
        allocator.free(BlockId(block) for block in extent)
    assert len(allocator.extend(seq(0), 80).moves) == 8


def test_pieces_serve_where_no_extent_is_whole() -> None:
    """Every second block is free: a sequence gets them one by one, none is lost."""
    allocator = DynamicAllocator(PoolGeometry(16, 8, 128))
    allocator.admit(seq(0), 128, max_tokens=128)
    allocator.free(ids(*range(0, 16, 2)))

    grant = allocator.admit(seq(1), 64, max_tokens=64)

    assert lengths(grant) == [1] * 8


def test_shared_blocks_are_not_granted_again() -> None:
    """With two blocks in the prefix cache, three of five are missing."""
    grant = DynamicAllocator(GEOMETRY).admit(seq(0), 40, max_tokens=512, shared_tokens=16)

    assert lengths(grant) == [2, 1]


def test_out_of_blocks_has_the_numbers() -> None:
    """Five blocks asked of four."""
    with pytest.raises(OutOfBlocks) as signal:
        DynamicAllocator(PoolGeometry(4, 8, 512)).admit(seq(0), 40, max_tokens=512)

    assert (signal.value.needed, signal.value.available) == (5, 4)


def test_a_tail_grows_by_min_block_and_is_trimmed() -> None:
    """Four blocks are granted for one token; three come back under pressure, and only once."""
    allocator = DynamicAllocator(GEOMETRY, min_block=4)
    grant = allocator.admit(seq(0), 1, max_tokens=512)
    free = allocator.statistics().free_blocks

    assert lengths(grant) == [4]
    assert list(allocator.trim(seq(0), 1)) == list(grant.extents[0])[1:]
    assert allocator.statistics().free_blocks == free + 3
    assert list(allocator.trim(seq(0), 1)) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_extent": 12}, "max_extent must be a power of two of blocks, got 12"),
        ({"min_block": 0}, "min_block must be a power of two of blocks, got 0"),
        ({"min_block": 16}, "min_block 16 is above max_extent 8"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, int], sentence: str) -> None:
    """The sentence has the numbers."""
    with pytest.raises(ValueError, match=sentence):
        DynamicAllocator(GEOMETRY, **options)
