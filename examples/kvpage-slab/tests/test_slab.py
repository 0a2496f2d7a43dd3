"""The one test that a kvpage allocator needs."""

from kvpage_slab import SlabAllocator

from kvpage.testing import check_allocator


def test_keeps_the_contract() -> None:
    """Random histories against a shadow model of the pool."""
    check_allocator(SlabAllocator)
