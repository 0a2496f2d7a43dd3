"""Every failure in OpenAI's shape: a status, and `{"error": {message, type, param, code}}`."""

import json
import math
from collections.abc import Mapping
from typing import Any

import attrs
from pydantic import ValidationError
from starlette.responses import Response

from kvpage.engine import AsyncEngine
from kvpage.errors import (
    EngineBroken,
    EngineBusy,
    EngineClosed,
    OutgrewPool,
    RequestError,
    RequestFailed,
    RequestTooLong,
)
from kvpage.grammar import StructuredOutputs
from kvpage.sampling import SamplingParams

MAX_RETRY_AFTER_S = 60
MAX_REASONS = 3
"""Of the ways in which a value could have been right, so many are told."""

_PARAMETERS = attrs.fields_dict(SamplingParams).keys() | attrs.fields_dict(StructuredOutputs).keys()


@attrs.frozen(kw_only=True)
class ApiError(Exception):
    """A request that is answered by an error.

    Attributes:
        status: of the HTTP response.
        message: one sentence for people.
        type: OpenAI's kind of error.
        param: the parameter it is about.
        code: for programs.
        headers: of the HTTP response.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}

    def response(self) -> Response:
        """The HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def json_response(
    content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """ASCII JSON, so that whatever a tokenizer decodes can be sent."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return Response(body, status, headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The caller has to change something."""
    return ApiError(status=400, message=message, param=param, code=code)


def invalid_body(error: ValidationError) -> ApiError:
    """What is wrong with a body; the first parameter that is wrong, if there are several."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    if not first["loc"]:
        return bad_request(first["msg"])
    param = str(first["loc"][0])
    same = [each for each in found if each["loc"][0] == first["loc"][0]]
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return bad_request(f"unknown parameter: {param!r}", param, "unknown_parameter")
    if first["type"] == "none_required" and len(same) == 1 and len(first["loc"]) == 1:
        return bad_request(f"{param} is not supported by this server", param, "unsupported_value")
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return bad_request(f"{param} is required", param, "missing_required_parameter")
    reasons = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in same[:MAX_REASONS]]
    return bad_request("; ".join(reasons), param, "invalid_value")


_KINDS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (RequestTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (RequestError, 400, "invalid_request_error", "invalid_value"),
    (OutgrewPool, 400, "invalid_request_error", "kv_cache_exceeded"),
    (EngineBusy, 429, "rate_limit_error", "rate_limit_exceeded"),
    (EngineClosed, 503, "server_error", "engine_closed"),
    (EngineBroken, 503, "server_error", "engine_broken"),
    (RequestFailed, 500, "server_error", "request_failed"),
)


def api_error(error: Exception, engine: AsyncEngine | None = None) -> ApiError:
    """What a caller is told of `error`; an error that is none of kvpage's tells nothing of itself.

    Args:
        error: raised while the request was served.
        engine: that served it; says when to come back.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        message = "the request took longer than this server allows"
        return ApiError(status=504, message=message, type="server_error", code="timeout")
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            return ApiError(
                status=status,
                message=str(error),
                type=name,
                param=_parameter(error),
                code=code,
                headers=_retry_after(engine) if kind is EngineBusy else {},
            )
    message = f"the server failed by {type(error).__name__}"
    return ApiError(status=500, message=message, type="server_error", code="internal_error")


def _parameter(error: Exception) -> str | None:
    """The parameter that a refusal begins with, if it does."""
    word = str(error).partition(" ")[0]
    return word if isinstance(error, RequestError) and word in _PARAMETERS else None


def _retry_after(engine: AsyncEngine | None) -> dict[str, str]:
    """Come back when the queue has moved on: after as long as requests have waited on average."""
    if engine is None:
        return {"Retry-After": "1"}
    waits = engine.latencies().queue.snapshot()
    seconds = math.ceil(waits.total / max(1, waits.num_observations))
    return {"Retry-After": str(min(max(seconds, 1), MAX_RETRY_AFTER_S))}
