"""`kvpage watch`, and what it reads."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import attrs
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvpage import SamplingParams
from kvpage.blocks import BlockId, PoolGeometry, PoolStatistics
from kvpage.cli.watch import Rates, Server, block_rows, screen, stats_url, watch
from kvpage.errors import ConfigError
from kvpage.snapshot import EngineSnapshot
from kvpage.stats import BlockMap, EngineStatistics, SequenceBlocks
from tests.engine.scenes import scene

BLOCK_MAP = BlockMap(
    PoolGeometry(8, 4, 32),
    (SequenceBlocks("0", (BlockId(2), BlockId(3), BlockId(0)), 7),),
    (BlockId(5),),
)
SNAPSHOT = EngineSnapshot(
    "mine",
    "fixed",
    EngineStatistics(
        pool=PoolStatistics(8, 4, 4, 3, 1), num_running=1, num_waiting=2, live_tokens=7, steps=10
    ),
    BLOCK_MAP,
)


def text(renderable: Any) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


@contextmanager
def serving(body: bytes, *, status: int = 200) -> Iterator[tuple[str, list[str | None]]]:
    """A server on loopback with one answer; gives its URL and the keys that it was shown."""
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            self.send_response(status if self.path == "/stats" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", keys
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(*snapshots: EngineSnapshot) -> bytes:
    return json.dumps({"engines": [snapshot.document() for snapshot in snapshots]}).encode()


def test_a_snapshot_survives_the_way_through_json() -> None:
    """All of it."""
    read = EngineSnapshot.from_document(json.loads(json.dumps(SNAPSHOT.document())))
    assert attrs.asdict(read) == attrs.asdict(SNAPSHOT)


def test_a_snapshot_of_a_newer_server_is_read() -> None:
    """What it tells beyond is left out."""
    document = SNAPSHOT.document()
    document["statistics"]["novelty"] = 1
    assert EngineSnapshot.from_document(document | {"more": 2}).statistics == SNAPSHOT.statistics


async def test_a_snapshot_of_an_engine_tells_no_request_id() -> None:
    """Only who holds which blocks."""
    async with scene(free_steps=2) as held:
        params = SamplingParams(max_tokens=9)
        async with held.engine.generate([1, 2, 3, 4, 5], params, request_id="secret") as stream:
            await anext(stream)
            await held.runner.gate.held()
            held.runner.gate.allow(1)
            snapshot = await EngineSnapshot.of(held.engine)
            held.let_go()
    assert snapshot.name == "fake"
    assert [len(sequence.blocks) for sequence in snapshot.block_map.sequences] == [2]
    assert "secret" not in json.dumps(snapshot.document())
    assert [sequence.request_id for sequence in snapshot.block_map.sequences] == ["0"]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/stats"),
        ("http://host/llm/", "http://host/llm/stats"),
        ("https://host/stats", "https://host/stats"),
    ],
)
def test_the_statistics_are_found_below_the_server(given: str, asked: str) -> None:
    """Or named themselves."""
    assert stats_url(given) == asked


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:8000", "ftp://host", ""])
def test_other_urls_are_refused(url: str) -> None:
    """With an example of one."""
    with pytest.raises(ConfigError, match=r"a URL like http://127\.0\.0\.1:8000 is due"):
        stats_url(url)


def test_looks_once_where_it_is_told_to() -> None:
    """As in a script, whose output is no terminal."""
    app = typer.Typer()
    app.command()(watch)
    with serving(answer(SNAPSHOT)) as (url, _):
        result = CliRunner().invoke(app, [url, "--once"])
    assert result.exit_code == 0
    assert "mine  fixed, 8 blocks of 4 tokens" in result.stdout
    assert "1 running, 2 waiting" in result.stdout


def test_brings_its_key() -> None:
    """As a bearer token, and never in its repr."""
    with serving(answer(SNAPSHOT)) as (url, keys):
        server = Server(f"{url}/stats", "sesame")
        server.look()
    assert keys == ["Bearer sesame"]
    assert "sesame" not in repr(server)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"<html>", 200, "does not tell of engines"),
        (b"[]", 200, "does not tell of engines"),
        (b'{"engines": [{}]}', 200, "does not tell of engines: not a snapshot"),
        (b"no", 503, "cannot be read: Service Unavailable"),
    ],
)
def test_another_answer_is_one_sentence(body: bytes, status: int, sentence: str) -> None:
    """With the URL."""
    with (
        serving(body, status=status) as (url, _),
        pytest.raises(ConfigError, match=f"{url}/stats {sentence}"),
    ):
        Server(f"{url}/stats").look()


def test_nobody_there_is_one_sentence() -> None:
    """A port that was just given up."""
    with serving(b"") as (url, _):
        pass
    with pytest.raises(ConfigError, match=r"cannot be read: .*refused"):
        Server(f"{url}/stats").look()


def test_blocks_are_drawn_by_what_they_hold() -> None:
    """Two hold tokens, one is reserved, one is cached, the others are free."""
    (row,) = block_rows(BLOCK_MAP, 80)
    assert row.plain == "░·██·▒··"


def test_a_large_pool_is_drawn_in_part() -> None:
    """Every so many-th block, and that is said."""
    *rows, note = block_rows(attrs.evolve(BLOCK_MAP, geometry=PoolGeometry(4000, 4, 32)), 100)
    assert len(rows) == 10
    assert note.plain == "every 4th block is shown"


def test_rates_are_what_grew_between_two_looks() -> None:
    """Ten steps, then thirty, two seconds later."""
    rates = Rates()
    assert rates.of(SNAPSHOT, "steps", 5.0) is None
    rates.note(5.0, [SNAPSHOT])
    later = attrs.evolve(SNAPSHOT, statistics=attrs.evolve(SNAPSHOT.statistics, steps=30))
    assert rates.of(later, "steps", 7.0) == 10
    assert "steps 10.0" in text(screen([later], rates, 100, now=7.0))


def test_a_restarted_server_has_no_negative_rates() -> None:
    """It counts from zero again."""
    rates = Rates()
    rates.note(5.0, [SNAPSHOT])
    fresh = attrs.evolve(SNAPSHOT, statistics=attrs.evolve(SNAPSHOT.statistics, steps=0))
    assert rates.of(fresh, "steps", 6.0) == 0
