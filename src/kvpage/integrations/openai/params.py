"""From a request of OpenAI's to a prompt and `SamplingParams`."""

import json
from collections.abc import Sequence
from typing import Any

import attrs

from kvpage.chat import Chat
from kvpage.integrations.openai.errors import bad_request
from kvpage.integrations.openai.requests import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    InputMessage,
    InputText,
    Message,
    ResponseRequest,
    TextPart,
    Tool,
    ToolCall,
)
from kvpage.sampling import SamplingParams

_SAME_NAMES = (
    *("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "stop"),
    *("min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("allowed_token_ids", "bad_words"),
)


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """How to answer `POST /v1/completions`.

    Raises:
        ApiError: parameters contradict each other.
        RequestError: a value is out of range.
    """
    if request.best_of not in (None, request.n or 1):
        raise bad_request(
            f"best_of is {request.best_of} and n is {request.n or 1}: they must be equal", "best_of"
        )
    return _params(
        request,
        defaults,
        n=request.n,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )


def chat_params(request: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """How to answer `POST /v1/chat/completions`.

    Raises:
        ApiError: parameters contradict each other.
        RequestError: a value is out of range.
    """
    limits = {request.max_completion_tokens, request.max_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            f"max_completion_tokens is {request.max_completion_tokens} and max_tokens is "
            f"{request.max_tokens}: give one of them",
            "max_tokens",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    return _params(
        request,
        defaults,
        n=request.n,
        max_tokens=limits.pop() if limits else None,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def response_params(request: ResponseRequest, defaults: SamplingParams) -> SamplingParams:
    """How to answer `POST /v1/responses`.

    Raises:
        RequestError: a value is out of range.
    """
    return _params(request, defaults, max_tokens=request.max_output_tokens)


def _params(request: GenerationRequest, defaults: SamplingParams, **chosen: Any) -> SamplingParams:
    """The model's own configuration, changed by whatever the request says."""
    chosen |= {name: getattr(request, name) for name in _SAME_NAMES}
    if request.top_k is not None:
        chosen["top_k"] = max(request.top_k, 0)  # -1 is another way to say all
    if request.seed is not None:
        chosen["seed"] = request.seed % 2**64
    return attrs.evolve(
        defaults, **{name: value for name, value in chosen.items() if value is not None}
    )


def chat_prompt(request: ChatRequest) -> Chat:
    """The conversation as chat templates want it.

    Raises:
        ApiError: the arguments of a call in it are no JSON object.
        RequestError: the template's arguments contradict each other.
    """
    end = {
        name: getattr(request, name)
        for name in ("add_generation_prompt", "continue_final_message")
        if getattr(request, name) is not None
    }
    tools: list[Any] = [tool.model_dump(exclude_none=True) for tool in offered_tools(request)]
    return Chat(
        messages=[_template_message(message) for message in request.messages],
        tools=tools,
        template_kwargs=request.chat_template_kwargs or {},
        **end,
    )


def offered_tools(request: ChatRequest) -> Sequence[Tool]:
    """The tools that the model may use in its answer."""
    return () if request.tool_choice == "none" else request.tools or ()


def response_messages(request: ResponseRequest) -> list[dict[str, Any]]:
    """The conversation as chat templates want it, instructions first."""
    messages = [] if request.instructions is None else [_system(request.instructions)]
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    return messages + [_input_message(message) for message in request.input]


def _system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def _input_message(message: InputMessage) -> dict[str, Any]:
    return {"role": _role(message.role), "content": _joined(message.content)}


def _template_message(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {
        "role": _role(message.role),
        "content": "" if message.content is None else _joined(message.content),
    }
    for name in ("name", "tool_call_id"):
        if getattr(message, name, None) is not None:
            said[name] = getattr(message, name)
    if isinstance(message, AssistantMessage) and message.tool_calls:
        said["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return said


def _role(role: str) -> str:
    """Templates know the older name of a developer's message only."""
    return "system" if role == "developer" else role


def _joined(content: str | Sequence[TextPart] | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves, so they need the object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(f"the arguments of tool call {call.id!r} are no JSON object", "messages")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
