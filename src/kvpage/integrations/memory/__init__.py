"""The memory page: an engine's blocks, live in a browser."""

from kvpage.integrations.memory.page import memory_app

__all__ = ["memory_app"]
