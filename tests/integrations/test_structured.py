"""Output of a given form over HTTP: a tiny random model, and the tokenizer of the default model."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from kvpage import AsyncEngine
from kvpage.integrations.asgi import openai_app
from tests.engine.runners import PATIENCE_S
from tests.integrations.echo import serving
from tests.structured import test_llguidance as tiny

pytestmark = tiny.__dict__.get("pytestmark", [])

USER: Any = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{{ tools }}{% for message in messages %}{{ message['content'] }}{% endfor %}{# <tool_call> #}"
)
LLAMA_TEMPLATE = TEMPLATE.replace("<tool_call>", '<|start_header_id|> "parameters"')


class City(pydantic.BaseModel):
    """What is asked for."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["Rome", "Oslo"]
    large: bool


def weather(**more: Any) -> Any:
    function = {"name": "weather", "parameters": City.model_json_schema(), **more}
    return {"type": "function", "function": function}


NEWS: Any = {"type": "function", "function": {"name": "news"}}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    engine = tiny.engine()
    yield engine
    asyncio.run(engine.aclose())


@pytest.fixture(scope="module")
def url(engine: AsyncEngine) -> Iterator[str]:
    engine.model.tokenizer.chat_template = TEMPLATE
    with serving(openai_app({"tiny": engine})) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=6 * PATIENCE_S
    ) as client:
        yield client


def test_parsed_by_the_client(client: openai.OpenAI) -> None:
    """The client's own way from a pydantic model to an object of it, in both interfaces."""
    chat = client.chat.completions.parse(model="tiny", messages=USER, response_format=City, seed=1)
    assert isinstance(chat.choices[0].message.parsed, City)
    response = client.responses.parse(model="tiny", input="Hi", text_format=City)
    assert isinstance(response.output_parsed, City)


@pytest.mark.parametrize("template", [TEMPLATE, LLAMA_TEMPLATE], ids=["hermes", "llama"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_is_demanded(
    client: openai.OpenAI, engine: AsyncEngine, template: str, choice: Any
) -> None:
    """Comes, with valid arguments, from a model that knows nothing."""
    engine.model.tokenizer.chat_template = template
    tools = [weather(strict=True)] + ([weather(name="climate")] if choice == "required" else [NEWS])
    [called] = client.chat.completions.create(
        model="tiny", messages=USER, tools=tools, tool_choice=choice
    ).choices
    assert called.finish_reason == "tool_calls"
    [call] = called.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in ("weather", "climate")
    City.model_validate_json(call.function.arguments)


FORMS: dict[str, Any] = {
    "object": {"response_format": {"type": "json_object"}, "max_tokens": 60},
    "regex": {"structured_outputs": {"regex": "[0-9]{3}"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "json": {"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 9}}},
    "grammar": {"structured_outputs": {"grammar": 'start: "a" "b"?'}},
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms(url: str, form: str) -> None:
    """Those of OpenAI's, and under vLLM's names."""
    body = {"model": "tiny", "messages": USER, **FORMS[form]}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=6 * PATIENCE_S)
    [choice] = response.json()["choices"]
    text = choice["message"]["content"]
    match form:
        case "object":
            assert text.startswith("{")
        case "regex":
            assert (len(text), text.isdigit()) == (3, True)
        case "choice":
            assert text in ("yes", "no")
        case "json":
            assert 5 <= json.loads(text) <= 9
        case "grammar":
            assert text in ("a", "ab")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "grammar"),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "json_schema"),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, None),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [NEWS], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": [weather(strict=True)]}, "tools"),
    ],
)
def test_what_makes_no_sense(url: str, more: Any, param: str | None) -> None:
    """Is a 400 with the reason."""
    body = {"model": "tiny", "messages": USER, **more}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=6 * PATIENCE_S)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
