"""An OpenTelemetry span for each request. Needs the extra `tracing`.

Names are those of OpenTelemetry's conventions for generative AI, written out here, since its Python
package of names marks them as unstable (https://github.com/open-telemetry/semantic-conventions-genai).
No prompt and no output is recorded.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.util.types import AttributeValue

from kvpage.events import Event, Facts
from kvpage.request import Prompt, is_chat
from kvpage.sampling import SamplingParams

_FACTS = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "preemptions": "kvpage.preemptions",
    "error": "error.type",
}


class RequestTracer:
    """Starts a span for each request.

    Args:
        provider: whose tracer is used.
        model: the model's name.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._tracer = provider.get_tracer("kvpage", version("kvpage"))
        self._model = model

    @contextmanager
    def submitting(
        self, request_id: str, prompt: Prompt, params: SamplingParams
    ) -> Iterator["RequestSpan"]:
        """A span whose parent is the current one; it goes on after this, unless by an exception."""
        operation = "chat" if is_chat(prompt) else "text_completion"
        span = RequestSpan(
            self._tracer.start_span(
                f"{operation} {self._model}",
                kind=SpanKind.INTERNAL,  # the model runs in this process
                attributes={
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": "kvpage",
                    "gen_ai.request.model": self._model,
                    "gen_ai.response.model": self._model,
                    "gen_ai.response.id": request_id,
                    **_asked(params),
                },
            )
        )
        try:
            yield span
        except Exception as error:
            span.tell("failed", {"error": type(error).__name__})
            raise
        except BaseException:  # the caller left
            span.tell("cancelled", {})
            raise


class RequestSpan:
    """The span of one request; see `kvpage.events.Trace`.

    `queued`, `scheduled`, `first_token` and `preempted` are events of it, the others end it.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        # An engine that breaks may end it while the task that submits gives up.
        self._lock = threading.Lock()
        self._ended = False

    def tell(self, event: Event, facts: Facts) -> None:
        """See `kvpage.events.Trace`."""
        with self._lock:
            if self._ended:
                return
            self._span.set_attributes(_attributes(facts))
            if event == "failed":
                # Not its sentence, which may quote what the request asked for.
                self._span.set_status(Status(StatusCode.ERROR, str(facts["error"])))
            self._span.add_event(event)
            if event in ("finished", "cancelled", "failed"):
                self._ended = True
                self._span.end()


def _asked(params: SamplingParams) -> dict[str, AttributeValue]:
    """What the request asks for, where it asks for anything."""
    # An attribute is a signed number.
    seed = params.seed if params.seed is not None and params.seed < 2**63 else None
    asked: dict[str, AttributeValue | None] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": seed,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _attributes(facts: Facts) -> dict[str, AttributeValue]:
    return {name: facts[fact] for fact, name in _FACTS.items() if fact in facts}
