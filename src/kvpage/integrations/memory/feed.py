"""One stream of changes of an engine, for all who watch it. Nothing happens while nobody does."""

import json
from collections import deque

import anyio

from kvpage.engine import AsyncEngine
from kvpage.integrations.memory.changes import Document, about, changes, snapshot
from kvpage.stats import BlockImage

INTERVAL_S = 0.2
"""Five looks a second."""

MAX_BEHIND = 25
"""A viewer that is further behind gets a whole snapshot instead of what it has missed."""


class MemoryFeed:
    """Looks at an engine now and then, and no more often for many viewers than for one.

    It has no task of its own: the viewer that asks first looks for all.

    Args:
        engine: what is looked at.
        interval_s: time between two looks, at least.
    """

    def __init__(self, engine: AsyncEngine, *, interval_s: float = INTERVAL_S) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._about = about(engine)
        self._looking = anyio.Lock()
        self._number = 0
        self._image: BlockImage | None = None
        self._looked_at = 0.0
        self._changes: deque[bytes] = deque(maxlen=MAX_BEHIND)

    async def news(self, since: int) -> tuple[int, bytes]:
        """What happened after look number `since`; 0: everything.

        Returns:
            The number of the last look, and server-sent events, none if nothing has changed.

        Raises:
            EngineClosed: the engine was closed.
            EngineBroken: it has ended by an exception.
        """
        async with self._looking:
            if since == self._number or (since == 0 and self._is_old()):
                await self._look()
            missed = self._number - since
            if missed > len(self._changes):  # or has seen nothing: the first look has no changes
                return self._number, self._snapshot()
            return self._number, b"".join([*self._changes][len(self._changes) - missed :])

    def _is_old(self) -> bool:
        """Has nobody watched for a while?"""
        return anyio.current_time() > self._looked_at + 2 * self._interval_s

    async def _look(self) -> None:
        await anyio.sleep_until(self._looked_at + self._interval_s)
        image = await self._engine.block_image()
        self._looked_at = anyio.current_time()
        if self._image is not None:
            changed = changes(self._image, image)
            self._changes.append(_event("changes", self._dated(changed)) if changed else b"")
        self._image = image
        self._number += 1

    def _snapshot(self) -> bytes:
        assert self._image is not None
        return _event("snapshot", self._dated({**self._about, **snapshot(self._image)}))

    def _dated(self, document: Document) -> Document:
        """With the time, in seconds of a clock that only goes on."""
        return {"time": round(self._looked_at, 3), **document}


def _event(kind: str, document: Document) -> bytes:
    text = json.dumps(document, separators=(",", ":"))
    return f"event: {kind}\ndata: {text}\n\n".encode()
