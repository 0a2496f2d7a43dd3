"""The memory page as an ASGI app, to be mounted in any ASGI program. Needs the extra `serve`."""

import base64
import hashlib
from collections.abc import Collection, Mapping
from functools import partial
from importlib.resources import files

import anyio
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvpage.engine import AsyncEngine
from kvpage.errors import KvpageError
from kvpage.integrations.connection import ClientGone, EventStream, while_connected
from kvpage.integrations.guards import ApiKeyGuard
from kvpage.integrations.memory.feed import MemoryFeed
from kvpage.integrations.openai.errors import ApiError, api_error

SCRIPTS = (
    *("memory.js", "recorder.js", "drawing.js", "map.js", "table.js", "charts.js"),
    "page.js",
)
"""In the order in which they need each other."""

STREAM_S = 30.0
"""Viewers come again after this time, so that a server which stops does not wait for ever."""


def memory_app(
    engine: AsyncEngine,
    *,
    api_keys: Collection[str] = (),
    closing: anyio.Event | None = None,
) -> ASGIApp:
    """A web page that shows who holds which block of an engine, live. Read-only.

    It shows counts, block numbers and the numbers of sequences: no prompt, no output, no request
    id. The page itself is the same for everybody and needs no key; what it shows does, if there are
    keys: it asks its reader for one. It loads nothing from other hosts.

    While nobody looks at it, it costs nothing.

    Args:
        engine: an engine that is open. Not closed by the app.
        api_keys: who has one of these may look; none: everybody may.
        closing: set it when your server is about to stop: viewers are sent away at once. Without it
            a server that waits for open responses waits for them up to 30 seconds.
    """
    events: ASGIApp = _Events(MemoryFeed(engine), closing)
    if api_keys:
        events = ApiKeyGuard(events, api_keys)
    return _ByPath({"": _page(key_needed=bool(api_keys)), "events": events})


class _ByPath:
    """Apps by what follows the path of their mount, with or without a slash at the end."""

    def __init__(self, apps: Mapping[str, ASGIApp]) -> None:
        self._apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"].removeprefix(scope.get("root_path", "")).strip("/")
        app = self._apps.get(path)
        if app is None:
            app = ApiError(status=404, message="Not Found").response()
        elif scope["method"] not in ("GET", "HEAD"):
            error = ApiError(
                status=405, message="Method Not Allowed", headers={"Allow": "GET, HEAD"}
            )
            app = error.response()
        await app(scope, receive, send)


class _Events:
    """Streams what a feed tells, until the viewer leaves, the engine ends or time is up."""

    def __init__(self, feed: MemoryFeed, closing: anyio.Event | None) -> None:
        self._feed = feed
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send)
        tell = partial(self._tell, stream)
        try:
            last = await while_connected(receive, tell, meanwhile=stream.keep_alive)
        except ClientGone:
            return
        except KvpageError as error:  # the engine is closed or broken
            if not stream.started:
                await api_error(error).response()(scope, receive, send)
                return
            last = b"end"
        await stream.emit(b"event: %b\ndata: {}\n\n" % last)
        await stream.end()

    async def _tell(self, stream: EventStream) -> bytes:
        """Returns what the last event is to say: come again, or that it is the end."""
        number, until = 0, anyio.current_time() + STREAM_S
        while anyio.current_time() < until:
            if self._closing is not None and self._closing.is_set():
                return b"end"
            number, events = await self._feed.news(number)
            if events:
                await stream.emit(events)
        return b"again"


def _page(*, key_needed: bool) -> Response:
    """One document with its style and script in it: nothing else is ever loaded."""
    html, style = _source("page.html"), _source("page.css")
    script = "\n".join(map(_source, SCRIPTS))
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'self'",
        ]
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    key = "needed" if key_needed else "none"
    document = html.replace("KEY", key).replace("STYLE", style).replace("SCRIPT", script)
    return Response(document, headers=headers, media_type="text/html")


def _source(name: str) -> str:
    return files("kvpage.integrations.memory").joinpath("web", name).read_text("utf-8")


def _hash(source: str) -> str:
    """How a content security policy names a script or style that is in the document."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
