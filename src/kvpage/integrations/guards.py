"""ASGI wrappers that keep people out, or note who was in."""

import hmac
import logging
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpage.integrations.openai.errors import ApiError

access_logger = logging.getLogger("kvpage.access")


class ApiKeyGuard:
    """Lets in who has a key: `Authorization: Bearer KEY`.

    Args:
        app: what is guarded.
        keys: the keys that are good; several, so that they can be changed one after the other.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and not self._good(_header(scope, b"authorization")):
            await _unauthorized().response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _good(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        # Every key is compared, and in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def _unauthorized() -> ApiError:
    return ApiError(
        status=401,
        message="this server needs an API key, and the request has none or a wrong one",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


class HostGuard:
    """Answers only to its own names, so that no web page can reach it by a name of its making.

    A page may point a domain of its own at 127.0.0.1 ("DNS rebinding"); the browser then takes the
    server for the page's own. The `Host` header gives it away.

    Args:
        app: what is guarded.
        hosts: names and addresses, without ports.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower().strip("[]").encode() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] == "http" and _host(scope) not in self._hosts:
            error = ApiError(status=403, message="this server has no such name", code="wrong_host")
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _host(scope: Scope) -> bytes:
    host = _header(scope, b"host").lower()
    if host.startswith(b"["):  # an IPv6 address
        return host[1:].partition(b"]")[0]
    return host.partition(b":")[0]


class AccessLog:
    """One record for each request, when it is over: on the logger `kvpage.access`.

    Method, path, status, seconds and the client's address; no query, no header, no body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            _log(scope, status, time.perf_counter() - started)


def _log(scope: Scope, status: int, seconds: float) -> None:
    client = (scope.get("client") or ("-",))[0]
    # `%r`, since a path may hold line breaks.
    access_logger.info(
        "%s %s %r %s %.3f s", client, scope["method"], scope["path"], status or "left", seconds
    )


def _header(scope: Scope, name: bytes) -> bytes:
    found = [value for key, value in scope["headers"] if key == name]
    value: bytes = found[0] if len(found) == 1 else b""  # several would be a trick
    return value
