"""The strategies that kvpage ships, with every option that changes their ways."""

from functools import partial

import pytest

from kvpage.allocators.contiguous import ContiguousAllocator
from kvpage.allocators.dynamic import DynamicAllocator
from kvpage.allocators.fixed import FixedAllocator
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


@pytest.fixture(params=STRATEGIES.values(), ids=list(STRATEGIES))
def factory(request: pytest.FixtureRequest) -> AllocatorUnderTest:
    """Each strategy in turn."""
    made: AllocatorUnderTest = request.param
    return made
