"""Every strategy that kvpage ships passes the kit."""

import pytest

from kvpage.testing import check_allocator
from kvpage.testing.conformance import AllocatorUnderTest


def test_passes_the_kit(factory: AllocatorUnderTest) -> None:
    """A few histories of each, on every run of the suite."""
    check_allocator(factory, max_examples=15)


@pytest.mark.slow
def test_passes_the_kit_at_length(factory: AllocatorUnderTest) -> None:
    """A thousand histories of fifty calls."""
    check_allocator(factory, max_examples=1000, steps=50)
