"""Set-up of all tests."""

# Loading a model freezes what the garbage collector tracks (`kvpage.imports`). hypothesis asks it
# who refers to trio's random numbers, so both are imported before that.
import hypothesis  # noqa: F401
import pytest

LONG_FILES = (
    "test_interpreter",
    "test_chaos",
    "test_smollm2",
    "test_sharing_an_engine",
    "test_serve",
    "test_documents",
    "test_public_traces",
)
"""Few tests that take long: begun first, so that no process is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of long files before all others."""
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)
