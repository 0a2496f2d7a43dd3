"""Every strategy that kvpage ships, with every option that changes its ways, passes the kit."""

from functools import partial

import pytest

from kvpage.allocators.contiguous import ContiguousAllocator
from kvpage.allocators.dynamic import DynamicAllocator
from kvpage.allocators.fixed import FixedAllocator
from kvpage.testing import check_allocator
from kvpage.testing.conformance import AllocatorUnderTest

STRATEGIES: dict[str, AllocatorUnderTest] = {
    "fixed": FixedAllocator,
    "dynamic": DynamicAllocator,
    "dynamic-short": partial(DynamicAllocator, max_extent=2),
    "dynamic-coarse": partial(DynamicAllocator, min_block=4, max_extent=8),
    "contiguous-model": partial(ContiguousAllocator, reserve="model"),
    "contiguous-request": partial(ContiguousAllocator, reserve="request", fit="best"),
    "contiguous-power-of-two": partial(ContiguousAllocator, reserve="power_of_two"),
}

every_strategy = pytest.mark.parametrize("factory", STRATEGIES.values(), ids=STRATEGIES.keys())


@every_strategy
def test_passes_the_kit(factory: AllocatorUnderTest) -> None:
    """A few histories of each, on every run of the suite."""
    check_allocator(factory, max_examples=15)


@pytest.mark.slow
@every_strategy
def test_passes_the_kit_at_length(factory: AllocatorUnderTest) -> None:
    """A thousand histories of fifty calls."""
    check_allocator(factory, max_examples=1000, steps=50)
