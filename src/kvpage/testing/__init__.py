"""For tests of allocators, and of programs that embed kvpage. Imports neither pytest nor torch."""

from kvpage.testing.fake_runner import CorruptCache, FakeRunner, arbitrary_token, undisturbed

__all__ = ["CorruptCache", "FakeRunner", "arbitrary_token", "undisturbed"]
