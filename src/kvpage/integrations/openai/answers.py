"""Answers in OpenAI's shapes, whole and as server-sent events.

An event of a token is text between two halves of JSON that were made once per request.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from kvpage.stream import Completion, Token, Usage

DONE = b"data: [DONE]\n\n"

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity."""

HERE = "\0"
"""Marks the place of a text in a template; no other text of ours has it."""


class Answer(Protocol):
    """One request's answer in the shape of its endpoint.

    Attributes:
        id: its name, which is also the engine's name for the request.
    """

    id: str

    def begin(self) -> bytes:
        """Events before the first token."""

    def event(self, prompt: int, token: Token) -> bytes:
        """Events of one token of the prompt of this index; often none."""

    def end(self) -> bytes:
        """Events after the last token."""

    def failure(self, error: Mapping[str, Any]) -> bytes:
        """Events that end a stream by an error, OpenAI's object of that name."""

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        """The answer to all prompts at once."""


class TokenTexts:
    """The text of single tokens, as log-probabilities name them.

    Args:
        tokenizer: transformers' tokenizer; without one, tokens are named by their ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}  # never more than the vocabulary

    def __getitem__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self.joined([token_id])
        return text

    def joined(self, ids: Sequence[int]) -> str:
        """The text of several tokens together, special ones included."""
        if self._tokenizer is None:
            return " ".join(f"token_id:{token_id}" for token_id in ids)
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


@attrs.define
class UsageSum:
    """Tokens of all outputs of one request; a prompt counts once, whatever `n` is."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, usage: Usage, choice: int) -> None:
        """Count one output."""
        self.output_tokens += usage.output_tokens
        if choice == 0:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens

    def of(self, completions: Sequence[Completion]) -> "UsageSum":
        """Count all outputs."""
        for completion in completions:
            for index, choice in enumerate(completion.choices):
                self.add(choice.usage, index)
        return self

    def as_completion_usage(self) -> dict[str, Any]:
        """As completions and chat completions tell it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def as_response_usage(self) -> dict[str, Any]:
        """As responses tell it."""
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.output_tokens,
        }


def new_id(prefix: str) -> str:
    """A name that nobody can guess."""
    return f"{prefix}-{secrets.token_hex(12)}"


def event(payload: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {dumps(payload)}\n\n".encode()


def template(payload: Mapping[str, Any], name: str | None = None) -> tuple[str, str]:
    """What stands before and behind the text of an event that has one at `HERE`."""
    before, after = event(payload, name).decode().split(dumps(HERE))
    return before, after


def ending(head: Mapping[str, Any], usage: UsageSum | None) -> bytes:
    """How completions and chat completions end a stream: by the usage, if it was asked for."""
    if usage is None:
        return DONE
    return event({**head, "choices": [], "usage": usage.as_completion_usage()}) + DONE


def failure(error: Mapping[str, Any]) -> bytes:
    """How completions and chat completions end a stream by an error."""
    return event({"error": error}) + DONE


def dumps(value: Any) -> str:
    """The shortest JSON, in ASCII."""
    return json.dumps(value, separators=(",", ":"))


def finite(logprob: float | None) -> float | None:
    """A number that JSON has."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
