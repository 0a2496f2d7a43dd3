"""Fixtures of the tests of comparisons."""

from collections.abc import Iterator

import pytest

from tests.model.families import one_thread


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """See `one_thread`."""
    with one_thread():
        yield
