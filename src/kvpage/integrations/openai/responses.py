"""Answers of `/v1/responses`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvpage.integrations.openai.answers import (
    HERE,
    UsageSum,
    dumps,
    event,
    new_id,
    template,
)
from kvpage.integrations.openai.requests import ResponseRequest
from kvpage.sampling import SamplingParams
from kvpage.stream import Completion, Token


class ResponseAnswer:
    """`/v1/responses`.

    Args:
        model: the name it was asked for by.
        echoed: what the answer says of the request.
    """

    def __init__(self, model: str, echoed: Mapping[str, Any]) -> None:
        self.id = new_id("resp").replace("-", "_")
        self._item_id = new_id("msg").replace("-", "_")
        self._model = model
        self._echoed = echoed
        self._created = int(time.time())
        self._number = 0
        self._text: list[str] = []
        self._last: Token | None = None
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._place = place
        name = "response.output_text.delta"
        payload = {"type": name, **place, "delta": HERE, "logprobs": [], "sequence_number": 0}
        before, after = template(payload, name)
        self._before, self._after = before, after.removesuffix("0}\n\n")

    @classmethod
    def to(cls, request: ResponseRequest, params: SamplingParams) -> Self:
        """An empty answer to `request`, which it quotes as OpenAI's do."""
        echoed = {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "top_p": params.top_p,
            "user": request.user,
        }
        return cls(request.model, echoed)

    def begin(self) -> bytes:
        """The response, its one item and the item's one part, all empty."""
        response = self._response("in_progress", [])
        item = self._item("in_progress", [])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place, part=_part(""))
        )

    def event(self, prompt: int, token: Token) -> bytes:
        """See `Answer`."""
        self._last = token
        if not token.text:
            return b""
        self._text.append(token.text)
        number = self._next_number()
        return f"{self._before}{dumps(token.text)}{self._after}{number}}}\n\n".encode()

    def end(self) -> bytes:
        """See `Answer`."""
        last = self._last
        assert last is not None
        assert last.usage is not None
        text = "".join(self._text)
        status = _status(last.finish_reason)
        item = self._item(status, [_part(text)])
        usage = UsageSum()
        usage.add(last.usage, 0)
        response = self._response(status, [item], usage)
        return (
            self._event("response.output_text.done", **self._place, text=text, logprobs=[])
            + self._event("response.content_part.done", **self._place, part=_part(text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{status}", response=response)
        )

    def failure(self, error: Mapping[str, Any]) -> bytes:
        """See `Answer`."""
        told = {name: error[name] for name in ("code", "message", "param")}
        return self._event("error", **told)

    def whole(self, completions: Sequence[Completion]) -> Mapping[str, Any]:
        """See `Answer`."""
        [completion] = completions
        status = _status(completion.finish_reason)
        item = self._item(status, [_part(completion.text)])
        return self._response(status, [item], UsageSum().of(completions))

    def _response(
        self, status: str, output: Sequence[Mapping[str, Any]], usage: UsageSum | None = None
    ) -> dict[str, Any]:
        cut = status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": usage.as_response_usage() if usage else None,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            **self._echoed,
        }

    def _item(self, status: str, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _event(self, name: str, **fields: Any) -> bytes:
        return event({"type": name, **fields, "sequence_number": self._next_number()}, name)

    def _next_number(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"
