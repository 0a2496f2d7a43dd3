"""The entrance of an engine: unique request ids and a bounded queue, from any event loop."""

import sys
import threading
from collections import deque
from collections.abc import Callable

import anyio
import anyio.lowlevel
import attrs

from kvpage.errors import DuplicateRequest, EngineBusy

Post = Callable[[Callable[[], None]], None]
"""Schedules a callback on an event loop, from any thread.

Raises `RuntimeError` when that loop has ended.
"""


def post_to_current_loop() -> Post:
    """The `Post` of the event loop that runs the current task, asyncio's or trio's."""
    loop = anyio.lowlevel.current_token().native_token
    for name in ("call_soon_threadsafe", "run_sync_soon"):
        post: Post | None = getattr(loop, name, None)
        if post is not None:
            return post
    raise RuntimeError(f"{type(loop).__name__} is neither an asyncio nor a trio event loop")


@attrs.define(eq=False)
class _Waiter:
    post: Post
    event: anyio.Event
    granted: bool = False


class AdmissionGate:
    """Who is inside, and who may queue. Its methods may be called from any thread.

    Args:
        max_waiting: requests that may be inside without having been scheduled yet.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        # Reentrant: dropping the last reference to a waiting task, which may happen in here, closes
        # its coroutine, and that gives up its turn.
        self._lock = threading.RLock()
        self._open: set[str] = set()
        self._num_waiting = 0
        self._waiters: deque[_Waiter] = deque()

    @property
    def num_open(self) -> int:
        """Requests whose ids are taken; does not wait for anybody."""
        return len(self._open)

    def try_enter(self, request_id: str) -> None:
        """Take the id and a place in the queue.

        Raises:
            DuplicateRequest: the id is taken.
            EngineBusy: the queue is full.
        """
        with self._lock:
            self._take_id(request_id)
            if self._num_waiting >= self._max_waiting:
                self._open.discard(request_id)
                raise EngineBusy(f"{self._max_waiting} requests are waiting already")
            self._num_waiting += 1

    async def enter(self, request_id: str) -> None:
        """Take the id, and wait for a place in the queue, first come, first served.

        Raises:
            DuplicateRequest: the id is taken.
        """
        with self._lock:
            self._take_id(request_id)
            if self._num_waiting < self._max_waiting:
                self._num_waiting += 1
                return
            waiter = _Waiter(post_to_current_loop(), anyio.Event())
            self._waiters.append(waiter)
        try:
            await waiter.event.wait()
        except BaseException:
            self._give_up(waiter, request_id)
            raise

    def scheduled(self) -> None:
        """A request that had entered was scheduled, or ended before: its place is free."""
        with self._lock:
            self._num_waiting -= 1
            self._pass_on()

    def leave(self, request_id: str) -> None:
        """The request is over; its id may be used again."""
        with self._lock:
            self._open.discard(request_id)

    def open_wide(self) -> None:
        """Let everyone in: the engine is closing, and tells so whoever enters."""
        with self._lock:
            self._max_waiting = sys.maxsize
            self._pass_on()

    def _take_id(self, request_id: str) -> None:
        if request_id in self._open:
            raise DuplicateRequest(f"a request {request_id!r} is still open")
        self._open.add(request_id)

    def _give_up(self, waiter: _Waiter, request_id: str) -> None:
        with self._lock:
            self._open.discard(request_id)
            if waiter.granted:
                self._num_waiting -= 1
                self._pass_on()
            elif waiter in self._waiters:  # or its event loop had ended when its turn came
                self._waiters.remove(waiter)

    def _pass_on(self) -> None:
        """Give free places to who waits longest. Holds the lock."""
        while self._waiters and self._num_waiting < self._max_waiting:
            waiter = self._waiters.popleft()
            try:
                waiter.post(waiter.event.set)
            except RuntimeError:  # its event loop has ended, and its task with it
                continue
            waiter.granted = True
            self._num_waiting += 1
