"""What the OpenAI-compatible endpoints accept. The models are the OpenAPI document, too.

A parameter of OpenAI's that has no meaning here is declared with the only values that change
nothing, so a request that relies on it is refused by name, never served as if it were not there.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from kvpage.sampling import MAX_CHOICES

MAX_PROMPTS = 128
"""Prompts of one request."""

MAX_STOPS = 16
"""Stop strings of one request: all are looked for after each token."""

MAX_LOGPROBS = 20
"""Alternatives reported for a token."""

INT64 = 2**63

Unsupported: TypeAlias = None
"""The type of a parameter of OpenAI's that cannot be honoured: only `null` passes."""


def _only(value: bool) -> AfterValidator:
    def check(given: bool) -> bool:
        if given is not value:
            raise ValueError(f"only {str(value).lower()} is served")
        return given

    return AfterValidator(check)


# Not `Literal[False]`, which takes 0 and 0.0 too: they are equal.
OnlyFalse = Annotated[bool, _only(False), WithJsonSchema({"type": "boolean", "const": False})]
OnlyTrue = Annotated[bool, _only(True), WithJsonSchema({"type": "boolean", "const": True})]

Count = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """No coercion, no unknown names, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Strict):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: OnlyFalse | None = None


class OutputForm(Strict):
    """The form that an output must have, as vLLM names it; exactly one of these."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """JSON that is valid by a schema, always strictly."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: Unsupported = None


class JsonSchemaFormat(Strict):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class JsonSchemaTextFormat(JsonSchema):
    """The same, as `/v1/responses` writes it."""

    type: Literal["json_schema"]


class GenerationRequest(Strict):
    """What every endpoint understands. What is left out is as the model's own configuration says.

    From `top_k` on these are extensions, under the names that other servers use for them.
    """

    model: str
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1e9)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[int, Bias] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    user: str | None = Field(
        None, description="Requests of different users share no cached prefix."
    )
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e9)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: list[Stop] | None = None
    structured_outputs: OutputForm | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None, description="Lower runs first."
    )
    cache_salt: str | None = Field(
        None, description="Requests of different salts share no cached prefix."
    )

    def salt(self) -> str:
        """What separates this request's cached prefixes from those of others."""
        parts = (self.cache_salt, self.user)
        return json.dumps(parts) if any(part is not None for part in parts) else ""


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_PROMPTS),
        ]
    )
    max_tokens: Positive | None = 16
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="Must equal n."
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: Unsupported = None

    def prompts(self) -> Sequence[str | list[int]]:
        """One or more prompts, each as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TextPart(Strict):
    """Text as a part of a message."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class SystemMessage(Strict):
    """What the model should be like."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Strict):
    """A function and its arguments, as JSON."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call that the model made earlier in the conversation."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Strict):
    """What the model said."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    # What clients send back because they got it; none of it says anything.
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="True only where tool_choice demands a call.")


class Tool(Strict):
    """A tool that the model may use; functions only."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    """One of the functions."""

    name: str


class NamedTool(Strict):
    """Call this one."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = Field(None, description="The older max_completion_tokens.")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Needs logprobs."
    )
    response_format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: OnlyTrue | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further names that the chat template may use."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    stream_options: StreamOptions | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse | None = None
    metadata: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    prediction: Unsupported = None
    moderation: Unsupported = None
    prompt_cache_key: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Unsupported = None
    reasoning_effort: Unsupported = None
    safety_identifier: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


class InputText(Strict):
    """Text as a part of an input or output item."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class InputMessage(Strict):
    """A message of the conversation so far."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: str | None = Field(None, description="Of an earlier output; nothing is looked up by it.")
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class TextOptions(Strict):
    """The form of the text."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaTextFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Unsupported = None


class ResponseRequest(GenerationRequest):
    """Body of `POST /v1/responses`: text in, text out, nothing stored."""

    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    text: TextOptions | None = None
    stream_options: StreamOptions | None = None
    background: OnlyFalse | None = None
    parallel_tool_calls: OnlyTrue | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse | None = None
    tool_choice: Literal["none", "auto"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    truncation: Literal["disabled"] | None = None
    conversation: Unsupported = None
    max_tool_calls: Unsupported = None
    previous_response_id: Unsupported = None
    prompt: Unsupported = None
    moderation: Unsupported = None
    prompt_cache_key: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Unsupported = None
    reasoning: Unsupported = None
    safety_identifier: Unsupported = None
