"""Every failure in OpenAI's shape, with the right status, and nothing done."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpage.integrations.asgi import Limits, openai_app
from tests.integrations.echo import AsciiTokenizer, EchoRunner, echo_engine, serving

JSON = {"content-type": "application/json"}

CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "echo", "prompt": "Hi"}
RESPONSE: dict[str, Any] = {"model": "echo", "input": "Hi"}
VALID = {"chat/completions": CHAT, "completions": COMPLETION, "responses": RESPONSE}

USER: dict[str, Any] = {"role": "user"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, which must have OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("frequency_penalty", 3),
        ("presence_penalty", -2.1),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"4096": 1}),
        ("logit_bias", [5]),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop", 5),
        ("seed", 0.5),
        ("seed", 2**64),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
        ("min_tokens", 10**6),
        ("stop_token_ids", [4096]),
        ("stop_token_ids", [True]),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("priority", "high"),
        ("stream", "yes"),
        ("stream", 0),
        ("user", 5),
        ("model", 5),
        ("prompt_cache_keys", "unknown"),
        ("__class__", {}),
    ],
)
def test_a_value_that_cannot_be(http: httpx.Client, path: str, param: str, value: Any) -> None:
    """Is a 400 that names the parameter."""
    body = {**VALID[path], param: value}
    response = http.post(f"/v1/{path}", content=dumps(body), headers=JSON)
    error = error_of(response)
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert param in (error["param"] or error["message"])


def dumps(body: Any) -> str:
    """JSON with NaN and Infinity, which httpx refuses to send."""
    return json.dumps(body)


@pytest.mark.parametrize(
    ("path", "param", "value"),
    [
        ("completions", "suffix", "end"),
        ("completions", "best_of", 3),
        ("completions", "logprobs", 21),
        ("completions", "n", 129),
        ("completions", "max_tokens", 0),
        ("completions", "prompt", []),
        ("completions", "prompt", [[]]),
        ("completions", "prompt", [1.5]),
        ("completions", "prompt", [["a"]]),
        ("completions", "prompt", ["a"] * 129),
        ("completions", "prompt", None),
        ("chat/completions", "messages", []),
        ("chat/completions", "messages", [{"role": "user"}]),
        ("chat/completions", "messages", [{"role": "wizard", "content": "x"}]),
        ("chat/completions", "messages", [{**USER, "content": [{"type": "image_url"}]}]),
        ("chat/completions", "messages", [{**USER, "content": "x", "weight": 1}]),
        ("chat/completions", "top_logprobs", 2),
        ("chat/completions", "max_tokens", 0),
        ("chat/completions", "functions", []),
        ("chat/completions", "function_call", "auto"),
        ("chat/completions", "audio", {}),
        ("chat/completions", "modalities", ["audio"]),
        ("chat/completions", "prediction", {}),
        ("chat/completions", "reasoning_effort", "low"),
        ("chat/completions", "store", True),
        ("chat/completions", "store", 0),
        ("chat/completions", "metadata", {"a": "b"}),
        ("chat/completions", "service_tier", "flex"),
        ("chat/completions", "parallel_tool_calls", False),
        ("chat/completions", "web_search_options", {}),
        ("responses", "previous_response_id", "resp_1"),
        ("responses", "conversation", "conv_1"),
        ("responses", "reasoning", {"effort": "low"}),
        ("responses", "background", True),
        ("responses", "store", True),
        ("responses", "truncation", "auto"),
        ("responses", "tools", [{"type": "web_search"}]),
        ("responses", "include", ["message.output_text.logprobs"]),
        ("responses", "top_logprobs", 3),
        ("responses", "input", [{"type": "item_reference", "id": "x"}]),
    ],
)
def test_what_an_endpoint_cannot_do(http: httpx.Client, path: str, param: str, value: Any) -> None:
    """Is a 400 that names the parameter, never left out in silence."""
    body = {**VALID[path], param: value}
    response = http.post(f"/v1/{path}", json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize("path", VALID)
def test_null_is_the_default(http: httpx.Client, path: str) -> None:
    """As OpenAI's clients may send it, for every parameter that is not required."""
    document = http.get("/openapi.json").json()
    [content] = document["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"].values()
    schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    nothing = {name: None for name in schema["properties"] if name not in schema["required"]}
    response = http.post(f"/v1/{path}", json={**nothing, **VALID[path]})
    assert response.status_code == 200


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model":"\\ud800"}', b"[" * 100_000, b'"' * 999],
    ids=["empty", "open", "list", "null", "bytes", "surrogate", "deep", "quotes"],
)
def test_a_body_that_is_no_request(http: httpx.Client, path: str, body: bytes) -> None:
    """Is a 400."""
    response = http.post(f"/v1/{path}", content=body, headers=JSON)
    assert (response.status_code, error_of(response)["type"]) == (400, "invalid_request_error")


@given(
    path=st.sampled_from([*VALID]),
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["model", "prompt", "messages", "input", "role", "content", "n"]),
                inner,
                max_size=5,
            )
        ),
        max_leaves=8,
    ),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_nonsense_is_never_a_fault(http: httpx.Client, path: str, body: Any) -> None:
    """400 or 404, whatever the JSON."""
    response = http.post(f"/v1/{path}", content=dumps(body), headers=JSON)
    assert response.status_code in (400, 404)
    error_of(response)


def test_a_prompt_that_can_never_fit(client: openai.OpenAI) -> None:
    """Both numbers, and the code that OpenAI's users look for."""
    with pytest.raises(openai.BadRequestError, match=r"600 tokens.*512") as refused:
        client.completions.create(model="echo", prompt="a" * 600)
    assert refused.value.code == "context_length_exceeded"


async def test_tools_that_the_template_does_not_know() -> None:
    """Are refused, and not left out of the prompt in silence."""
    body = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}
    tokenizer = AsciiTokenizer("no place for them")
    async with (
        echo_engine(tokenizer=tokenizer) as engine,
        local_client(openai_app(engine)) as client,
    ):
        response = await client.post("/v1/chat/completions", json=body)
        assert (response.status_code, error_of(response)["param"]) == (400, "tools")
        response = await client.post("/v1/chat/completions", json={**body, "tool_choice": "none"})
        assert response.status_code == 200


async def test_a_model_without_a_chat_template() -> None:
    """Is told by name."""
    async with (
        echo_engine(tokenizer=AsciiTokenizer(None)) as engine,
        local_client(openai_app(engine)) as client,
    ):
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 400
        assert "echo has no chat template" in error_of(response)["message"]


def test_an_unknown_model(client: openai.OpenAI) -> None:
    """404, and the names that there are."""
    with pytest.raises(openai.NotFoundError, match=r"no model 'gpt'.*'echo'") as unknown:
        client.completions.create(model="gpt", prompt="a")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/models", 405),
        ("GET", "/", 404),
    ],
)
def test_no_such_place(http: httpx.Client, method: str, path: str, status: int) -> None:
    """Is told in the same shape."""
    response = http.request(method, path)
    error_of(response)
    assert response.status_code == status


def test_another_content_type(http: httpx.Client) -> None:
    """Is refused: a web page may send it without asking."""
    response = http.post("/v1/completions", data={"model": "echo", "prompt": "a"})
    error_of(response)
    assert response.status_code == 415


def local_client(app: Any) -> httpx.AsyncClient:
    """A client in this event loop."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_a_body_that_is_too_long() -> None:
    """413, and the engine never hears of it."""
    async with (
        echo_engine() as engine,
        local_client(openai_app(engine, limits=Limits(body_bytes=100))) as client,
    ):
        response = await client.post("/v1/completions", json={**COMPLETION, "prompt": "a" * 100})
        error_of(response)
        assert response.status_code == 413
        assert engine.stats().prompt_tokens == 0


async def test_an_answer_that_takes_too_long() -> None:
    """504, and the request is ended."""
    runner = EchoRunner(free_steps=0)
    async with (
        echo_engine(runner) as engine,
        local_client(openai_app(engine, limits=Limits(request_s=0.2))) as client,
    ):
        response = await client.post("/v1/completions", json=COMPLETION)
        assert (response.status_code, error_of(response)["code"]) == (504, "timeout")
        runner.gate.open()
        await check_left(engine)


async def check_left(engine: Any) -> None:
    """Nothing is open, and no block is held."""
    await engine.idle()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pool.used_blocks) == (0, 0, 0)


async def test_a_full_queue_is_429() -> None:
    """With the time after which to come back; those who wait are served."""
    runner = EchoRunner(free_steps=0)
    settings: Any = {"max_waiting": 1, "max_num_seqs": 1, "when_busy": "raise"}
    async with (
        echo_engine(runner, **settings) as engine,
        local_client(openai_app(engine)) as client,
        engine.generate("ab") as running,
    ):
        await runner.gate.held()
        async with engine.generate("ab") as waiting:
            busy = await client.post("/v1/completions", json=COMPLETION)
            assert (busy.status_code, error_of(busy)["code"]) == (429, "rate_limit_exceeded")
            assert busy.headers["retry-after"] == "1"
            runner.gate.open()
            assert [(await anext(stream)).text for stream in (running, waiting)] == ["c", "c"]


async def test_a_closed_engine_is_503() -> None:
    """For requests and for `/health`."""
    engine = echo_engine()
    async with local_client(openai_app(engine)) as client:
        idle = {"state": "running", "open_requests": 0, "since_progress_s": 0.0}
        assert (await client.get("/health")).json() == {"status": "ok", "models": {"echo": idle}}
        await engine.aclose()
        response = await client.post("/v1/completions", json=COMPLETION)
        assert (response.status_code, error_of(response)["code"]) == (503, "engine_closed")
        health = await client.get("/health")
        assert (health.status_code, health.json()["models"]["echo"]["state"]) == (503, "closed")


class _Failing(EchoRunner):
    """Fails from its second step on."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error
        self._steps = 0

    def execute(self, plan: Any) -> Any:
        self._steps += 1
        if self._steps > 1:
            raise self._error
        return super().execute(plan)


async def test_a_step_that_fails_is_500() -> None:
    """Of this request only; the engine goes on."""
    async with (
        echo_engine(_Failing(RuntimeError("boom"))) as engine,
        local_client(openai_app(engine)) as client,
    ):
        response = await client.post("/v1/completions", json=COMPLETION)
        assert (response.status_code, error_of(response)["code"]) == (500, "request_failed")
        assert (await client.get("/health")).status_code == 200


async def test_a_broken_engine_is_503() -> None:
    """At once, and from then on."""
    async with (
        echo_engine(_Failing(KeyboardInterrupt())) as engine,
        local_client(openai_app(engine)) as client,
    ):
        for _ in range(2):
            response = await client.post("/v1/completions", json=COMPLETION)
            assert (response.status_code, error_of(response)["code"]) == (503, "engine_broken")
        health = await client.get("/health")
        assert (health.status_code, health.json()["models"]["echo"]["state"]) == (503, "broken")


@pytest.mark.parametrize("path", VALID)
async def test_a_stream_that_fails_says_so(path: str) -> None:
    """OpenAI's client raises what it is told."""
    async with (
        echo_engine(_Failing(RuntimeError("boom"))) as engine,
        local_client(openai_app(engine)) as client,
    ):
        response = await client.post(f"/v1/{path}", json={**VALID[path], "stream": True})
        assert response.status_code == 200
        assert "a step failed: RuntimeError: boom" in response.text


def test_the_client_raises_what_a_stream_says() -> None:
    """And not what it would make of an end without a reason."""
    engine = echo_engine(_Failing(RuntimeError("boom")))
    with serving(openai_app(engine)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.APIError, match="a step failed: RuntimeError: boom"):
            list(client.completions.create(model="echo", prompt="Hi", stream=True))
    asyncio.run(engine.aclose())


async def test_a_refused_request_leaves_nothing() -> None:
    """One of several prompts is too long: none is generated."""
    async with echo_engine() as engine, local_client(openai_app(engine)) as client:
        body = {**COMPLETION, "prompt": ["ok", "a" * 600], "stream": True}
        response = await client.post("/v1/completions", json=body)
        assert (response.status_code, error_of(response)["code"]) == (
            400,
            "context_length_exceeded",
        )
        await check_left(engine)
