"""One HTTP connection as an ASGI app sees it: read a body, notice who leaves, stream events.

Written here and not taken from `sse-starlette`: see `docs/decisions/006-server-sent-events.md`.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import anyio
from starlette.types import Receive, Send

from kvpage.integrations.openai.errors import ApiError

T = TypeVar("T")

Emit = Callable[[bytes], Awaitable[None]]
"""Sends whole server-sent events."""

PING_S = 15.0
"""A silent stream says that it is alive so often; proxies give up after a minute or so."""

_PING = b": ping\n\n"

_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would hold the events back
    ],
}


class ClientGone(Exception):  # noqa: N818  (a signal)
    """The client has left: nobody is there to be answered."""


async def read_body(receive: Receive, *, max_bytes: int, timeout_s: float | None) -> bytes:
    """The whole body of a request.

    Raises:
        ApiError: it is too long, or took too long to arrive.
        ClientGone: the client left before its end.
    """
    parts: list[bytes] = []
    num_bytes, more = 0, True
    with anyio.move_on_after(timeout_s) as patience:
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > max_bytes:
                raise ApiError(status=413, message=f"the body is over {max_bytes} bytes long")
            more = message.get("more_body", False)
    if patience.cancelled_caught:
        raise ApiError(status=408, message=f"the body did not arrive within {timeout_s:g} s")
    return b"".join(parts)


async def while_connected(
    receive: Receive,
    work: Callable[[], Awaitable[T]],
    *,
    meanwhile: Callable[[], Coroutine[Any, Any, None]],
) -> T:
    """Do `work`, and cancel it at once when the client leaves. The body must have been read.

    Args:
        receive: of the connection.
        work: what the client waits for.
        meanwhile: runs beside it, and is cancelled when it is done.

    Raises:
        ClientGone: the client left.
    """
    done: list[T] = []
    failure: Exception | None = None

    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        tasks.start_soon(meanwhile)
        try:
            done.append(await work())
        except Exception as error:  # bare, not in the group that the task group would make of it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if not done:
        raise ClientGone
    return done[0]


class EventStream:
    """Server-sent events to one client. The headers go with the first of them.

    Attributes:
        started: were headers sent? From then on an error can only be told as an event.
    """

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send
        self._silent = True

    async def emit(self, events: bytes) -> None:
        """Send whole events; waits while the client's connection is full."""
        self._silent = False
        if not self.started:
            self.started = True
            await self._send(_START)
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """No event will follow."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self) -> None:
        """Ping while nothing else is sent, for ever."""
        while True:
            self._silent = True
            await anyio.sleep(PING_S)
            if self._silent and self.started:
                await self.emit(_PING)
