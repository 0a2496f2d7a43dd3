"""The one hook of kvpage."""

from collections.abc import Iterable

import pluggy

from kvpage.allocators.base import AllocatorPlugin

hookspec = pluggy.HookspecMarker("kvpage")
hookimpl = pluggy.HookimplMarker("kvpage")
"""Marks a plugin's implementation of a hook: `@kvpage.hookimpl`."""


@hookspec
def kvpage_allocators() -> Iterable[AllocatorPlugin]:  # type: ignore[empty-body]
    """Return the allocator strategies that this plugin offers.

    Called once when an engine is built; never while it runs.
    """
