"""What the memory page is told, and how seldom the engine is asked."""

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import anyio
import attrs
import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp

from kvpage import AsyncEngine, EngineClosed, SamplingParams
from kvpage.blocks import PoolGeometry, PoolStatistics, SequenceId
from kvpage.cli.serve import ServeOptions, guarded_app
from kvpage.integrations.memory import memory_app
from kvpage.integrations.memory.changes import changes, label, packed, snapshot
from kvpage.integrations.memory.feed import MAX_BEHIND, MemoryFeed
from kvpage.stats import BlockImage, EngineStatistics, SequenceImage
from tests.engine.scenes import BACKENDS
from tests.integrations.echo import echo_engine, serving
from tests.integrations.test_mounting import in_django, in_fastapi, in_litestar, in_starlette

NUM_BLOCKS = 12
FEW = st.integers(0, 3)


def sequences() -> st.SearchStrategy[tuple[SequenceImage, ...]]:
    """Up to four running sequences; what they hold is arbitrary, shared blocks included."""
    one = st.builds(
        lambda number, first, blocks, tokens: SequenceImage(
            "request", SequenceId(number), first, np.array(blocks, np.int32), tokens
        ),
        st.sampled_from([0, 1, 128, 256]),
        FEW,
        st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4, unique=True),
        st.integers(0, 16),
    )
    return st.lists(one, max_size=4, unique_by=lambda each: each.number).map(tuple)


def images() -> st.SearchStrategy[BlockImage]:
    """Any moment."""
    return st.builds(
        lambda held, flags, preempted, counts: BlockImage(
            geometry=PoolGeometry(NUM_BLOCKS, 4, 64),
            statistics=EngineStatistics(
                pool=PoolStatistics(NUM_BLOCKS, 4, *counts[:3]), steps=counts[3]
            ),
            sequences=held,
            preempted=tuple(map(SequenceId, preempted)),
            cached_flags=bytes(flags),
        ),
        sequences(),
        st.lists(st.integers(0, 1), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
        st.lists(st.sampled_from([0, 1, 128]), max_size=2, unique=True),
        st.tuples(FEW, FEW, FEW, FEW),
    )


def grown(image: BlockImage) -> BlockImage:
    """A little later: the first sequence has ended, the others have a block and two tokens more."""
    later = tuple(
        SequenceImage(
            each.request_id,
            each.number,
            each.first_block,
            np.append(each.blocks, np.int32(place)),
            each.num_tokens + 2,
        )
        for place, each in enumerate(image.sequences[1:])
    )
    return attrs.evolve(image, sequences=later)


class Reader:
    """Understands the stream as the page does, the plain way."""

    def __init__(self, first: dict[str, Any]) -> None:
        self.figures = dict(first["figures"])
        self.preempted = first["preempted"]
        self.cached = set(expanded(first["cached"]))
        self.tables: dict[str, tuple[int, list[int], int]] = {}
        self._add(first["sequences"])

    def read(self, change: dict[str, Any]) -> None:
        for name in change.get("ended", []):
            del self.tables[name]
        self._add(change.get("sequences", []))
        for name, blocks in change.get("grown", []):
            self.tables[name][1].extend(expanded(blocks))
        for name, tokens in change.get("tokens", []):
            self.tables[name] = (*self.tables[name][:2], tokens)
        self.cached -= set(expanded(change.get("uncached", "")))
        self.cached |= set(expanded(change.get("cached", "")))
        self.preempted = change.get("preempted", self.preempted)
        self.figures.update(change.get("figures", {}))

    def _add(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            place = (entry["first_block"], expanded(entry["blocks"]), entry["num_tokens"])
            self.tables[entry["name"]] = place


def expanded(packed: str) -> list[int]:
    pairs = np.frombuffer(base64.b64decode(packed), "<i4").reshape(-1, 2)
    return [block for first, many in pairs.tolist() for block in range(first, first + many)]


@given(images(), images())
def test_changes_lead_from_one_moment_to_the_next(before: BlockImage, after: BlockImage) -> None:
    """Who reads them knows what a new viewer is told; also where everything has only grown."""
    for later in (after, grown(before)):
        reader = Reader(sent(snapshot(before)))
        reader.read(sent(changes(before, later)))
        assert vars(reader) == vars(Reader(sent(snapshot(later))))
    assert changes(after, after) == {}


def sent(document: dict[str, Any]) -> Any:
    return json.loads(json.dumps(document))


def test_growth_is_told_alone() -> None:
    """A sequence of a thousand blocks that gets one more costs a few bytes."""
    image = BlockImage(
        geometry=PoolGeometry(2000, 4, 8000),
        statistics=EngineStatistics(pool=PoolStatistics(2000, 4, 0, 0, 0)),
        sequences=(
            SequenceImage("r", SequenceId(0), 0, np.array([1], np.int32), 3),
            SequenceImage("r", SequenceId(129), 0, np.arange(1000, dtype=np.int32), 4000),
        ),
        preempted=(),
        cached_flags=bytes(2000),
    )
    assert changes(image, grown(image)) == {
        "grown": [["1.1", packed(np.array([0]))]],
        "tokens": [["1.1", 4002]],
        "ended": ["0"],
    }


@pytest.mark.parametrize(("number", "name"), [(0, "0"), (128 * 7, "7"), (128 * 7 + 2, "7.2")])
def test_the_names_of_sequences(number: int, name: str) -> None:
    """The number of the request; with that of the choice where there are several."""
    assert label(SequenceId(number)) == name


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_viewers_are_one_to_the_engine(backend: str) -> None:
    """They get the same look; the one that asks first may leave without harm to others."""

    async def main() -> None:
        async with echo_engine() as engine:
            feed = MemoryFeed(engine)
            heard: list[tuple[int, bytes]] = []

            async def view() -> None:
                number, events = await feed.news(0)
                heard.append((number, events))
                heard.append(await feed.news(number))

            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(view)
                leaver = anyio.CancelScope()
                with leaver:
                    leaver.cancel()
                    await feed.news(0)
            assert sorted({number for number, _ in heard}) == [1, 2]
            assert len({events for number, events in heard if number == 1}) == 1
            assert [events for number, events in heard if number == 2] == [b""] * 5

    anyio.run(main, backend=backend)


async def test_who_is_far_behind_gets_a_snapshot() -> None:
    """Who is a little behind gets what was missed; memory for it is bounded."""
    async with echo_engine() as engine:
        feed = MemoryFeed(engine, interval_s=0)
        number, _ = await feed.news(0)
        for _ in range(MAX_BEHIND):
            await engine.complete([97] * 40, SamplingParams(max_tokens=2))
            number, _ = await feed.news(number)
        _, missed = await feed.news(number - MAX_BEHIND)
        assert missed.count(b"event: changes") == MAX_BEHIND
        await engine.complete([97] * 40, SamplingParams(max_tokens=2))
        number, _ = await feed.news(number)
        _, missed = await feed.news(number - MAX_BEHIND - 1)
        assert missed.startswith(b"event: snapshot")


async def test_a_closed_engine_has_no_news() -> None:
    """It is told as such."""
    engine = echo_engine()
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await MemoryFeed(engine).news(0)


# -- the app ---------------------------------------------------------------------------------------


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_the_page_may_load_nothing_else() -> None:
    """Its own policy forbids it, and its style and script are in it by their hashes."""
    async with echo_engine() as engine, client_of(memory_app(engine)) as client:
        page = await client.get("/")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert 'data-key="none"' in page.text


@pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/events/more", 404)])
async def test_other_paths(path: str, status: int) -> None:
    """There are none."""
    async with echo_engine() as engine, client_of(memory_app(engine)) as client:
        assert (await client.get(path)).status_code == status


@pytest.mark.parametrize("path", ["/", "/events"])
async def test_it_can_only_be_read(path: str) -> None:
    """405 for every method that asks for more."""
    async with echo_engine() as engine, client_of(memory_app(engine)) as client:
        assert (await client.post(path)).status_code == 405
        assert (await client.delete(path)).status_code == 405


async def test_keys() -> None:
    """The page is the same for all and says that a key is due; what it shows is behind the key."""
    async with echo_engine() as engine:
        app = memory_app(engine, api_keys=["SESAME"])
        async with client_of(app) as client:
            page = await client.get("/")
            assert page.status_code == 200
            assert 'data-key="needed"' in page.text
            assert "SESAME" not in page.text
            assert (await client.get("/events")).status_code == 401
            wrong = await client.get("/events", headers={"authorization": "Bearer WRONG"})
            assert wrong.status_code == 401
            in_url = await client.get("/events?key=SESAME")
            assert in_url.status_code == 401


async def test_a_closed_engine() -> None:
    """503, as elsewhere."""
    engine = echo_engine()
    await engine.aclose()
    async with client_of(memory_app(engine)) as client:
        assert (await client.get("/events")).status_code == 503


async def secret_request(engine: AsyncEngine) -> None:
    await engine.complete("TOPSECRET" * 9, SamplingParams(max_tokens=9), request_id="SECRET-ID")


@pytest.mark.parametrize("host", [in_starlette, in_fastapi, in_litestar, in_django])
def test_inside_of_a_host(host: Callable[[ASGIApp], Any]) -> None:
    """Page and events under the path of the mount; prompts and request ids are in neither."""
    engine = echo_engine()
    asyncio.run(secret_request(engine))
    with serving(host(memory_app(engine))) as url, httpx.Client(base_url=url, timeout=60) as client:
        page = client.get("/llm/")
        with client.stream("GET", "/llm/events") as events:
            lines = events.iter_lines()
            told = [next(lines), next(lines)]
    asyncio.run(engine.aclose())
    assert "<title>Memory" in page.text
    assert told[0] == "event: snapshot"
    document = json.loads(told[1].removeprefix("data: "))
    assert document["figures"]["requests_finished"] == 1
    assert document["figures"]["cached_blocks"] == len(expanded(document["cached"])) > 0
    assert "SECRET" not in told[1] + page.text


def test_viewers_see_the_end_and_leave_nothing() -> None:
    """A stream that has begun ends with an event of its own."""
    engine = echo_engine()
    with serving(memory_app(engine)) as url, httpx.stream("GET", f"{url}/events") as events:
        lines = events.iter_lines()
        next(lines)
        asyncio.run(engine.aclose())
        assert "event: end" in list(lines)


def test_a_server_that_stops_sends_viewers_away() -> None:
    """At once, when it says so."""
    engine, closing = echo_engine(), anyio.Event()
    app = memory_app(engine, closing=closing)
    with serving(app) as url, httpx.stream("GET", f"{url}/events") as events:
        lines = events.iter_lines()
        next(lines)
        closing.set()
        assert "event: end" in list(lines)
    asyncio.run(engine.aclose())


def test_viewers_come_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a server which says nothing can stop as well."""
    monkeypatch.setattr("kvpage.integrations.memory.page.STREAM_S", 0.1)
    engine = echo_engine()
    with serving(memory_app(engine)) as url, httpx.stream("GET", f"{url}/events") as events:
        lines = list(events.iter_lines())
    asyncio.run(engine.aclose())
    assert (lines[0], lines[3]) == ("event: snapshot", "event: again")


OPTIONS = ServeOptions(
    host="127.0.0.1",
    port=0,
    names=("echo",),
    api_keys=("SESAME",),
    cors_origins=(),
    allowed_hosts=("test",),
    max_body_bytes=1000,
    request_timeout_s=None,
    drain_timeout_s=1,
    access_log=True,
    memory_page=True,
)


async def test_serve_has_it_on_demand() -> None:
    """Beside the API and behind its guards: its host names, its keys."""
    async with echo_engine() as engine:
        async with client_of(guarded_app(engine, OPTIONS)) as client:
            assert (await client.get("/memory")).headers["location"] == "memory/"
            assert "<title>Memory" in (await client.get("/memory/")).text
            assert (await client.get("/memory/events")).status_code == 401
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
            named = await client.get("/memory/", headers={"host": "evil.example"})
            assert named.status_code == 403
        without = attrs.evolve(OPTIONS, memory_page=False)
        async with client_of(guarded_app(engine, without)) as client:
            assert (await client.get("/memory/")).status_code == 404
