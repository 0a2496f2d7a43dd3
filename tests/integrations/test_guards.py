"""Who is let in, and what is noted of it."""

import logging
from typing import Any

import httpx
import pytest

from kvpage.integrations.asgi import openai_app
from kvpage.integrations.guards import AccessLog, HostGuard
from tests.integrations.conftest import Served
from tests.integrations.echo import echo_engine

COMPLETION: dict[str, Any] = {"model": "echo", "prompt": "TOPSECRET", "max_tokens": 3}
OUTPUT = "opq"
"""What comes of it; no letters that a request id might have by chance."""


def client_of(app: Any, base_url: str = "http://test") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer good-1x",
        "Basic good-1",
        "good-1",
        "Bearer good-1 good-2",
        b"Bearer \xff",
    ],
)
@pytest.mark.parametrize("path", ["models", "completions", "nothing"])
async def test_without_a_good_key_there_is_nothing(served: Served, header: Any, path: str) -> None:
    """401 in OpenAI's shape, before anything else is looked at."""
    async with client_of(openai_app(served.engine, api_keys=["good-1", "good-2"])) as client:
        headers = {} if header is None else {"authorization": header}
        response = await client.post(f"/v1/{path}", json=COMPLETION, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("header", ["Bearer good-1", "bearer good-2"])
async def test_a_good_key_opens(served: Served, header: str) -> None:
    """Each of them."""
    async with client_of(openai_app(served.engine, api_keys=["good-1", "good-2"])) as client:
        response = await client.post(
            "/v1/completions", json=COMPLETION, headers={"authorization": header}
        )
    assert response.status_code == 200


async def test_two_keys_at_once_are_none(served: Served) -> None:
    """Which one a proxy before us has looked at is not known."""
    headers = [("authorization", "Bearer good"), ("authorization", "Bearer good")]
    async with client_of(openai_app(served.engine, api_keys=["good"])) as client:
        response = await client.get("/v1/models", headers=headers)
    assert response.status_code == 401


async def test_health_needs_no_key(served: Served) -> None:
    """What watches over the server has none."""
    async with client_of(openai_app(served.engine, api_keys=["good"])) as client:
        for path in ("/health", "/metrics", "/openapi.json"):
            assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("127.0.0.1", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
async def test_a_name_that_is_not_ours(served: Served, host: str, status: int) -> None:
    """A page that points its own domain at this machine gets nothing."""
    app = HostGuard(openai_app(served.engine), ["localhost", "127.0.0.1", "::1"])
    async with client_of(app) as client:
        response = await client.get("/v1/models", headers={"host": host})
    assert response.status_code == status


async def test_cors_is_off_unless_asked_for(served: Served) -> None:
    """A web page of another origin may not even ask."""
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with client_of(openai_app(served.engine)) as client:
        assert (await client.options("/v1/completions", headers=headers)).status_code == 405
        answer = await client.post("/v1/completions", json=COMPLETION, headers=headers)
        assert "access-control-allow-origin" not in answer.headers


async def test_cors_for_an_origin(served: Served) -> None:
    """That one, before its key is asked for, and no other."""
    app = openai_app(served.engine, api_keys=["good"], cors_origins=["https://page.example"])
    headers = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
    }
    async with client_of(app) as client:
        asked = await client.options("/v1/completions", headers=headers)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://page.example"
        other = {**headers, "origin": "https://other.example"}
        assert (await client.options("/v1/completions", headers=other)).status_code == 400


async def test_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    """One record a request, without prompt, completion, key or query; nothing else is logged."""
    caplog.set_level(logging.DEBUG)
    async with echo_engine() as engine:
        app = AccessLog(openai_app(engine, api_keys=["SESAME"]))
        async with client_of(app) as client:
            headers = {"authorization": "Bearer SESAME"}
            for stream in (False, True):
                body = {**COMPLETION, "stream": stream}
                answer = await client.post("/v1/completions?q=QUERY", json=body, headers=headers)
                assert (answer.status_code, OUTPUT in answer.text) == (200, not stream)
            await client.get("/a%0Ab")
    records = [record for record in caplog.records if record.name == "kvpage.access"]
    assert [record.getMessage().rsplit(" ", 2)[0] for record in records] == [
        "127.0.0.1 POST '/v1/completions' 200",
        "127.0.0.1 POST '/v1/completions' 200",
        r"127.0.0.1 GET '/a\nb' 404",
    ]
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("kvpage")]
    assert not [
        text for text in ours for word in ("SECRET", "SESAME", "QUERY", OUTPUT) if word in text
    ]


async def test_a_fault_is_logged_without_its_message(caplog: pytest.LogCaptureFixture) -> None:
    """Which may quote the prompt; where it happened is there."""
    async with echo_engine() as engine, client_of(openai_app({"echo": engine})) as client:
        engine.model = None  # type: ignore[assignment]  # a fault
        response = await client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    [record] = [record for record in caplog.records if record.name == "kvpage.http"]
    assert "AttributeError" in record.getMessage()
    assert "generation.py" in record.getMessage()
    assert "default_params" not in record.getMessage().splitlines()[0]
