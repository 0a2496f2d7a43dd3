"""Tool calls in what a model writes, for the forms that chat templates teach.

* Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, among other text.
* Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, several of them with `;`
  between.

What looks like a call and is none is text, as the model wrote it.
"""

import json
from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from kvpage.grammar import StructuredOutputs


@attrs.frozen
class FunctionCall:
    """A function that the model wants called.

    Attributes:
        name: of the function.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


Piece = str | FunctionCall
"""Text to show, or a call."""


Functions = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each function."""


class ToolCallReader(Protocol):
    """Reads the text of one output as it comes."""

    @staticmethod
    def demand(functions: Functions) -> StructuredOutputs:
        """What an output must be to be one call of one of these."""

    def push(self, text: str) -> list[Piece]:
        """Add text; returns what is certain now."""

    def finish(self) -> list[Piece]:
        """What is left when no text will follow."""


def reader_for(template: str) -> "type[HermesReader | LlamaReader] | None":
    """Makes readers for the form that a chat template teaches; None if it teaches none of ours."""
    if "tools" not in template:
        return None
    if HermesReader.OPEN in template:
        return HermesReader
    if '"parameters"' in template and "<|start_header_id|>" in template:
        return LlamaReader
    return None


class HermesReader:
    """Calls between `<tool_call>` and `</tool_call>`."""

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"

    @staticmethod
    def demand(functions: Functions) -> StructuredOutputs:
        """See `ToolCallReader`."""
        call = json.dumps(_call_schema(functions, "arguments"))
        lark = f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {call}'
        return StructuredOutputs(grammar=lark)

    def __init__(self) -> None:
        self._held = ""
        self._after_call = False

    def push(self, text: str) -> list[Piece]:
        """See `ToolCallReader`; holds back what may be the beginning of a call."""
        self._hold(text)
        pieces: list[Piece] = []
        while (begin := self._held.find(self.OPEN)) >= 0:
            end = self._held.find(self.CLOSE, begin)
            if end < 0:
                break
            end += len(self.CLOSE)
            # Templates put line breaks around calls, which are no part of the message.
            pieces += _text(self._held[:begin].rstrip())
            pieces.append(self._call(self._held[begin:end]))
            held, self._held, self._after_call = self._held[end:], "", True
            self._hold(held)
        return pieces + _text(self._release(begin))

    def finish(self) -> list[Piece]:
        """See `ToolCallReader`; a call whose end is missing may yet be whole."""
        held, self._held = self._held, ""
        text, opening, rest = held.partition(self.OPEN)
        return [*_text(text.rstrip()), self._call(opening + rest)] if opening else _text(held)

    def _hold(self, text: str) -> None:
        self._held += text.lstrip() if self._after_call else text
        self._after_call = self._after_call and not self._held

    def _release(self, begin: int) -> str:
        """Take out the text that is certain: none of a call that has begun at `begin`."""
        shown = self._held[:begin] if begin >= 0 else self._without_opening()
        shown = shown.rstrip()
        self._held = self._held[len(shown) :]
        return shown

    def _without_opening(self) -> str:
        """The held text without a tail that `<tool_call>` may grow from."""
        for length in range(min(len(self.OPEN) - 1, len(self._held)), 0, -1):
            if self.OPEN.startswith(self._held[-length:]):
                return self._held[:-length]
        return self._held

    def _call(self, whole: str) -> Piece:
        body = whole.removeprefix(self.OPEN).removesuffix(self.CLOSE)
        return _call(_json(body), "arguments") or whole


class LlamaReader:
    """An answer that begins with `{` and is nothing but calls."""

    @staticmethod
    def demand(functions: Functions) -> StructuredOutputs:
        """See `ToolCallReader`."""
        return StructuredOutputs(json_schema=_call_schema(functions, "parameters"))

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[Piece]:
        """See `ToolCallReader`; an answer that begins like a call is held back until its end."""
        if self._is_text:
            return _text(text)
        self._held += text
        self._is_text = bool(self._held.strip()) and not self._held.lstrip().startswith("{")
        if not self._is_text:
            return []
        held, self._held = self._held, ""
        return [held]

    def finish(self) -> list[Piece]:
        """See `ToolCallReader`."""
        held, self._held = self._held, ""
        calls = [_call(value, "parameters") for value in _json_values(held)]
        if calls and None not in calls:
            return [call for call in calls if call is not None]
        return _text(held)


def _call_schema(functions: Functions, arguments_key: str) -> dict[str, Any]:
    """JSON Schema of a call of one of the functions."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments_key: schema},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for name, schema in functions.items()
    ]
    # No free white space: models are not trained to write any, and small ones would not end.
    return {"anyOf": calls, "x-guidance": {"whitespace_flexible": False}}


def _text(text: str) -> list[Piece]:
    return [text] if text else []


def _call(value: Any, arguments_key: str) -> FunctionCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(arguments_key, {})
    if not isinstance(arguments, dict):
        return None
    return FunctionCall(value["name"], json.dumps(arguments))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_values(text: str) -> list[Any]:
    """The values of `{...}; {...}`; a None in it if it is anything else."""
    decoder, position = json.JSONDecoder(), 0
    values: list[Any] = []
    text = text.strip()
    while position < len(text):
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return [*values, None]
        values.append(value)
        rest = text[end:].lstrip("; \n")
        position = len(text) - len(rest)
        if rest and position == end:
            return [*values, None]
    return values
