"""`kvpage watch`: a running engine in a terminal."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import attrs
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpage.cli.figure import OWNER_STYLES
from kvpage.errors import ConfigError
from kvpage.snapshot import EngineSnapshot
from kvpage.stats import BlockMap

PATIENCE_S = 5.0
LARGEST_ANSWER = 64 * 2**20
KEY_VARIABLE = "KVPAGE_API_KEY"
MAP_ROWS = 12
BAR = 40
FREE, CACHED, FILLED, RESERVED = "·", "▒", "█", "░"


def watch(
    url: Annotated[str, typer.Argument(help="Where `kvpage serve` listens.")] = (
        "http://127.0.0.1:8000"
    ),
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end.")] = False,
    api_key_file: Annotated[
        Path | None, typer.Option(help=f"Holds an API key. [default: ${KEY_VARIABLE}, if set]")
    ] = None,
) -> None:
    """Show blocks by owner, queues and rates of the engines behind URL."""
    server = Server(stats_url(url), _api_key(api_key_file))
    console = Console()
    snapshots = server.look()
    if once or not console.is_terminal:
        console.print(screen(snapshots, Rates(), console.width))
        return
    _follow(server, snapshots, console, every)


def stats_url(url: str) -> str:
    """Where the statistics are, given where the server is.

    Raises:
        ConfigError: it is no URL of HTTP.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"a URL like http://127.0.0.1:8000 is due, got {url!r}")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith("/stats") else f"{path}/stats").geturl()


def _api_key(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get(KEY_VARIABLE)
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


@attrs.frozen
class Server:
    """A server that tells of its engines.

    Attributes:
        url: of its statistics.
        api_key: sent along, if there is one.
    """

    url: str
    api_key: str | None = attrs.field(default=None, repr=False)

    def look(self) -> tuple[EngineSnapshot, ...]:
        """Its engines of this moment.

        Raises:
            ConfigError: it does not answer, or with something else.
        """
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            with urlopen(Request(self.url, headers=headers), timeout=PATIENCE_S) as answer:
                document: Any = json.loads(answer.read(LARGEST_ANSWER))
            return tuple(EngineSnapshot.from_document(entry) for entry in document["engines"])
        except URLError as error:  # HTTPError is one
            raise ConfigError(f"{self.url} cannot be read: {error.reason}") from error
        except (OSError, HTTPException) as error:
            raise ConfigError(f"{self.url} cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.url} does not tell of engines: {error}") from error


def _follow(
    server: Server, snapshots: tuple[EngineSnapshot, ...], console: Console, every: float
) -> None:
    """Redraw until Ctrl-C. A server that is gone for a while is shown as such."""
    rates = Rates()
    with Live(screen(snapshots, rates, console.width), console=console, screen=True) as live:
        while True:
            rates.note(time.monotonic(), snapshots)
            time.sleep(every)
            try:
                snapshots = server.look()
            except ConfigError as error:
                live.update(Group(screen(snapshots, rates, console.width), Text(str(error), "red")))
                continue
            live.update(screen(snapshots, rates, console.width, now=time.monotonic()))


class Rates:
    """Counters a second, between the last two looks."""

    def __init__(self) -> None:
        self._at = 0.0
        self._before: dict[str, EngineSnapshot] = {}

    def note(self, now: float, snapshots: Sequence[EngineSnapshot]) -> None:
        """Remember a look."""
        self._at = now
        self._before = {snapshot.name: snapshot for snapshot in snapshots}

    def of(self, snapshot: EngineSnapshot, counter: str, now: float | None) -> float | None:
        """How fast a counter of the statistics grows; None at the first look."""
        before = self._before.get(snapshot.name)
        if before is None or now is None or now <= self._at:
            return None
        counted = (getattr(each.statistics, counter) for each in (before, snapshot))
        earlier, later = map(float, counted)
        return max(
            0.0, (later - earlier) / (now - self._at)
        )  # a restarted server counts from 0 again


def screen(
    snapshots: Sequence[EngineSnapshot], rates: Rates, width: int, *, now: float | None = None
) -> RenderableType:
    """All engines, one below the other."""
    return Group(*(part for each in snapshots for part in _engine(each, rates, width, now)))


def _engine(
    snapshot: EngineSnapshot, rates: Rates, width: int, now: float | None
) -> Iterator[RenderableType]:
    geometry = snapshot.block_map.geometry
    title = Text(snapshot.name, style="bold")
    title.append(
        f"  {snapshot.allocator}, {geometry.num_blocks:,} blocks of {geometry.block_size} tokens",
        style="not bold dim",
    )
    yield title
    yield _numbers(snapshot, rates, now)
    yield Text()
    yield from block_rows(snapshot.block_map, width)
    yield Text(
        f"{FILLED} holds tokens   {RESERVED} reserved   {CACHED} cached   {FREE} free   "
        "one colour for each request, in turn",
        style="dim",
    )
    yield Text()


def _numbers(snapshot: EngineSnapshot, rates: Rates, now: float | None) -> Table:
    stats, table = snapshot.statistics, Table.grid(padding=(0, 2))
    pool = stats.pool
    table.add_row("utilisation", _bar(stats.utilisation), f"{stats.utilisation:.1%}")
    table.add_row(
        "blocks",
        _bar(pool.used_blocks / pool.num_blocks),
        f"{pool.used_blocks:,} used, {pool.cached_blocks:,} cached, {pool.free_blocks:,} free",
    )
    table.add_row(
        "waste", "", f"internal {stats.internal_waste:.1%}, external {stats.external_waste:.1%}"
    )
    table.add_row("requests", "", f"{stats.num_running:,} running, {stats.num_waiting:,} waiting")
    table.add_row(
        "ended",
        "",
        f"{stats.requests_finished:,} finished, {stats.requests_cancelled:,} cancelled, "
        f"{stats.requests_failed:,} failed",
    )
    speeds = (
        ("output tokens", "output_tokens"),
        ("prompt tokens", "prompt_tokens"),
        ("steps", "steps"),
        ("preemptions", "preemptions"),
    )
    shown = ", ".join(f"{name} {_speed(rates.of(snapshot, key, now))}" for name, key in speeds)
    table.add_row("a second", "", shown)
    return table


def _speed(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _bar(share: float) -> Text:
    filled = round(share * BAR)
    return Text("━" * filled, style="cyan").append("━" * (BAR - filled), style="dim")


def block_rows(block_map: BlockMap, width: int) -> Iterator[Text]:
    """The pool as characters, one for each block, or for each so many-th of a large pool."""
    num_blocks = block_map.geometry.num_blocks
    stride = -(-num_blocks // (width * MAP_ROWS))
    cells: dict[int, tuple[str, str]] = dict.fromkeys(block_map.cached, (CACHED, "dim"))
    for owner, sequence in reversed(list(enumerate(block_map.sequences))):
        style = OWNER_STYLES[owner % len(OWNER_STYLES)]
        filled = block_map.geometry.blocks_for(sequence.num_tokens)
        for place, held in enumerate(sequence.blocks):
            cells[held] = (FILLED if place < filled else RESERVED, style)
    shown = range(0, num_blocks, stride)
    for first in range(0, len(shown), width):
        row = Text()
        for block in shown[first : first + width]:
            row.append(*cells.get(block, (FREE, "dim")))
        yield row
    if stride > 1:
        yield Text(f"every {stride}th block is shown", style="dim")
