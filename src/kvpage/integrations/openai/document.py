"""The OpenAPI document, made from the request models."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from kvpage.integrations.openai.requests import ChatRequest, CompletionRequest, ResponseRequest

_JSON = "application/json"
_REFERENCE = "#/components/schemas/"

_ERRORS = {
    "400": "The request cannot be served as it is.",
    "401": "A key is needed.",
    "404": "There is no such model.",
    "408": "The body took too long.",
    "413": "The body is too long.",
    "415": "The body is no JSON.",
    "429": "Too many requests wait already: come back after `Retry-After` seconds.",
    "500": "The request failed.",
    "503": "The engine is closed or broken.",
    "504": "The answer took too long.",
}

_GENERATE = {
    "/v1/completions": (CompletionRequest, "Continue prompts", ("id", "choices", "usage")),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation", ("id", "choices", "usage")),
    "/v1/responses": (ResponseRequest, "Answer an input", ("id", "output", "usage")),
}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_document(models: Sequence[str]) -> dict[str, Any]:
    """The document of a server.

    Args:
        models: the names it serves.
    """
    _, schemas = models_json_schema(
        [
            (CompletionRequest, "validation"),
            (ChatRequest, "validation"),
            (ResponseRequest, "validation"),
        ],
        ref_template=_REFERENCE + "{model}",
    )
    definitions = schemas["$defs"]
    for request, _, _ in _GENERATE.values():
        definitions[request.__name__]["properties"]["model"] = {"enum": [*models]}
    definitions["Error"] = _ERROR
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvpage", "version": "1", "description": "OpenAI-compatible API."},
        "paths": {**_about_paths(models), **{path: _generate_path(path) for path in _GENERATE}},
        "components": {
            "schemas": definitions,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _generate_path(path: str) -> dict[str, Any]:
    request, summary, required = _GENERATE[path]
    body = {"schema": {"$ref": _REFERENCE + request.__name__}}
    answer = {"type": "object", "required": [*required]}
    ok = {
        "description": "The answer; server-sent events if `stream` is true.",
        "content": {
            _JSON: {"schema": answer},
            "text/event-stream": {},  # OpenAPI 3.1 has no words for a sequence of events
        },
    }
    return {
        "post": {
            "summary": summary,
            "security": [{}, {"key": []}],
            "requestBody": {"required": True, "content": {_JSON: body}},
            "responses": {"200": ok, **{status: _error(text) for status, text in _ERRORS.items()}},
        }
    }


def _about_paths(models: Sequence[str]) -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": {"enum": [*models]}}
    listed = {"type": "object", "required": ["object", "data"]}
    one = {"type": "object", "required": ["id", "object", "created", "owned_by"]}
    errors = {status: _error(_ERRORS[status]) for status in ("401", "404")}
    broken = {"description": "An engine is closed or broken."}
    return {
        "/v1/models": {"get": _get("The models", listed, errors)},
        "/v1/models/{name}": {"get": {**_get("One model", one, errors), "parameters": [name]}},
        "/health": {"get": _get("Is it well?", {"type": "object"}, {"503": broken})},
        "/stats": {"get": _get("Counters, blocks", {"type": "object"}, {"503": broken})},
    }


def _get(summary: str, schema: Mapping[str, Any], errors: Mapping[str, Any]) -> dict[str, Any]:
    ok = {"description": summary, "content": {_JSON: {"schema": schema}}}
    return {"summary": summary, "responses": {"200": ok, **errors}}


def _error(description: str) -> dict[str, Any]:
    content = {_JSON: {"schema": {"$ref": f"{_REFERENCE}Error"}}}
    return {"description": description, "content": content}
