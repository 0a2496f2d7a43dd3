"""The tutorial on allocators tells what happens."""

import re
from pathlib import Path
from typing import Any

import pytest

from kvpage.testing import ContractViolation, check_allocator

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial" / "your-first-allocator.md"


@pytest.fixture(scope="module")
def listings() -> list[str]:
    """The Python listings in order: the allocator, its check, the mended methods, its use."""
    return re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)


def allocator(listing: str) -> Any:
    """The class that a listing defines."""
    names: dict[str, Any] = {}
    exec(listing, names)
    return names["LowestFirst"]


def test_the_first_version_fails_as_printed(listings: list[str]) -> None:
    """The sentence in the tutorial is the kit's."""
    sentence = "admit(1, 1, max_tokens=1, shared=0) raised IndexError: index out of range"
    assert sentence in TUTORIAL.read_text()

    with pytest.raises(ContractViolation, match=re.escape(sentence)):
        check_allocator(allocator(listings[0]))


def test_the_mended_version_passes(listings: list[str]) -> None:
    """With `admit` and `extend` replaced, the kit is silent."""
    before, _, rest = listings[0].partition("    def admit(")
    after = "    def free(" + rest.partition("    def free(")[2]

    check_allocator(allocator(before + listings[2] + "\n" + after), max_examples=30)
