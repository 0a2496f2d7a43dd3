"""OpenAI's HTTP API as an ASGI app, to be mounted in any ASGI program. Needs the extra `serve`.

It starts nothing of its own: it shares the event loop of its host, asyncio's or trio's, and serves
engines that the host opens and closes::

    async with kvpage.AsyncEngine.from_pretrained() as engine:
        app = Starlette(routes=[Mount("/llm", openai_app(engine))])
"""

import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import attrs
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kvpage.engine import AsyncEngine
from kvpage.errors import KvpageError
from kvpage.integrations.connection import ClientGone, EventStream, read_body, while_connected
from kvpage.integrations.guards import ApiKeyGuard
from kvpage.integrations.openai.document import openapi_document
from kvpage.integrations.openai.errors import ApiError, api_error, invalid_body, json_response
from kvpage.integrations.openai.generation import Job, chat_job, completion_job, response_job
from kvpage.integrations.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ResponseRequest,
)
from kvpage.metrics import register
from kvpage.snapshot import EngineSnapshot
from kvpage.stats import EngineHealth

logger = logging.getLogger("kvpage.http")

LARGE_BODY_BYTES = 64 * 2**10
"""A longer body is parsed in a thread: the event loop goes on meanwhile."""

STUCK_S = 60.0
"""An engine that has work and finishes no step in this time is not well."""

OpenJob = Callable[[Any, AsyncEngine], Awaitable[Job]]


@attrs.frozen(kw_only=True)
class Limits:
    """What one request may take.

    Attributes:
        body_bytes: length of its body.
        body_s: seconds for its body to arrive; None: no limit.
        request_s: seconds for its answer, queueing included; None: no limit.
    """

    body_bytes: int = 4 * 2**20
    body_s: float | None = 30.0
    request_s: float | None = None


def openai_app(
    engines: AsyncEngine | Mapping[str, AsyncEngine],
    *,
    api_keys: Collection[str] = (),
    cors_origins: Collection[str] = (),
    limits: Limits | None = None,
) -> ASGIApp:
    """OpenAI's API over engines that are open.

    `/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/v1/responses`, and beside them
    `/health`, `/metrics`, `/stats` for `kvpage watch`, and `/openapi.json`.

    Args:
        engines: an engine, served under its model's name, or several by the names that requests
            call them by. Not closed by the app. An engine's adapters are models of their own, under
            their names; where a name is taken already, that model keeps it.
        api_keys: who brings one of these as bearer token may use `/v1`; none: everybody may.
        cors_origins: origins whose web pages may call; `"*"` for all.
        limits: of one request.
    """
    if isinstance(engines, AsyncEngine):
        engines = {engines.model.name: engines}
    api: ASGIApp = Router(_api_routes(dict(engines), limits or Limits()))
    if api_keys:
        api = ApiKeyGuard(api, api_keys)
    app: ASGIApp = Starlette(
        routes=[*_about_routes(dict(engines)), Mount("/v1", api)],
        exception_handlers={HTTPException: _http_error},
    )
    if cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=[*cors_origins],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return _AnySlash(app)


class _AnySlash:
    """Takes `/v1/models/` for `/v1/models`: Litestar adds the slash for what is mounted in it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path", "").endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


def _api_routes(engines: Mapping[str, AsyncEngine], limits: Limits) -> list[BaseRoute]:
    served = _served(engines)
    models = _Models(served)
    endpoint = partial(_Endpoint, models=served, limits=limits)
    return [
        Route("/models", models.list),
        Route("/models/{name:path}", models.one),
        Route("/completions", endpoint(CompletionRequest, completion_job), methods=["POST"]),
        Route("/chat/completions", endpoint(ChatRequest, chat_job), methods=["POST"]),
        Route("/responses", endpoint(ResponseRequest, response_job), methods=["POST"]),
    ]


@attrs.frozen
class _Served:
    """What the name of a model stands for.

    Attributes:
        engine: computes.
        adapter: with this adapter; None: with none.
        parent: the name of the model that the adapter belongs to.
    """

    engine: AsyncEngine
    adapter: str | None = None
    parent: str | None = None


def _served(engines: Mapping[str, AsyncEngine]) -> dict[str, _Served]:
    served = {name: _Served(engine) for name, engine in engines.items()}
    for name, engine in engines.items():
        for adapter in engine.model.adapters:
            served.setdefault(adapter, _Served(engine, adapter, name))
    return served


def _about_routes(engines: Mapping[str, AsyncEngine]) -> list[BaseRoute]:
    registry = CollectorRegistry()
    measured: set[AsyncEngine] = set()  # an engine with several names goes by the first
    for name, engine in engines.items():
        if engine not in measured:
            register(engine, registry, model=name)
            measured.add(engine)

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def stats(_request: Request) -> Response:
        try:
            found = [await EngineSnapshot.of(engine, name) for name, engine in engines.items()]
        except KvpageError as error:  # an engine is closed or broken
            return api_error(error).response()
        return json_response({"engines": [snapshot.document() for snapshot in found]})

    async def document(_request: Request) -> Response:
        return json_response(openapi_document([*_served(engines)]))

    return [
        Route("/health", partial(_health, engines)),
        Route("/metrics", metrics),
        Route("/stats", stats),
        Route("/openapi.json", document),
    ]


class _Models:
    """What there is to choose from."""

    def __init__(self, served: Mapping[str, _Served]) -> None:
        self._served = served
        self._created = int(time.time())

    async def list(self, _request: Request) -> Response:
        models = [self._about(name) for name in self._served]
        return json_response({"object": "list", "data": models})

    async def one(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._served:
            return _no_such_model(name, self._served).response()
        return json_response(self._about(name))

    def _about(self, name: str) -> dict[str, Any]:
        served = self._served[name]
        about = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvpage",
            "max_model_len": served.engine.geometry.max_model_len,
        }
        return about if served.parent is None else {**about, "parent": served.parent}


class _Endpoint:
    """An ASGI app that answers one kind of request."""

    def __init__(
        self,
        body: type[GenerationRequest],
        open_job: OpenJob,
        *,
        models: Mapping[str, _Served],
        limits: Limits,
    ) -> None:
        self._body = body
        self._open_job = open_job
        self._models = models
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; every failure is told to the client in OpenAI's shape."""
        exchange = _Exchange(EventStream(send))
        try:
            request = await self._read(scope, receive)
            with anyio.fail_after(self._limits.request_s):
                response = await while_connected(
                    receive,
                    partial(self._answer, request, exchange),
                    meanwhile=exchange.events.keep_alive,
                )
        except ClientGone:
            return
        except Exception as error:
            response = await exchange.failed(error)
        if response is not None:
            await response(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> GenerationRequest:
        kind = Request(scope).headers.get("content-type", "").partition(";")[0]
        if kind.strip().lower() != "application/json":
            # A web page may send any other type without asking first.
            raise ApiError(status=415, message="the body must have Content-Type: application/json")
        limits = self._limits
        body = await read_body(receive, max_bytes=limits.body_bytes, timeout_s=limits.body_s)
        if len(body) > LARGE_BODY_BYTES:
            return await anyio.to_thread.run_sync(self._parse, body)
        return self._parse(body)

    def _parse(self, body: bytes) -> GenerationRequest:
        try:
            return self._body.model_validate_json(body)
        except ValidationError as error:
            raise invalid_body(error) from None

    async def _answer(self, request: GenerationRequest, exchange: "_Exchange") -> Response | None:
        served = self._models.get(request.model)
        if served is None:
            raise _no_such_model(request.model, self._models)
        job = await self._open_job(request, served.engine)
        exchange.job = attrs.evolve(job, adapter=served.adapter)
        return await exchange.job.run(exchange.events)


@attrs.define
class _Exchange:
    """How far the answer to one request has come."""

    events: EventStream
    job: Job | None = None

    async def failed(self, error: Exception) -> Response | None:
        """Tell the client; as an event if the answer has begun."""
        engine = self.job.engine if self.job else None
        told = api_error(error, engine)
        if not isinstance(error, (ApiError, KvpageError, TimeoutError)):
            _log_fault(error)
        if self.job is None or not self.events.started:
            return told.response()
        await self.events.emit(self.job.answer.failure(told.body()["error"]))
        await self.events.end()
        return None


def _log_fault(error: Exception) -> None:
    """Where it happened, and not its message: that may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a request failed by %s\n%s", type(error).__name__, frames)


def _no_such_model(name: str, served: Mapping[str, _Served]) -> ApiError:
    known = ", ".join(map(repr, served))
    return ApiError(
        status=404,
        message=f"there is no model {name!r}; this server has {known}",
        param="model",
        code="model_not_found",
    )


async def _health(engines: Mapping[str, AsyncEngine], _request: Request) -> Response:
    """200 if every engine takes requests and gets on with them, else 503."""
    healths = {name: engine.health() for name, engine in engines.items()}
    well = all(map(_gets_on, healths.values()))
    content = {
        "status": "ok" if well else "unavailable",
        "models": {name: _about(health) for name, health in healths.items()},
    }
    return json_response(content, 200 if well else 503)


def _gets_on(health: EngineHealth) -> bool:
    return health.state == "running" and health.since_progress_s < STUCK_S


def _about(health: EngineHealth) -> dict[str, Any]:
    return {
        "state": health.state,
        "open_requests": health.open_requests,
        "since_progress_s": round(health.since_progress_s, 3),
    }


async def _http_error(_request: Request, error: Exception) -> Response:
    """No such path, or not by this method."""
    assert isinstance(error, HTTPException)
    told = ApiError(status=error.status_code, message=error.detail, headers=error.headers or {})
    return told.response()
