"""Answers of `/v1/completions`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvpage.integrations.openai.answers import (
    HERE,
    TokenTexts,
    UsageSum,
    dumps,
    ending,
    event,
    failure,
    finite,
    new_id,
    template,
)
from kvpage.sampling import Logprobs
from kvpage.stream import Completion, Token


class CompletionAnswer:
    """`/v1/completions`.

    Args:
        model: the name it was asked for by.
        choices_per_prompt: `n`.
        texts: names tokens, if log-probabilities were asked for.
        include_usage: end a stream with the usage.
        echoes: for each prompt, what comes before its outputs; none if not asked for.
    """

    def __init__(
        self,
        model: str,
        *,
        choices_per_prompt: int,
        texts: TokenTexts | None,
        include_usage: bool,
        echoes: Sequence["Echo"] = (),
    ) -> None:
        self.id = new_id("cmpl")
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._per_prompt = choices_per_prompt
        self._texts = texts
        self._include_usage = include_usage
        self._echoes = echoes
        self._usage = UsageSum()
        self._templates: dict[int, tuple[str, str]] = {}
        self._offsets: dict[int, int] = {}

    def begin(self) -> bytes:
        """The prompts, if they are to be echoed."""
        return b"".join(
            self._chunk(prompt * self._per_prompt + choice, echo.text)
            for prompt, echo in enumerate(self._echoes)
            for choice in range(self._per_prompt)
        )

    def event(self, prompt: int, token: Token) -> bytes:
        """See `Answer`."""
        index = prompt * self._per_prompt + token.choice
        if token.finish_reason is None and self._texts is None:
            return self._text_event(index, token.text) if token.text else b""
        if token.usage is not None:
            self._usage.add(token.usage, token.choice)
        return self._chunk(index, token.text, self._logprobs(index, token), token.finish_reason)

    def end(self) -> bytes:
        """See `Answer`."""
        return ending(self._head, self._usage if self._include_usage else None)

    def failure(self, error: Mapping[str, Any]) -> bytes:
        """See `Answer`."""
        return failure(error)

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        """See `Answer`."""
        choices = [
            self._whole_choice(prompt, index, completion)
            for prompt, completion in enumerate(completions)
            for index in range(self._per_prompt)
        ]
        usage = UsageSum().of(completions).as_completion_usage()
        return {**self._head, "choices": choices, "usage": usage}

    def _text_event(self, index: int, text: str) -> bytes:
        halves = self._templates.get(index)
        if halves is None:
            halves = self._templates[index] = template(self._payload(index, HERE))
        return f"{halves[0]}{dumps(text)}{halves[1]}".encode()

    def _chunk(
        self, index: int, text: str, logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        return event(self._payload(index, text, logprobs, finish_reason))

    def _payload(
        self, index: int, text: str, logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self._include_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _logprobs(self, index: int, token: Token) -> Any:
        if self._texts is None or token.logprob is None:
            return None
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(token.text)
        table = LogprobTable(self._texts, offset)
        table.add(token.id, Logprobs(token.logprob, token.top_logprobs), token.text)
        return table.as_json()

    def _whole_choice(self, prompt: int, index: int, completion: Completion) -> dict[str, Any]:
        choice = completion.choices[index]
        echo = self._echoes[prompt] if self._echoes else Echo()
        logprobs = None
        if self._texts is not None:
            table = LogprobTable(self._texts)
            table.add_all(echo.token_ids, completion.prompt_logprobs)
            table.add_all(choice.token_ids, choice.logprobs)
            logprobs = table.as_json()
        return {
            "index": prompt * self._per_prompt + index,
            "text": echo.text + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }


@attrs.frozen
class Echo:
    """A prompt that is to be part of its answers.

    Attributes:
        text: of the prompt.
        token_ids: of the prompt, if log-probabilities are wanted of it.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()


class LogprobTable:
    """Log-probabilities as `/v1/completions` tells them: columns, one row for each token."""

    def __init__(self, texts: TokenTexts, offset: int = 0) -> None:
        self._texts = texts
        self._offset = offset
        self._columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def add(self, token_id: int, logprobs: Logprobs | None, shown: str | None = None) -> None:
        """Add a token; `shown` is its part of the text, where that is known better."""
        text = self._texts[token_id]
        top = None
        if logprobs is not None:
            top = {self._texts[other]: finite(value) for other, value in logprobs.top}
        self._columns["tokens"].append(text)
        self._columns["token_logprobs"].append(finite(logprobs.own if logprobs else None))
        self._columns["top_logprobs"].append(top)
        self._columns["text_offset"].append(self._offset)
        self._offset += len(text if shown is None else shown)

    def add_all(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> None:
        """Add several tokens."""
        for token_id, of_token in zip(token_ids, logprobs, strict=True):
            self.add(token_id, of_token)

    def as_json(self) -> dict[str, Any]:
        """The columns."""
        return self._columns
