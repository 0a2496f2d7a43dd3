"""From a request of OpenAI's to a prompt and `SamplingParams`."""

import json
from collections.abc import Sequence
from typing import Any

import attrs

from kvpage.chat import Chat
from kvpage.grammar import StructuredOutputs
from kvpage.integrations.openai.errors import bad_request
from kvpage.integrations.openai.requests import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    InputMessage,
    InputText,
    JsonObjectFormat,
    JsonSchemaFormat,
    JsonSchemaTextFormat,
    Message,
    NamedTool,
    ResponseRequest,
    TextPart,
    Tool,
    ToolCall,
)
from kvpage.integrations.openai.tool_calls import Functions
from kvpage.sampling import SamplingParams

_SAME_NAMES = (
    *("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "stop"),
    *("min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("allowed_token_ids", "bad_words"),
)

ANY_OBJECT = StructuredOutputs(json_schema={"type": "object"})


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
        structured_outputs=_form(request),
    )


def chat_params(
    request: ChatRequest, defaults: SamplingParams, call: StructuredOutputs | None
) -> SamplingParams:
    """How to answer `POST /v1/chat/completions`.

    Args:
        request: what was asked.
        defaults: the model's own configuration.
        call: the form of a tool call, if the answer must be one.

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
        structured_outputs=_form(request, response_format=_chat_form(request), tool_choice=call),
    )


def response_params(request: ResponseRequest, defaults: SamplingParams) -> SamplingParams:
    """How to answer `POST /v1/responses`.

    Raises:
        RequestError: a value is out of range.
    """
    form = _form(request, text=_response_form(request))
    return _params(request, defaults, max_tokens=request.max_output_tokens, structured_outputs=form)


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


def _form(
    request: GenerationRequest, **others: StructuredOutputs | None
) -> StructuredOutputs | None:
    """The form of the output, by whichever parameter asks for one."""
    own = request.structured_outputs
    asked = {
        "structured_outputs": None if own is None else StructuredOutputs(**own.model_dump()),
        **others,
    }
    given = {name: form for name, form in asked.items() if form is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise bad_request(f"{names} each ask for a form of the output: give one", [*given][-1])
    return next(iter(given.values()), None)


def _chat_form(request: ChatRequest) -> StructuredOutputs | None:
    match request.response_format:
        case JsonSchemaFormat() as wanted:
            return StructuredOutputs(json_schema=wanted.json_schema.schema_)
        case JsonObjectFormat():
            return ANY_OBJECT
    return None


def _response_form(request: ResponseRequest) -> StructuredOutputs | None:
    match request.text.format if request.text else None:
        case JsonSchemaTextFormat() as wanted:
            return StructuredOutputs(json_schema=wanted.schema_)
        case JsonObjectFormat():
            return ANY_OBJECT
    return None


def demanded_functions(request: ChatRequest) -> Functions:
    """The functions of which one must be called; none if the model is free to call or not.

    Raises:
        ApiError: there is no such function, or one cannot be strict.
    """
    functions = {
        tool.function.name: tool.function.parameters or {"type": "object"}
        for tool in offered_tools(request)
    }
    wanted = request.tool_choice
    if wanted == "required" or isinstance(wanted, NamedTool):
        if isinstance(wanted, NamedTool):
            functions = {k: v for k, v in functions.items() if k == wanted.function.name}
        if not functions:
            raise bad_request(
                "tool_choice demands a function that tools does not have", "tool_choice"
            )
        return functions
    if any(tool.function.strict for tool in offered_tools(request)):
        raise bad_request(
            "strict functions need tool_choice to be 'required' or one of them: a call that the "
            "model is free to make cannot be promised to be valid",
            "tools",
        )
    return {}


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
