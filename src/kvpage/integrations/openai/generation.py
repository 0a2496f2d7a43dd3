"""From a request to its answer: generate for every prompt, and send what comes."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

import anyio
import anyio.to_thread
import attrs
from starlette.responses import Response

from kvpage.engine import AsyncEngine
from kvpage.integrations.connection import EventStream
from kvpage.integrations.openai.answers import Answer, TokenTexts
from kvpage.integrations.openai.chat import ChatAnswer
from kvpage.integrations.openai.completions import CompletionAnswer, Echo
from kvpage.integrations.openai.errors import bad_request, json_response
from kvpage.integrations.openai.params import (
    chat_params,
    chat_prompt,
    completion_params,
    demanded_functions,
    offered_tools,
    response_messages,
    response_params,
)
from kvpage.integrations.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ResponseRequest,
    StreamOptions,
)
from kvpage.integrations.openai.responses import ResponseAnswer
from kvpage.integrations.openai.tool_calls import HermesReader, LlamaReader, reader_for
from kvpage.request import Prompt
from kvpage.sampling import SamplingParams
from kvpage.stream import Completion, TokenStream


@attrs.frozen(eq=False)
class Job:
    """A request, ready to be generated.

    Attributes:
        engine: what generates.
        request: what was asked.
        prompts: to be continued, all with the same parameters.
        params: how.
        answer: gives it its shape.
        adapter: of the engine, by name.
    """

    engine: AsyncEngine
    request: GenerationRequest
    prompts: Sequence[Prompt]
    params: SamplingParams
    answer: Answer
    adapter: str | None = None

    async def run(self, events: EventStream) -> Response | None:
        """Generate.

        Args:
            events: where a streamed answer goes.

        Returns:
            An answer that is not streamed.

        Raises:
            KvpageError: see `AsyncEngine.generate`. If nothing was sent yet, all was refused.
        """
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(self._generate(index))
                for index in range(len(self.prompts))
            ]
            if not self.request.stream:
                completions = [await _completion(stream) for stream in streams]
                return json_response(self.answer.whole(completions))
            await events.emit(self.answer.begin())
            await self._send(streams, events)
            await events.emit(self.answer.end())
            await events.end()
        return None

    def _generate(self, index: int) -> TokenStream:
        several = len(self.prompts) > 1
        return self.engine.generate(
            self.prompts[index],
            self.params,
            request_id=f"{self.answer.id}-{index}" if several else self.answer.id,
            priority=self.request.priority or 0,
            salt=self.request.salt(),
            adapter=self.adapter,
        )

    async def _send(self, streams: Sequence[TokenStream], events: EventStream) -> None:
        if len(streams) == 1:
            await self._send_one(0, streams[0], events)
            return
        try:
            async with anyio.create_task_group() as tasks:
                for index, stream in enumerate(streams):
                    tasks.start_soon(self._send_one, index, stream, events)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _send_one(self, index: int, stream: TokenStream, events: EventStream) -> None:
        answer = self.answer
        async for token in stream:
            if event := answer.event(index, token):
                await events.emit(event)


async def _completion(stream: TokenStream) -> Completion:
    return Completion.of([token async for token in stream])


async def completion_job(request: CompletionRequest, engine: AsyncEngine) -> Job:
    """`POST /v1/completions`.

    Raises:
        ApiError: the request contradicts itself.
        RequestError: a prompt or a parameter cannot be served.
    """
    params = completion_params(request, engine.model.default_params)
    prompts: Sequence[Prompt] = request.prompts()
    echoes: Sequence[Echo] = ()
    if request.echo:
        if request.stream and request.logprobs is not None:
            raise bad_request("echo with logprobs cannot be streamed", "echo")
        echoes = await anyio.to_thread.run_sync(_echoes, engine, prompts)
        prompts = [echo.token_ids for echo in echoes]
    answer = CompletionAnswer(
        request.model,
        choices_per_prompt=params.n,
        texts=_texts(engine, request.logprobs is not None),
        include_usage=_include_usage(request.stream_options),
        echoes=echoes,
    )
    return Job(engine, request, prompts, params, answer)


async def chat_job(request: ChatRequest, engine: AsyncEngine) -> Job:
    """`POST /v1/chat/completions`.

    Raises:
        ApiError: the request contradicts itself.
        RequestError: a parameter is out of range.
    """
    reader = _tool_reader(engine) if offered_tools(request) else None
    demanded = demanded_functions(request)
    call = reader.demand(demanded) if reader and demanded else None
    params = chat_params(request, engine.model.default_params, call)
    answer = ChatAnswer(
        request.model,
        num_choices=params.n,
        texts=_texts(engine, bool(request.logprobs)),
        include_usage=_include_usage(request.stream_options),
        new_reader=reader,
    )
    return Job(engine, request, [chat_prompt(request)], params, answer)


async def response_job(request: ResponseRequest, engine: AsyncEngine) -> Job:
    """`POST /v1/responses`.

    Raises:
        RequestError: a parameter is out of range.
    """
    params = response_params(request, engine.model.default_params)
    return Job(
        engine, request, [response_messages(request)], params, ResponseAnswer.to(request, params)
    )


def _echoes(engine: AsyncEngine, prompts: Sequence[Prompt]) -> list[Echo]:
    """The prompts as texts and as token ids. Tokenises; call it from a thread."""
    texts = TokenTexts(engine.model.tokenizer)
    encoded = [tuple(engine.model.encode(prompt).tolist()) for prompt in prompts]
    return [
        Echo(prompt if isinstance(prompt, str) else texts.joined(ids), ids)
        for prompt, ids in zip(prompts, encoded, strict=True)
    ]


def _tool_reader(engine: AsyncEngine) -> type[HermesReader | LlamaReader]:
    """Reads calls in the form that the model was taught.

    Raises:
        ApiError: it was taught none, or none that is known here.
    """
    template = getattr(engine.model.tokenizer, "chat_template", None) or ""
    if not isinstance(template, str):  # several by name
        template = template.get("tool_use", "")
    new_reader = reader_for(template)
    if new_reader is None:
        raise bad_request(
            f"the chat template of {engine.model.name} has no tools, or calls in a form that is "
            f"not known here (Hermes, Qwen and Llama 3 are)",
            "tools",
        )
    return new_reader


def _texts(engine: AsyncEngine, wanted: bool) -> TokenTexts | None:
    return TokenTexts(engine.model.tokenizer) if wanted else None


def _include_usage(options: StreamOptions | None) -> bool:
    return bool(options and options.include_usage)
