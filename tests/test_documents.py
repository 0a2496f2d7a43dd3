"""What the documents say runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpage import ConfigError
from kvpage.pretrained import default_model_path

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/tutorial/first-tokens.md", "docs/how-to/structured-output.md")

try:
    default_model_path()
except ConfigError as missing:
    pytestmark = pytest.mark.skip(reason=str(missing))


def programs() -> list[str]:
    """The Python programs of these pages, whole ones only."""
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    ]
    return list(dict.fromkeys(block for block in blocks if "asyncio.run(" in block))


@pytest.mark.parametrize(
    "program",
    [
        # Each loads the model: the first of the README stands for all in the quick suite.
        pytest.param(program, marks=[pytest.mark.slow] if number else [], id=str(number))
        for number, program in enumerate(programs())
    ],
)
def test_a_program_of_the_documents_runs(program: str) -> None:
    """As it stands there, and prints text."""
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 40


def test_the_reference_is_what_the_docstrings_say() -> None:
    """`python docs/make_reference.py` would change nothing."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_reference.py"), "--check"], check=False
    )
    assert done.returncode == 0
