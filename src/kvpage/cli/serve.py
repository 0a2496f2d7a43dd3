"""`kvpage serve`: OpenAI's HTTP API over one model. Needs the extra `serve`."""

import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import attrs
import typer

from kvpage.cli import options as flags
from kvpage.config import EngineConfig
from kvpage.engine import AsyncEngine
from kvpage.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

KEY_VARIABLE = "KVPAGE_API_KEY"

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@attrs.frozen(kw_only=True)
class ServeOptions:
    """How to serve, beside the engine's own settings.

    Attributes:
        host: the address to listen on.
        port: the port to listen on; 0 takes a free one.
        names: what requests may call the model; none: its own name.
        api_keys: who has one of them may use `/v1`; none: everybody.
        cors_origins: web pages of these origins may call.
        allowed_hosts: `Host` headers that are answered; none: every one.
        max_body_bytes: of one request.
        request_timeout_s: for one answer; None: no limit.
        drain_timeout_s: how long open requests may go on after SIGTERM.
        access_log: log each request when it is over.
        memory_page: show who holds which block at `/memory`.
    """

    host: str
    port: int
    names: tuple[str, ...]
    api_keys: tuple[str, ...] = attrs.field(repr=False)
    cors_origins: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    max_body_bytes: int
    request_timeout_s: float | None
    drain_timeout_s: int
    access_log: bool
    memory_page: bool


def serve(
    model: Annotated[str | None, typer.Argument(help=flags.MODEL_HELP)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What requests call the model; may be repeated.")
    ] = None,
    allocator: flags.Allocator = "fixed",
    block_size: flags.BlockSize = None,
    kv_memory: flags.KVMemory = None,
    max_model_len: flags.MaxModelLen = None,
    max_num_seqs: flags.MaxNumSeqs = 64,
    max_batch_tokens: Annotated[
        int, typer.Option("--max-batch-tokens", "--max-num-batched-tokens", help="Per step.")
    ] = 512,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may queue; beyond it the answer is 429.")
    ] = 256,
    prefix_cache: Annotated[bool, typer.Option(help="Share blocks of equal prefixes.")] = True,
    dtype: flags.Dtype = None,
    weights: flags.Weights = None,
    kv_dtype: flags.KVDtype = "auto",
    device: flags.Device = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"A key on each line. [default: the environment's {KEY_VARIABLE}]"),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Let web pages of this origin call; may be repeated.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Name in the Host header; may be repeated. [default: see the docs]"),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Longest request.")] = 4 * 2**20,
    request_timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds for one answer. [default: no limit]")
    ] = None,
    drain_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds that open requests may go on after SIGTERM.")
    ] = 60,
    access_log: Annotated[bool, typer.Option(help="Log each request when it is over.")] = True,
    memory_page: Annotated[
        bool, typer.Option("--memory-page", help="Show the blocks, live, at /memory.")
    ] = False,
) -> None:
    """Serve a model over HTTP, in OpenAI's API."""
    settings: dict[str, Any] = {
        "allocator": allocator,
        "block_size": block_size,
        "kv_memory": kv_memory,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_batch_tokens": max_batch_tokens,
        "max_waiting": max_waiting,
        "when_busy": "raise",
        "prefix_cache": prefix_cache,
        "kv_dtype": kv_dtype,
    }
    EngineConfig(**settings)  # refuses what cannot work before anything is loaded
    chosen = ServeOptions(
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        api_keys=read_api_keys(api_key_file),
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or _own_names(host)),
        max_body_bytes=max_body_bytes,
        request_timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
        access_log=access_log,
        memory_page=memory_page,
    )
    _check_installed()
    with _log_from_a_thread(), _bound(host, port) as listener:
        _warn_if_open(chosen)
        loading = {"dtype": dtype, "weights": weights, "device": device}
        anyio.run(_run, model, {**settings, **loading}, chosen, listener)


def read_api_keys(file: Path | None) -> tuple[str, ...]:
    """The keys in `file`, one on each line, or the one in the environment.

    Raises:
        ConfigError: there is no such file, or no key in it.
    """
    if file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return (key,) if key else ()
    try:
        keys = tuple(line.strip() for line in file.read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API keys in {str(file)!r} cannot be read: {error}") from error
    if not keys:
        raise ConfigError(f"there is no API key in {str(file)!r}")
    return keys


def guarded_app(
    engine: AsyncEngine, options: ServeOptions, closing: anyio.Event | None = None
) -> "ASGIApp":
    """Everything that is served, behind its guards; `closing` sends viewers of memory away."""
    from kvpage.integrations.asgi import Limits, openai_app
    from kvpage.integrations.guards import AccessLog, HostGuard
    from kvpage.integrations.memory import memory_app

    names = options.names or (engine.model.name,)
    app = openai_app(
        dict.fromkeys(names, engine),
        api_keys=options.api_keys,
        cors_origins=options.cors_origins,
        limits=Limits(body_bytes=options.max_body_bytes, request_s=options.request_timeout_s),
    )
    if options.memory_page:
        page = memory_app(engine, api_keys=options.api_keys, closing=closing)
        app = _beside_memory_page(app, page)
    if options.allowed_hosts:
        app = HostGuard(app, options.allowed_hosts)
    return AccessLog(app) if options.access_log else app


def _beside_memory_page(app: "ASGIApp", page: "ASGIApp") -> "ASGIApp":
    from starlette.applications import Starlette
    from starlette.responses import RedirectResponse
    from starlette.routing import Mount, Route

    to_page = Route("/memory", RedirectResponse("memory/"))
    return Starlette(routes=[to_page, Mount("/memory", page), Mount("", app)])


async def _run(
    model: str | None, settings: dict[str, Any], options: ServeOptions, listener: socket.socket
) -> None:
    """Load, serve until a signal comes, finish open requests, and close."""
    import uvicorn

    closing = anyio.Event()
    async with AsyncEngine.from_pretrained(model, **settings) as engine:
        config = uvicorn.Config(
            guarded_app(engine, options, closing),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=options.drain_timeout_s,
        )
        server = _server(config)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stop_on_signal, server, closing)
            host, port = listener.getsockname()[:2]
            url = f"http://{_in_url(host)}:{port}"
            listener.listen(config.backlog)  # who reads the address may call it at once
            print(f"{engine.model.name} on {url}/v1", file=sys.stderr)
            if options.memory_page:
                print(f"its memory on {url}/memory", file=sys.stderr)
            await server.serve(sockets=[listener])
            tasks.cancel_scope.cancel()


def _server(config: Any) -> Any:
    """A uvicorn server that leaves signals to us.

    Its own handling ends the process by the signal, before the engine could be closed.
    """
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(config)


async def _stop_on_signal(server: Any, closing: anyio.Event) -> None:
    """The first signal lets open requests finish; the second ends them."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            server.force_exit = server.should_exit
            server.should_exit = True
            closing.set()


def _check_installed() -> None:
    try:
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{error}: run pip install 'kvpage[serve]'") from error


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """The address, taken before the model is loaded: who cannot have it need not wait."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            yield listener
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from error


@contextmanager
def _log_from_a_thread() -> Iterator[None]:
    """Log to stderr without ever holding up the event loop."""
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    printer = logging.StreamHandler()
    printer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    listener = QueueListener(records, printer)
    handler = QueueHandler(records)
    chosen = [logging.getLogger(name) for name in ("kvpage", "uvicorn")]
    for logger in chosen:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    listener.start()
    try:
        yield
    finally:
        listener.stop()
        for logger in chosen:
            logger.removeHandler(handler)


def _warn_if_open(options: ServeOptions) -> None:
    if not options.api_keys and not _is_loopback(options.host):
        print(
            f"kvpage: everybody who reaches {options.host} may use this server: give it a key "
            f"with --api-key-file or {KEY_VARIABLE}",
            file=sys.stderr,
        )


def _own_names(host: str) -> tuple[str, ...]:
    """A server that only this machine reaches is called by these names."""
    return (*LOOPBACK_NAMES, host) if _is_loopback(host) else ()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
