"""Chat messages as a prompt: everything that a template may want reaches it, once."""

from typing import Any

import pytest

from kvpage import Chat, RequestError, SamplingParams
from kvpage.request import EngineModel
from tests.engine.conftest import Run
from tests.engine.runners import VOCAB_SIZE, CharacterTokenizer
from tests.engine.scenes import fake_engine

MESSAGES = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "function", "function": {"name": "weather"}}


class ChattyTokenizer(CharacterTokenizer):
    """Notes what its template is asked for, and gives three tokens."""

    chat_template: str | None = "a template"

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []

    def apply_chat_template(self, conversation: Any, **options: Any) -> dict[str, list[int]]:
        self.asked.append({"conversation": conversation, **options})
        return {"input_ids": [1, 2, 3]}


class StrictTokenizer(ChattyTokenizer):
    """Its template raises, as some do for a conversation that does not alternate."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> dict[str, list[int]]:
        raise ValueError("Conversation roles must alternate user/assistant")


class PlainTokenizer(ChattyTokenizer):
    """Has no template of its own."""

    chat_template = None


def encoded(tokenizer: Any, prompt: Any) -> list[int]:
    model = EngineModel("fake", VOCAB_SIZE, tokenizer=tokenizer)
    ids: list[int] = model.encode(prompt).tolist()
    return ids


def asked(prompt: Any) -> dict[str, Any]:
    """What the template is asked for a prompt, but for what is the same each time."""
    tokenizer = ChattyTokenizer()
    assert encoded(tokenizer, prompt) == [1, 2, 3]
    (options,) = tokenizer.asked
    assert options.pop("return_dict") is True
    return options


BARE = {
    "conversation": MESSAGES,
    "tools": None,
    "chat_template": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
}


@pytest.mark.parametrize("prompt", [MESSAGES, Chat(messages=MESSAGES)], ids=["bare", "Chat"])
def test_messages_ask_for_the_model_s_turn(prompt: Any) -> None:
    """Bare messages and a `Chat` of them are the same."""
    assert asked(prompt) == BARE


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"tools": [WEATHER]}, {"tools": [WEATHER]}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        ({"template": "another"}, {"chat_template": "another"}),
        (
            {"template_kwargs": {"enable_thinking": False, "documents": []}},
            {"enable_thinking": False, "documents": []},
        ),
    ],
)
def test_every_field_reaches_the_template(fields: dict[str, Any], options: dict[str, Any]) -> None:
    """Under transformers' own names."""
    assert asked(Chat(messages=MESSAGES, **fields)) == {**BARE, **options}


def test_a_chat_is_a_prompt_of_an_engine(run: Run) -> None:
    """The template is applied once for a request, whatever `n` is."""

    async def main() -> None:
        tokenizer = ChattyTokenizer()
        async with fake_engine(tokenizer=tokenizer) as engine:
            chat = Chat(messages=MESSAGES)
            completion = await engine.complete(chat, SamplingParams(max_tokens=2, n=3))
        assert completion.usage.prompt_tokens == 3
        assert len(tokenizer.asked) == 1

    run(main)


BAD_CHATS: dict[str, tuple[Any, Any, str]] = {
    "the template raises": (
        StrictTokenizer(),
        MESSAGES,
        "the chat template of fake raised ValueError: Conversation roles must alternate "
        "user/assistant",
    ),
    "no template": (
        PlainTokenizer(),
        Chat(messages=MESSAGES),
        "the tokenizer of fake has no chat template; give text, or a Chat with a template",
    ),
    "no tokenizer": (
        None,
        Chat(messages=MESSAGES),
        "this engine has no tokenizer: give the prompt as token ids",
    ),
}


@pytest.mark.parametrize(("tokenizer", "prompt", "sentence"), BAD_CHATS.values(), ids=BAD_CHATS)
def test_a_chat_that_cannot_be_rendered_is_refused(
    tokenizer: Any, prompt: Any, sentence: str
) -> None:
    """In one sentence, with the template's own words."""
    with pytest.raises(RequestError) as refusal:
        encoded(tokenizer, prompt)
    assert str(refusal.value) == sentence


def test_a_model_without_a_template_takes_one() -> None:
    """The caller's own."""
    chat = Chat(messages=MESSAGES, template="mine")
    assert encoded(PlainTokenizer(), chat) == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt begins a new message and continue_final_message goes on with "
            "the last one: ask for one of them",
        ),
        (
            {"template_kwargs": {"tokenize": False}},
            "template_kwargs cannot have 'tokenize': no template sees it",
        ),
    ],
)
def test_a_chat_that_contradicts_itself_is_refused(fields: dict[str, Any], sentence: str) -> None:
    """When it is made."""
    with pytest.raises(RequestError) as refusal:
        Chat(messages=MESSAGES, **fields)
    assert str(refusal.value) == sentence
