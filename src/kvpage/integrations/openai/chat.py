"""Answers of `/v1/chat/completions`."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from kvpage.integrations.openai.tool_calls import FunctionCall, Piece, ToolCallReader
from kvpage.sampling import Logprobs
from kvpage.stream import Completion, Token


class ChatAnswer:
    """`/v1/chat/completions`.

    Args:
        model: the name it was asked for by.
        num_choices: `n`.
        texts: names tokens, if log-probabilities were asked for.
        include_usage: end a stream with the usage.
        new_reader: reads tool calls, if tools were offered.
    """

    def __init__(
        self,
        model: str,
        *,
        num_choices: int,
        texts: TokenTexts | None,
        include_usage: bool,
        new_reader: Callable[[], ToolCallReader] | None,
    ) -> None:
        self.id = new_id("chatcmpl")
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self._texts = texts
        self._include_usage = include_usage
        self._new_reader = new_reader
        self._usage = UsageSum()
        self._choices = [
            _ChatChoice(template(self._payload(index, {"content": HERE})), new_reader)
            for index in range(num_choices)
        ]

    def begin(self) -> bytes:
        """Whose turn it is."""
        return b"".join(
            event(self._payload(index, {"role": "assistant", "content": ""}))
            for index in range(len(self._choices))
        )

    def event(self, prompt: int, token: Token) -> bytes:
        """See `Answer`."""
        choice = self._choices[token.choice]
        if choice.reader is None and token.finish_reason is None and self._texts is None:
            return choice.text_event(token.text) if token.text else b""
        events = self._content(choice, token) + self._end(choice, token)
        return b"".join(events)

    def end(self) -> bytes:
        """See `Answer`."""
        return ending(self._chunk_head, self._usage if self._include_usage else None)

    def failure(self, error: Mapping[str, Any]) -> bytes:
        """See `Answer`."""
        return failure(error)

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        """See `Answer`."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                self._whole_choice(index, completions[0]) for index in range(len(self._choices))
            ],
            "usage": UsageSum().of(completions).as_completion_usage(),
        }

    def _content(self, choice: "_ChatChoice", token: Token) -> list[bytes]:
        """What a token says, and how likely it was."""
        logprobs = None
        if self._texts is not None and token.logprob is not None:
            own = Logprobs(token.logprob, token.top_logprobs)
            logprobs = self._logprobs([token.id], [own])
        if choice.reader is None:
            if not token.text and logprobs is None:
                return []
            return [event(self._payload(token.choice, {"content": token.text}, logprobs))]
        events = [self._piece(token, piece) for piece in choice.pieces(token)]
        if logprobs is not None:  # text is held back, so it has no place of its own
            events.append(event(self._payload(token.choice, {}, logprobs)))
        return events

    def _end(self, choice: "_ChatChoice", token: Token) -> list[bytes]:
        if token.finish_reason is None or token.usage is None:
            return []
        self._usage.add(token.usage, token.choice)
        reason = choice.finish_reason(token.finish_reason)
        return [event(self._payload(token.choice, {}, finish_reason=reason))]

    def _piece(self, token: Token, piece: Piece) -> bytes:
        choice = self._choices[token.choice]
        if isinstance(piece, str):
            return choice.text_event(piece)
        call = {"index": choice.num_calls, **_tool_call(piece)}
        choice.num_calls += 1
        return event(self._payload(token.choice, {"tool_calls": [call]}))

    def _payload(
        self,
        index: int,
        delta: Mapping[str, Any],
        logprobs: Any = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self._include_usage else {}
        return {**self._chunk_head, "choices": [choice], **usage}

    def _whole_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        choice = completion.choices[index]
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        reason: str = choice.finish_reason
        if self._new_reader is not None:
            pieces = _read(self._new_reader(), choice.text)
            calls = [piece for piece in pieces if isinstance(piece, FunctionCall)]
            message["content"] = "".join(p for p in pieces if isinstance(p, str)) or None
            if calls:
                message["tool_calls"] = [_tool_call(call) for call in calls]
                reason = "tool_calls"
        logprobs = None
        if self._texts is not None:
            logprobs = self._logprobs(choice.token_ids, choice.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any]:
        assert self._texts is not None
        return {
            "content": [
                {
                    **self._entry(token_id, of_token.own),
                    "top_logprobs": [self._entry(*other) for other in of_token.top],
                }
                for token_id, of_token in zip(token_ids, logprobs, strict=True)
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        assert self._texts is not None
        text = self._texts[token_id]
        # A token that is a part of a character has no text, and its bytes are not known here.
        whole = "\N{REPLACEMENT CHARACTER}" not in text
        return {
            "token": text,
            "logprob": finite(logprob),
            "bytes": [*text.encode()] if whole else None,
        }


class _ChatChoice:
    """One output of a streamed chat completion."""

    def __init__(
        self, halves: tuple[str, str], new_reader: Callable[[], ToolCallReader] | None
    ) -> None:
        self.reader = new_reader() if new_reader else None
        self.num_calls = 0
        self._before, self._after = halves

    def text_event(self, text: str) -> bytes:
        return f"{self._before}{dumps(text)}{self._after}".encode()

    def pieces(self, token: Token) -> list[Piece]:
        assert self.reader is not None
        pieces = self.reader.push(token.text)
        return pieces + self.reader.finish() if token.finish_reason else pieces

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self.num_calls else reason


def _read(reader: ToolCallReader, text: str) -> list[Piece]:
    return reader.push(text) + reader.finish()


def _tool_call(call: FunctionCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_id("call"), "type": "function", "function": function}
