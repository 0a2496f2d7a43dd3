"""For tests of allocators, and of programs that embed kvpage.

Imports neither pytest nor torch. `check_allocator` needs hypothesis: `pip install kvpage[testing]`.
"""

from typing import TYPE_CHECKING, Any

from kvpage.testing.fake_runner import CorruptCache, FakeRunner, arbitrary_token, undisturbed
from kvpage.testing.leaks import assert_no_leaks
from kvpage.testing.shadow import ContractViolation

if TYPE_CHECKING:
    from kvpage.testing.conformance import check_allocator

__all__ = [
    "ContractViolation",
    "CorruptCache",
    "FakeRunner",
    "arbitrary_token",
    "assert_no_leaks",
    "check_allocator",
    "undisturbed",
]


def __getattr__(name: str) -> Any:
    """Import `check_allocator` when it is asked for: the rest does without hypothesis."""
    if name == "check_allocator":
        from kvpage.testing.conformance import check_allocator

        return check_allocator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
