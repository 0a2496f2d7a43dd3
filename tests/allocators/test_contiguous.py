"""`contiguous` reserves one extent for a whole life, with all the waste that goes with it."""

import pytest

from kvpage.allocators.contiguous import ContiguousAllocator, Fit, Reserve
from kvpage.blocks import BlockId, Extent, PoolGeometry, SequenceId
from kvpage.errors import OutOfBlocks

GEOMETRY = PoolGeometry(num_blocks=32, block_size=16, max_model_len=256)


def seq(number: int) -> SequenceId:
    return SequenceId(number)


def blocks(first: int, end: int) -> list[BlockId]:
    return [BlockId(block) for block in range(first, end)]


@pytest.mark.parametrize(
    ("reserve", "reserved"), [("model", 16), ("request", 5), ("power_of_two", 8)]
)
def test_reserves_for_the_whole_life(reserve: Reserve, reserved: int) -> None:
    """Room for 256 tokens of the model, 70 of the request, or 128, the power of two above 70."""
    allocator = ContiguousAllocator(GEOMETRY, reserve=reserve)

    grant = allocator.admit(seq(0), 20, max_tokens=70)

    assert grant.extents == (Extent(BlockId(0), reserved),)


def test_a_power_of_two_is_reserved_as_it_is() -> None:
    """64 tokens are 4 blocks, not 8."""
    allocator = ContiguousAllocator(GEOMETRY, reserve="power_of_two")

    assert allocator.admit(seq(0), 20, max_tokens=64).extents == (Extent(BlockId(0), 4),)


def test_growth_is_free() -> None:
    """What was reserved at admission serves every later token."""
    allocator = ContiguousAllocator(GEOMETRY, reserve="request")
    allocator.admit(seq(0), 20, max_tokens=70)

    assert allocator.extend(seq(0), 70).extents == ()


def test_a_model_longer_than_the_pool_reserves_the_pool() -> None:
    """A reservation that could never be met is cut to the pool; outgrowing that is refused."""
    allocator = ContiguousAllocator(PoolGeometry(2, 16, 256))
    allocator.admit(seq(0), 20, max_tokens=256)

    with pytest.raises(OutOfBlocks) as signal:
        allocator.extend(seq(0), 33)

    assert (signal.value.needed, signal.value.available) == (1, 0)


@pytest.mark.parametrize(("fit", "first_block"), [("first", 0), ("best", 20)])
def test_fit_chooses_among_holes(fit: Fit, first_block: int) -> None:
    """With a hole of 12 blocks and one of 4, a sequence of 4 goes to the first or to the best."""
    allocator = ContiguousAllocator(GEOMETRY, reserve="request", fit=fit)
    for number, length in enumerate((12, 8, 4, 8)):
        allocator.admit(seq(number), 1, max_tokens=16 * length)
    allocator.free(blocks(0, 12))
    allocator.free(blocks(20, 24))

    grant = allocator.admit(seq(9), 1, max_tokens=64)

    assert grant.extents[0].first_block == first_block


def test_external_waste_refuses_what_would_fit_in_all() -> None:
    """Sixteen free blocks in two holes of eight do not serve a sequence of nine."""
    allocator = ContiguousAllocator(GEOMETRY, reserve="request")
    for number in range(4):
        allocator.admit(seq(number), 1, max_tokens=128)
    allocator.free(blocks(0, 8))
    allocator.free(blocks(16, 24))

    with pytest.raises(OutOfBlocks) as signal:
        allocator.admit(seq(9), 1, max_tokens=144)

    assert (signal.value.needed, signal.value.available) == (9, 8)
    assert allocator.statistics().free_blocks == 16
    assert allocator.statistics().largest_extent == 8


def test_adjacent_holes_become_one() -> None:
    """Blocks that come back in any order join their free neighbours."""
    allocator = ContiguousAllocator(GEOMETRY, reserve="request")
    allocator.admit(seq(0), 1, max_tokens=512)

    allocator.free([BlockId(block) for block in (7, 3, 5, 4, 6)])
    allocator.free([BlockId(2)])

    statistics = allocator.statistics()
    assert statistics.largest_extent == 6
    assert statistics.extra == {"free_extents": 1}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"reserve": "all"}, "reserve must be one of model, request, power_of_two, got 'all'"),
        ({"fit": "worst"}, "fit must be one of first, best, got 'worst'"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, str], sentence: str) -> None:
    """The sentence lists what there is."""
    with pytest.raises(ValueError, match=sentence):
        ContiguousAllocator(GEOMETRY, **options)  # type: ignore[arg-type]
