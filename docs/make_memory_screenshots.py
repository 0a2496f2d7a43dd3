"""Pictures of the memory page for the documents: the default model at work under each strategy.

    python docs/make_memory_screenshots.py

Needs Playwright and a Chromium, found as by `make_screenshots.py`. Takes some minutes.
"""

import asyncio
import contextlib
import random
import socket
from typing import Any

import uvicorn
from make_screenshots import TARGET, chromium
from playwright.async_api import async_playwright

import kvpage
from kvpage.integrations.memory import memory_app
from kvpage.pretrained import load_pretrained

PICTURES = {
    "memory-light": ("fixed", {"width": 1280, "height": 800}, "light"),
    "memory-dark": ("contiguous", {"width": 1280, "height": 800}, "dark"),
}
"""Strategy, size of the window and theme."""

POOL_TOKENS = 8192
READERS = 14
LOOK_S = 65
"""So long that the last minute is full."""


async def main() -> None:
    """Take the pictures."""
    TARGET.mkdir(exist_ok=True)
    loaded = load_pretrained()
    for name, (allocator, viewport, theme) in PICTURES.items():
        settings: dict[str, Any] = {"kv_memory": f"{POOL_TOKENS} tokens", "max_model_len": 1536}
        engine = kvpage.AsyncEngine.from_loaded(loaded, allocator=allocator, **settings)
        async with engine, asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(read(engine, seed)) for seed in range(READERS)]
            await take(engine, name, viewport, theme)
            for reader in readers:
                reader.cancel()


async def read(engine: kvpage.AsyncEngine, seed: int) -> None:
    """Ask for a text after the other; all prompts of a kind begin alike."""
    rng = random.Random(seed)
    system = "You tell stories to children, in short sentences and with a good end. " * 6
    while True:
        prompt = (system if seed % 2 else "") + "word " * rng.randint(10, 300)
        params = kvpage.SamplingParams(max_tokens=rng.randint(100, 700), ignore_eos=True)
        with contextlib.suppress(kvpage.RequestError):
            await engine.complete(prompt, params)


async def take(engine: kvpage.AsyncEngine, name: str, viewport: Any, theme: Any) -> None:
    """Watch for a while, point at a block, and keep what is seen."""
    config = uvicorn.Config(memory_app(engine), lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(
                executable_path=chromium(), args=["--no-sandbox"]
            )
            page = await browser.new_page(viewport=viewport, color_scheme=theme)
            await page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/")
            await page.wait_for_selector("#main:not([hidden])")
            await asyncio.sleep(LOOK_S)
            await page.locator("#map").hover(position={"x": 100, "y": 60})
            await asyncio.sleep(1)
            await page.screenshot(path=TARGET / f"{name}.png", full_page=True)
            await browser.close()
        server.should_exit = True
        await serving


if __name__ == "__main__":
    asyncio.run(main())
