"""The span of a request: its place, its attributes, its events, its end."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvpage import (
    ConfigError,
    EngineClosed,
    EngineConfig,
    PoolGeometry,
    RequestTooLong,
    SamplingParams,
)
from tests.engine.runners import CharacterTokenizer, GatedRunner
from tests.engine.scenes import fake_engine, scene
from tests.engine.test_faults import Raising, outcomes

PROMPT = [1, 2, 3]
SECRET = "a secret of the prompt"


class Traces:
    """A provider, and the spans that it has ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def ended(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    @property
    def only(self) -> ReadableSpan:
        (span,) = self.ended
        return span


@pytest.fixture
def traces() -> Iterator[Traces]:
    found = Traces()
    yield found
    found.provider.shutdown()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


async def test_a_finished_request_is_one_span(traces: Traces) -> None:
    """With OpenTelemetry's names, and the events in their order."""
    params = SamplingParams(max_tokens=4, n=2, seed=7, temperature=0.5, top_p=0.9, top_k=11)
    async with fake_engine(tracer_provider=traces.provider) as engine:
        await engine.complete(PROMPT, params, request_id="mine")
        await engine.idle()
    span = traces.only
    assert (span.name, span.kind) == ("text_completion fake", SpanKind.INTERNAL)
    assert span.status.status_code is StatusCode.UNSET
    assert attributes(span) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvpage",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": "mine",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 11,
        "gen_ai.request.seed": 7,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "kvpage.preemptions": 0,
    }
    assert events(span) == ["queued", "scheduled", "first_token", "finished"]


async def test_the_caller_s_span_is_the_parent(traces: Traces) -> None:
    """The one that is current where the stream is first awaited."""
    tracer = traces.provider.get_tracer("host")
    async with fake_engine(tracer_provider=traces.provider) as engine:
        with tracer.start_as_current_span("handler") as handler:
            await engine.complete(PROMPT, SamplingParams(max_tokens=2))
        await engine.idle()
    (request,) = [span for span in traces.ended if span.name != "handler"]
    assert request.parent == handler.get_span_context()


async def test_without_a_provider_there_are_no_spans(traces: Traces) -> None:
    """Nothing is taken from the process."""
    with traces.provider.get_tracer("host").start_as_current_span("handler"):
        async with fake_engine() as engine:
            await engine.complete(PROMPT, SamplingParams(max_tokens=2))
    assert traces.only.name == "handler"


async def test_a_preempted_request_says_so(traces: Traces) -> None:
    """Once for each time."""
    tiny = PoolGeometry(num_blocks=4, block_size=4, max_model_len=128)
    settings: dict[str, Any] = {"geometry": tiny, "tracer_provider": traces.provider}
    async with scene(GatedRunner(tiny, free_steps=0), **settings) as at:
        await outcomes(at, 2, max_tokens=10)
        await at.engine.idle()
        preemptions = at.engine.stats().preemptions
    assert preemptions >= 1
    told = [events(span).count("preempted") for span in traces.ended]
    assert sum(told) == preemptions
    assert told == [attributes(span)["kvpage.preemptions"] for span in traces.ended]


async def test_a_request_that_is_left_ends_without_an_error(traces: Traces) -> None:
    """Leaving is no fault."""
    async with fake_engine(tracer_provider=traces.provider) as engine:
        async with engine.generate(PROMPT) as stream:
            await anext(stream)
        await engine.idle()
    assert events(traces.only)[-1] == "cancelled"
    assert traces.only.status.status_code is StatusCode.UNSET


async def test_a_refused_request_ends_with_its_error(traces: Traces) -> None:
    """It was never queued."""
    async with fake_engine(tracer_provider=traces.provider) as engine:
        with pytest.raises(RequestTooLong):
            await engine.complete(PROMPT, SamplingParams(max_tokens=1000))
    assert events(traces.only) == ["failed"]
    assert traces.only.status.status_code is StatusCode.ERROR
    assert attributes(traces.only)["error.type"] == "RequestTooLong"


async def test_a_failed_request_ends_with_its_error(traces: Traces) -> None:
    """The type of what the caller gets."""

    def raising(geometry: PoolGeometry) -> Raising:
        return Raising(geometry, method="admit")

    async with fake_engine(allocator=raising, tracer_provider=traces.provider) as engine:
        for _ in range(2):  # the second one fails
            stream = engine.generate(PROMPT, SamplingParams(max_tokens=2))
            try:
                async for _token in stream:
                    pass
            except Exception as error:
                failure = error
        await engine.idle()
    failed = traces.ended[-1]
    assert attributes(failed)["error.type"] == type(failure).__name__ == "AllocatorFault"
    assert failed.status.status_code is StatusCode.ERROR


async def test_closing_ends_every_span(traces: Traces) -> None:
    """None is left open."""
    async with scene(free_steps=1, tracer_provider=traces.provider) as at:
        streams = [at.engine.generate(PROMPT) for _ in range(3)]
        for stream in streams:
            await stream.__aenter__()
        at.let_go()
        await at.engine.aclose()
        with pytest.raises(EngineClosed):
            async for _ in streams[0]:
                pass
    assert [attributes(span)["error.type"] for span in traces.ended] == ["EngineClosed"] * 3


class Broken(SpanProcessor):
    """A span processor that cannot process."""

    def on_end(self, span: ReadableSpan) -> None:
        raise OSError("no more disk")


async def test_a_span_processor_that_raises_harms_nobody() -> None:
    """The request ends as it should; the log says what happened."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Broken())
    async with fake_engine(tracer_provider=provider) as engine:
        for _ in range(2):
            completion = await engine.complete(PROMPT, SamplingParams(max_tokens=2))
            assert len(completion.token_ids) == 2


async def test_no_text_is_recorded(traces: Traces) -> None:
    """Neither of the prompt nor of the output, nor what an error says of them."""
    params = SamplingParams(max_tokens=4, stop=(SECRET,), bad_words=())
    async with fake_engine(
        tokenizer=CharacterTokenizer(), tracer_provider=traces.provider
    ) as engine:
        text = (await engine.complete(SECRET, params)).text
        with pytest.raises(RequestTooLong):
            await engine.complete(SECRET * 20)
        await engine.idle()
    written = " ".join(span.to_json() for span in traces.ended)
    assert text
    assert SECRET not in written
    assert text not in written


def test_an_engine_says_what_a_provider_must_be() -> None:
    """When it is configured."""
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(tracer_provider="console")
    assert str(refusal.value) == (
        "tracer_provider must be an OpenTelemetry TracerProvider, got 'console'"
    )
