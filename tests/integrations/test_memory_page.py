"""The memory page in a real browser: Chromium, where one is installed."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import attrs
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from kvpage import AsyncEngine, SamplingParams
from kvpage.blocks import PoolGeometry
from kvpage.integrations.memory import memory_app
from kvpage.integrations.memory.changes import changes, snapshot
from kvpage.request import EngineModel
from kvpage.stats import BlockImage
from tests.engine.runners import Gate, GatedRunner
from tests.integrations.echo import serving
from tests.integrations.test_memory_feed import grown, images

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

GEOMETRY = PoolGeometry(num_blocks=60, block_size=8, max_model_len=512)
PATIENCE_MS = 60_000
PROMPT = [83, 69, 67, 82, 69, 84]
"""Spells a secret."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests of this file."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@attrs.frozen
class Scene:
    """An engine whose steps a test lets pass, one by one, and its page.

    Attributes:
        engine: it.
        gate: its steps come to it; the page has news between two steps only.
        portal: runs its requests.
        url: of the page.
    """

    engine: AsyncEngine
    gate: Gate
    portal: BlockingPortal
    url: str

    def ask(self, prompt: list[int], *, priority: int = 0, **params: Any) -> None:
        """A request that goes on for as long as steps are allowed."""
        params = {"max_tokens": 400, "ignore_eos": True, **params}
        name = f"SECRET-{len(prompt)}-{prompt[0]}"
        complete = partial(self.engine.complete, request_id=name, priority=priority)
        self.portal.start_task_soon(complete, prompt, SamplingParams(**params))

    def step_until(self, page: Page, condition: str) -> None:
        """Let the engine step until something is so on the page."""
        for _ in range(400):
            if page.evaluate(condition):
                return
            self.gate.allow(1)
            page.wait_for_timeout(50)
        raise AssertionError(f"it never came to {condition}")


@contextmanager
def scene(geometry: PoolGeometry = GEOMETRY, **settings: Any) -> Iterator[Scene]:
    """A fake engine and the page over it."""
    keys = settings.pop("api_keys", ())
    runner = GatedRunner(geometry)
    model = EngineModel("fake", 251, (0,))
    engine = AsyncEngine.from_runner(runner, geometry, model, **settings)
    with start_blocking_portal() as portal, serving(memory_app(engine, api_keys=keys)) as url:
        try:
            yield Scene(engine, runner.gate, portal, f"{url}/")
        finally:
            runner.gate.open()
            portal.call(engine.aclose)


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages, and in the end finds nothing amiss with any of them."""
    contexts: list[BrowserContext] = []
    amiss: list[str] = []

    def open_page(url: str, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: amiss.append(str(error)))
        page.on("console", lambda message: amiss.append(message.text))
        page.on("request", lambda request: amiss.extend(_elsewhere(request.url, url)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert amiss == []


def _elsewhere(requested: str, url: str) -> list[str]:
    ours = requested.startswith((url, "data:")) and "?" not in requested
    return [] if ours else [f"a request to {requested}"]


RUNNING = "document.getElementById('running').textContent"


@pytest.fixture
def two_running(opened: Callable[..., Page]) -> Iterator[tuple[Scene, Page]]:
    """Two sequences, held between two steps, and the page that shows them."""
    with scene(prefix_cache=False) as played:
        page = opened(played.url)
        page.wait_for_selector("#main:not([hidden])")
        played.gate.allow(0)
        played.ask(PROMPT * 5)
        played.ask([*PROMPT, 1])
        played.step_until(page, f"{RUNNING} === '2'")
        yield played, page


def test_it_shows_what_runs(two_running: tuple[Scene, Page]) -> None:
    """Figures, sequences and a block table; no prompt and no request id."""
    _, page = two_running
    expect(page.get_by_role("heading", level=1)).to_have_text("Memory of fake")
    expect(page.locator("#about")).to_have_text("fixed: 60 blocks of 8 tokens")
    expect(page.get_by_role("option")).to_have_count(2)
    expect(page.get_by_role("option", selected=True)).to_contain_text("sequence 0")
    expect(page.get_by_role("status")).to_have_text("live")
    table = page.get_by_role("img", name=re.compile("Block table of sequence 0: logical 0 in"))
    expect(table).to_be_visible()
    page.get_by_text("Tables", exact=True).click()
    expect(page.locator("#rows tr")).to_have_count(2)
    assert "SECRET" not in page.content()


def test_sequences_are_listed_by_number(opened: Callable[..., Page]) -> None:
    """Also if a later one was let in first."""
    with scene(prefix_cache=False) as played:
        page = opened(played.url)
        page.wait_for_selector("#main:not([hidden])")
        played.gate.allow(0)
        for priority in (0, -1, -2):
            played.ask(PROMPT * (priority + 3), priority=priority)
        played.step_until(page, f"{RUNNING} === '3'")
        options = page.get_by_role("option")
        expect(options).to_contain_text(["sequence 0", "sequence 1", "sequence 2"])
        page.get_by_role("listbox", name="Sequences").focus()
        page.keyboard.press("Home")
        for number in ("1", "2"):
            page.keyboard.press("ArrowDown")
            expect(page.get_by_role("option", selected=True)).to_contain_text(f"sequence {number}")


def test_by_keyboard_alone(two_running: tuple[Scene, Page]) -> None:
    """From block to block, to the block table of one, and from sequence to sequence."""
    _, page = two_running
    skip = page.get_by_role("link", name="Skip to the map of blocks")
    page.keyboard.press("Tab")
    expect(skip).to_be_focused()
    page.keyboard.press("Enter")
    page.locator("#map").focus()
    page.keyboard.press("Home")
    expect(page.locator("#spoken")).to_contain_text("Block 0: ")
    page.keyboard.press("End")
    expect(page.locator("#spoken")).to_have_text("Block 59: free")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#spoken")).to_have_text("Block 58: free")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#spoken")).not_to_contain_text("Block 58")
    page.keyboard.press("Home")
    for _ in range(30):  # to a block of the second sequence
        if "of sequence 1" in page.locator("#spoken").inner_text():
            break
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.get_by_role("option", selected=True)).to_contain_text("sequence 1")
    page.keyboard.press("Tab")
    expect(page.get_by_role("listbox", name="Sequences")).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("option", selected=True)).to_contain_text("sequence 0")
    page.keyboard.press("End")
    expect(page.get_by_role("option", selected=True)).to_contain_text("sequence 1")


def test_by_pointer(two_running: tuple[Scene, Page]) -> None:
    """What is pointed at is told; a click shows its block table."""
    _, page = two_running
    block = page.evaluate("(() => { const m = document.getElementById('map'); return m.width; })()")
    assert block > 0
    page.locator("#map").hover(position={"x": 5, "y": 5})
    expect(page.locator("#readout")).to_contain_text("Block 0: ")
    page.get_by_role("option").nth(1).click()
    expect(page.get_by_role("option", selected=True)).to_contain_text("sequence 1")
    figure = page.get_by_role("img", name=re.compile("Block table of sequence 1"))
    expect(figure).to_be_visible()


def test_the_last_minute_again(two_running: tuple[Scene, Page]) -> None:
    """The slider goes back to where nothing ran, and the page returns to the present."""
    _, page = two_running
    replay = page.get_by_role("button", name="Replay the last minute")
    replay.click()
    expect(replay).to_have_attribute("aria-pressed", "true")
    page.get_by_role("slider", name="Moment shown").press("Home")
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#none")).to_be_visible()
    page.get_by_role("slider").press("End")
    expect(page.locator("#running")).to_have_text("2")
    page.get_by_role("slider").press("Home")
    page.get_by_role("button", name="Play", exact=True).click()
    expect(page.locator("#running")).to_have_text("2")
    replay.click()
    expect(page.get_by_role("status")).to_have_text("live")
    expect(page.locator("#running")).to_have_text("2")


def test_preemptions_are_told(opened: Callable[..., Page]) -> None:
    """As they happen, in a log."""
    with scene(PoolGeometry(6, 8, 48), prefix_cache=False) as played:
        page = opened(played.url)
        page.wait_for_selector("#main:not([hidden])")
        played.gate.allow(0)
        played.ask(PROMPT * 2, max_tokens=36)
        played.ask([1, *PROMPT, *PROMPT], max_tokens=35)
        played.step_until(page, "document.getElementById('preemptions').textContent === '1'")
        expect(page.get_by_role("log")).to_contain_text("sequence 1 lost its blocks")


def test_a_key_is_asked_for(opened: Callable[..., Page]) -> None:
    """A wrong one is told; a good one opens, and is in no URL."""
    with scene(api_keys=["SESAME"]) as played:
        page = opened(played.url)
        field = page.get_by_label("This server wants an API key")
        expect(field).to_be_focused()
        expect(page.locator("#main")).to_be_hidden()
        page.keyboard.type("SESAME")
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_visible()
        expect(page.locator("#key")).to_be_hidden()
        assert page.url == played.url
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0


def test_a_wrong_key(browser: Browser) -> None:
    """It is said to be wrong. The console notes the 401, so this page is not `opened`."""
    with scene(api_keys=["SESAME"]) as played:
        page = browser.new_page()
        page.goto(played.url)
        page.get_by_label("This server wants an API key").fill("WRONG")
        page.keyboard.press("Enter")
        expect(page.locator("#key-said")).to_contain_text("not one of this server's")
        expect(page.locator("#main")).to_be_hidden()
        page.close()


def test_the_end_of_an_engine(browser: Browser) -> None:
    """The page says so, and goes on asking."""
    with scene() as played:
        page = browser.new_page()
        page.goto(played.url)
        page.wait_for_selector("#main:not([hidden])")
        played.portal.call(played.engine.aclose)
        expect(page.get_by_role("status")).to_have_text("the engine is closed", timeout=PATIENCE_MS)
        page.close()


def test_coming_again_is_not_seen(
    opened: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream ends now and then; the page goes on, and so does its minute."""
    monkeypatch.setattr("kvpage.integrations.memory.page.STREAM_S", 0.1)
    with scene() as played:
        requests: list[str] = []
        page = opened(played.url)
        page.on("request", lambda request: requests.append(request.url))
        page.wait_for_selector("#main:not([hidden])")
        page.evaluate(
            "new MutationObserver(() => document.title = 'changed')"
            ".observe(document.getElementById('state'), { childList: true })"
        )
        while len(requests) < 3:
            page.wait_for_timeout(50)
        expect(page.get_by_role("status")).to_have_text("live")
        assert page.title() == "Memory of fake – kvpage"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(opened: Callable[..., Page], scheme: str) -> None:
    """Nothing is wider than the screen; the colours are those that the reader prefers."""
    with scene() as played:
        page = opened(
            played.url,
            viewport={"width": 360, "height": 740},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        page.wait_for_selector("#main:not([hidden])")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(253, 253, 252)", "dark": "rgb(20, 24, 27)"}[scheme]


@pytest.fixture(scope="module")
def scripts(browser: Browser) -> Iterator[Page]:
    """A page whose classes can be tried."""
    with scene() as played:
        page = browser.new_page()
        page.goto(played.url)
        page.wait_for_selector("#main:not([hidden])")
        yield page
        page.close()


FOLLOW = """([first, changes, last]) => {
  const seen = (memory) => JSON.stringify([
    [...memory.sequences.values()].map((s) => [s.name, s.first, s.blocks, s.tokens]).sort(),
    [...memory.holders], [...memory.cached], memory.preempted, memory.figures,
  ]);
  const after = (...documents) => {
    const memory = new Memory();
    memory.apply({ kind: "snapshot", data: documents[0] });
    for (const data of documents.slice(1)) memory.apply({ kind: "changes", data });
    return memory;
  };
  const memory = after(first);
  const kept = memory.clone();
  for (const data of changes) memory.apply({ kind: "changes", data });
  const owned = [...memory.owner].every((key, block) => {
    if (key === -1) return memory.holders[block] === 0;
    const owner = memory.ownerOf(block);
    return owner.blocks[memory.place[block] - owner.first] === block;
  });
  const followed = seen(memory) === seen(after(last));
  const colours = () => [...memory.sequences.values()].map((s) => s.name + s.colour).sort().join();
  const before = colours();
  memory.apply({ kind: "snapshot", data: last });
  return [owned, followed, seen(kept) === seen(after(first)), before === colours()];
}"""


@settings(max_examples=40, deadline=None)
@given(st.lists(images(), min_size=1, max_size=4))
def test_the_page_understands_all_changes(scripts: Page, moments: list[BlockImage]) -> None:
    """It comes to what a new viewer is told; owners hold their blocks; colours and clones stay."""
    about = {"time": 0, "num_blocks": 12, "block_size": 4}
    moments = [moment for each in moments for moment in (each, grown(each), grown(grown(each)))]
    first, last = ({**about, **snapshot(moments[place])} for place in (0, -1))
    told = [{"time": 0, **changes(*pair)} for pair in pairwise(moments)]
    assert scripts.evaluate(FOLLOW, [first, told, last]) == [True, True, True, True]


COUNT_DRAWING = """() => {
  window.drawn = 0;
  const fill = CanvasRenderingContext2D.prototype.fillRect;
  CanvasRenderingContext2D.prototype.fillRect = function (...a) { drawn++; fill.apply(this, a); };
}"""


def test_a_large_pool_is_drawn_by_its_changes(opened: Callable[..., Page]) -> None:
    """Of 100,000 blocks, those are drawn again that look different."""
    with scene(PoolGeometry(100_000, 8, 4096), prefix_cache=False) as played:
        page = opened(played.url)
        page.wait_for_selector("#main:not([hidden])")
        expect(page.locator("#free")).to_have_text("100,000")
        page.evaluate(COUNT_DRAWING)
        played.gate.allow(0)
        played.ask(PROMPT * 200)
        played.step_until(page, f"{RUNNING} === '1'")
        page.wait_for_function("drawn > 0")
        assert page.evaluate("drawn") < 5000
