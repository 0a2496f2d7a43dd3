"""A conversation as a prompt: messages, and what the model's chat template makes of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kvpage.errors import RequestError

Message = Mapping[str, Any]
"""A chat message, `{"role": "user", "content": "..."}`, as the model's template wants it."""

Tool = Mapping[str, Any] | Callable[..., Any]
"""A function that the model may call: its JSON schema, or a documented Python function."""

_NOT_FOR_THE_TEMPLATE = frozenset(
    {
        *("conversation", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Arguments of transformers' `apply_chat_template` that are fields here, or kvpage's own affair."""


def _check_template_kwargs(
    _chat: "Chat", _attribute: "attrs.Attribute[Any]", value: Mapping[str, Any]
) -> None:
    reserved = sorted(_NOT_FOR_THE_TEMPLATE & value.keys())
    if reserved:
        raise RequestError(f"template_kwargs cannot have {reserved[0]!r}: no template sees it")


def _check_end(chat: "Chat", _attribute: "attrs.Attribute[Any]", value: bool) -> None:
    if value and chat.continue_final_message:
        raise RequestError(
            "add_generation_prompt begins a new message and continue_final_message goes on with "
            "the last one: ask for one of them"
        )


@attrs.frozen(kw_only=True, eq=False)
class Chat:
    """Chat messages, and how the model's chat template is to render them.

    A bare sequence of messages is `Chat(messages=...)`. The template is applied once, off the event
    loop, when the request is submitted.

    Attributes:
        messages: as the template wants them, usually `{"role": ..., "content": ...}`.
        tools: functions that the model may call, as JSON schemas or documented Python functions.
        continue_final_message: the model goes on with the last message rather than begin its own.
        add_generation_prompt: end with what begins the model's own message; by default so unless
            `continue_final_message`.
        template: a Jinja template, or the name of one of the tokenizer's; None takes its default.
        template_kwargs: further names that the template may use, such as `documents` or
            `enable_thinking`.

    Raises:
        RequestError: the fields contradict each other, or `template_kwargs` names something that is
            not the template's.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = attrs.field(default=(), converter=tuple)
    continue_final_message: bool = False
    add_generation_prompt: bool = attrs.field(
        default=attrs.Factory(lambda chat: not chat.continue_final_message, takes_self=True),
        validator=_check_end,
    )
    template: str | None = None
    template_kwargs: Mapping[str, Any] = attrs.field(
        factory=dict, converter=dict, validator=_check_template_kwargs
    )

    def apply(self, tokenizer: Any) -> Any:
        """Token ids by the template, in one go. May take long; call it from a thread.

        Args:
            tokenizer: transformers' tokenizer. It is not changed.

        Raises:
            Exception: whatever the template or the tokenizer raises.
        """
        return tokenizer.apply_chat_template(
            self.messages,
            tools=list(self.tools) or None,
            chat_template=self.template,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            return_dict=True,
            **self.template_kwargs,
        )["input_ids"]
