"""OpenAI's own client, on a real server."""

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from tests.integrations.conftest import Served


def said(text: str) -> Any:
    """A conversation in which the user has said `text`."""
    return [{"role": "system", "content": "Echo."}, {"role": "user", "content": text}]


def test_models(client: openai.OpenAI) -> None:
    """One, under the model's own name, with its length."""
    [model] = client.models.list().data
    assert (model.id, model.owned_by) == ("echo", "kvpage")
    assert client.models.retrieve("echo") == model
    assert model.model_extra == {"max_model_len": 512}


def test_a_chat_completion(client: openai.OpenAI) -> None:
    """Text, reason and usage; the shape is what OpenAI's own types demand."""
    answer = client.chat.completions.create(model="echo", messages=said("Hello"))
    ChatCompletion.model_validate_json(answer.model_dump_json(), strict=True)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Hello", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6  # with the end
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_a_streamed_chat_completion(client: openai.OpenAI) -> None:
    """A role, the text in pieces, a reason; usage in the last chunk as it was asked for."""
    chunks = list(
        client.chat.completions.create(
            model="echo",
            messages=said("Hello"),
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(chunk.model_dump_json(), strict=True)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    assert [piece for piece in pieces if piece] == [*"Hello"]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_a_stream_without_usage(client: openai.OpenAI) -> None:
    """Nobody asked for it."""
    chunks = client.chat.completions.create(model="echo", messages=said("Hi"), stream=True)
    assert [chunk.usage for chunk in chunks if chunk.usage or not chunk.choices] == []


async def test_the_async_client(served: Served) -> None:
    """The same."""
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="echo", messages=said("Hello"))
        assert answer.choices[0].message.content == "Hello"
        stream = await client.chat.completions.create(
            model="echo", messages=said("Hello"), stream=True
        )
        pieces = [chunk.choices[0].delta.content async for chunk in stream]
        assert "".join(piece or "" for piece in pieces) == "Hello"


def test_several_choices(client: openai.OpenAI) -> None:
    """`n` of them, whole and streamed; the prompt counts once."""
    whole = client.chat.completions.create(model="echo", messages=said("Hi"), n=3)
    assert [(c.index, c.message.content) for c in whole.choices] == [(i, "Hi") for i in range(3)]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 9
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(
        model="echo", messages=said("Hi"), n=3, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hi"] * 3


def test_max_completion_tokens(client: openai.OpenAI) -> None:
    """Cuts the answer, and says so; the older name does the same."""
    limits: list[dict[str, Any]] = [{"max_completion_tokens": 3}, {"max_tokens": 3}]
    for limit in limits:
        answer = client.chat.completions.create(model="echo", messages=said("Hello"), **limit)
        assert answer.choices[0].message.content == "Hel"
        assert answer.choices[0].finish_reason == "length"


def test_stop(client: openai.OpenAI) -> None:
    """One string or several; none of it is shown, whole or streamed."""
    for stop in ("lo", ["xyz", "lo"]):
        answer = client.chat.completions.create(model="echo", messages=said("Hello"), stop=stop)
        assert answer.choices[0].message.content == "Hel"
        assert answer.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(
        model="echo", messages=said("Hello"), stop="lo", stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hel"


def test_content_in_parts(client: openai.OpenAI) -> None:
    """The texts in a row."""
    parts: Any = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    answer = client.chat.completions.create(model="echo", messages=said(parts))
    assert answer.choices[0].message.content == "Hello"


def test_an_answer_is_a_message_of_the_next_request(client: openai.OpenAI) -> None:
    """With all the fields that the client's own object has."""
    answer = client.chat.completions.create(model="echo", messages=said("Hello"))
    messages = [*said("Hello"), answer.choices[0].message, {"role": "user", "content": "Bye"}]
    again = client.chat.completions.create(model="echo", messages=messages)
    assert again.choices[0].message.content == "Bye"


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = (
    'Look: <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
)
CALLED = [("weather", '{"city": "Rome"}'), ("weather", "{}")]


def test_tool_calls(client: openai.OpenAI) -> None:
    """Text beside them is content."""
    answer = client.chat.completions.create(model="echo", messages=said(CALLS), tools=[WEATHER])
    ChatCompletion.model_validate_json(answer.model_dump_json(), strict=True)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Look:", "tool_calls")
    calls = choice.message.tool_calls or []
    assert [
        (c.function.name, c.function.arguments) for c in calls if c.type == "function"
    ] == CALLED
    assert len({call.id for call in calls}) == 2


def test_streamed_tool_calls(client: openai.OpenAI) -> None:
    """The client's own accumulation comes to the same."""
    with client.chat.completions.stream(
        model="echo", messages=said(CALLS), tools=[WEATHER]
    ) as stream:
        stream.until_done()
        [choice] = stream.get_final_completion().choices
    assert (choice.message.content, choice.finish_reason) == ("Look:", "tool_calls")
    calls = choice.message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in calls] == CALLED


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    """Nobody offered any."""
    answer = client.chat.completions.create(model="echo", messages=said(CALLS))
    assert answer.choices[0].message.content == CALLS


def test_the_answer_of_a_tool(client: openai.OpenAI) -> None:
    """The call goes back to the template with its arguments as an object."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages: Any = [
        *said("Go"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    answer = client.chat.completions.create(model="echo", messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "42"
    call["function"] = {"name": "f", "arguments": "no JSON"}
    with pytest.raises(openai.BadRequestError, match="tool call '1'"):
        client.chat.completions.create(model="echo", messages=messages)


def test_template_arguments(client: openai.OpenAI) -> None:
    """Reach the template, except for those that are not the template's."""
    for arguments in (
        {"chat_template_kwargs": {"thinking": False}},
        {"add_generation_prompt": True},
    ):
        answer = client.chat.completions.create(
            model="echo", messages=said("Hi"), extra_body=arguments
        )
        assert answer.choices[0].message.content == "Hi"
    with pytest.raises(openai.BadRequestError, match="chat_template"):
        client.chat.completions.create(
            model="echo",
            messages=said("Hi"),
            extra_body={"chat_template_kwargs": {"chat_template": "{{ evil }}"}},
        )


def test_a_completion(client: openai.OpenAI) -> None:
    """OpenAI's default of 16 tokens; fewer if asked."""
    answer = client.completions.create(model="echo", prompt="xyz")
    assert answer.choices[0].text == "abcdefghijklmnop"
    assert answer.choices[0].finish_reason == "length"
    answer = client.completions.create(model="echo", prompt=[*b"xyz"], max_tokens=2)
    assert answer.choices[0].text == "ab"


@pytest.mark.parametrize("prompt", [["a", "h", "x"], [[97], [104], [120]]], ids=["texts", "ids"])
def test_several_prompts(client: openai.OpenAI, prompt: Any) -> None:
    """All choices of the first, then of the second; whole and streamed."""
    whole = client.completions.create(model="echo", prompt=prompt, max_tokens=2, n=2)
    expected = ["bc", "bc", "ij", "ij", "yz", "yz"]
    assert [(c.index, c.text) for c in whole.choices] == [*enumerate(expected)]
    texts = [""] * 6
    for chunk in client.completions.create(
        model="echo", prompt=prompt, max_tokens=2, n=2, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_echo(client: openai.OpenAI) -> None:
    """The prompt is part of the text, whole and streamed."""
    whole = client.completions.create(model="echo", prompt="abc", max_tokens=2, echo=True)
    assert whole.choices[0].text == "abcde"
    chunks = client.completions.create(
        model="echo", prompt="abc", max_tokens=2, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcde"


def test_a_response(client: openai.OpenAI) -> None:
    """Text in, text out, and nothing stored."""
    answer = client.responses.create(
        model="echo", input="Hello", instructions="Echo.", metadata={"a": "b"}
    )
    Response.model_validate_json(answer.model_dump_json())
    assert (answer.output_text, answer.status) == ("Hello", "completed")
    assert answer.metadata == {"a": "b"}
    assert answer.usage is not None
    assert answer.usage.output_tokens == 6


def test_a_response_to_a_conversation(client: openai.OpenAI) -> None:
    """An earlier output may be a part of it, as the client has it."""
    first = client.responses.create(model="echo", input="Hello")
    conversation: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "Bye"},
    ]
    assert client.responses.create(model="echo", input=conversation).output_text == "Bye"


def test_a_streamed_response(client: openai.OpenAI) -> None:
    """Events in order; the client's own accumulation ends with the whole response."""
    with client.responses.stream(model="echo", input="Hello") as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == "Hello"
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert deltas == [*"Hello"]
    assert [e.type for e in events if e.type != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_cut_response(client: openai.OpenAI) -> None:
    """Is incomplete, and says why."""
    answer = client.responses.create(model="echo", input="Hello", max_output_tokens=3)
    assert (answer.output_text, answer.status) == ("Hel", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
