"""`docs/explanation/what-is-tested.md` names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "what-is-tested.md"


def named_tests() -> list[str]:
    """Modules, and functions of them, in order."""
    return sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE.read_text())))


@pytest.mark.parametrize("name", named_tests())
def test_a_named_test_exists(name: str) -> None:
    """The module has the function, or any test."""
    module, _, function = name.partition("::")
    assert re.search(rf"def {function or 'test_'}", (ROOT / module).read_text())


def test_every_situation_names_a_test() -> None:
    """No row of a table is a mere promise."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    situations = [row for row in rows if not row.startswith("| situation")]
    assert [row for row in situations if "`tests/" not in row] == []
