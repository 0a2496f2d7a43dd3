"""A request: from what a caller asks to its choices. Whatever can be refused is refused here."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.blocks import PoolGeometry, SequenceId
from kvpage.chat import Chat, Message
from kvpage.detokenizer import Detokenizer
from kvpage.errors import RequestError, RequestFailed, RequestTooLong
from kvpage.events import Event, Facts, Trace, tell
from kvpage.grammar import Grammars
from kvpage.guided import LLGuidance
from kvpage.logits import TokenRules
from kvpage.prefix import PrefixKeys
from kvpage.sampling import SamplingParams
from kvpage.sequence import NO_ADAPTER, FinishReason
from kvpage.sequence import Sequence as EngineSequence
from kvpage.stop_strings import StopStrings
from kvpage.stream import Mailbox

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of a request's choices; the first has the seed that was asked for."""

Prompt = str | Sequence[int] | Sequence[Message] | Chat
"""Text, token ids, or chat messages, these alone or in a `Chat` with more to say."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@attrs.frozen(eq=False)
class EngineModel:
    """What an engine needs to know of the model behind a runner.

    Attributes:
        name: for people.
        vocab_size: token ids are below this.
        eos_token_ids: end a text unless `ignore_eos`.
        tokenizer: transformers' tokenizer; None means prompts are token ids only.
        default_params: for requests that bring none.
        window: every layer attends to so many tokens at most, the token itself included; what is
            behind may be given back. 0: some layer attends to all.
        adapters: names of its adapters, in the order of their numbers.
        grammars: compiles the grammars of requests; by llguidance, unless others are given.
    """

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Any = None
    default_params: SamplingParams = attrs.field(factory=SamplingParams)
    window: int = 0
    adapters: tuple[str, ...] = ()
    grammars: Grammars = attrs.field(
        default=attrs.Factory(
            lambda self: LLGuidance(self.tokenizer, self.vocab_size, self.eos_token_ids),
            takes_self=True,
        )
    )

    def encode(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """Token ids of a prompt. May take long; call it from a thread.

        Raises:
            RequestError: the prompt is empty, or cannot be encoded.
        """
        ids = self._ids(prompt)
        if len(ids) == 0:
            raise RequestError("the prompt is empty: it has no tokens")
        try:
            array = np.asarray(ids, np.int64)
        except OverflowError:
            raise RequestError(
                f"token ids must be between 0 and {self.vocab_size - 1}, got {max(ids, key=abs)}"
            ) from None
        strangers = array[(array < 0) | (array >= self.vocab_size)]
        if len(strangers):
            raise RequestError(
                f"token ids must be between 0 and {self.vocab_size - 1}, got {strangers[0]}"
            )
        return array.astype(np.int32)

    def adapter_number(self, name: str | None) -> int:
        """The number of an adapter; `NO_ADAPTER` for None.

        Raises:
            RequestError: there is none of this name; the sentence names those that there are.
        """
        if name is None:
            return NO_ADAPTER
        if name not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise RequestError(f"there is no adapter {name!r}; this engine has: {known}")
        return self.adapters.index(name)

    def detokenizer(self) -> Detokenizer | None:
        """A new decoder for the output of one request; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        broken_byte = self.tokenizer.convert_tokens_to_ids("<0x80>")
        # A tokenizer without byte fallback has no such token, or knows it as a text of that form.
        falls_back = broken_byte is not None and _REPLACEMENT in self._decode([broken_byte])
        return Detokenizer(self._decode, broken_byte if falls_back else None)

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            text = self.tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        except Exception as error:  # a tokenizer raises whatever it likes
            raise RequestFailed(
                f"the output cannot be decoded: {type(error).__name__}: {error}"
            ) from error
        return str(text)

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of texts, each as the first word of a text and as a later one.

        A spelling with a token that the model does not know is left out: it cannot be generated.

        Raises:
            RequestError: there is no tokenizer, or a word cannot be encoded, or has no tokens.
        """
        if words and self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: bad_words needs one")
        encoded = {ids for word in words for ids in self._spellings(word)}
        return tuple(ids for ids in encoded if max(ids) < self.vocab_size)

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        try:
            encoded = [
                tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
                for text in (word, f" {word.lstrip()}")
            ]
        except Exception as error:  # a tokenizer raises whatever it likes
            raise RequestError(
                f"the bad word {word!r} cannot be encoded: {type(error).__name__}: {error}"
            ) from error
        if not all(encoded):
            raise RequestError(f"the bad word {word!r} has no tokens")
        return encoded

    def _ids(self, prompt: Prompt) -> Any:
        if isinstance(prompt, Chat):
            return self._chat_ids(prompt)
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes):
            raise RequestError(
                f"a prompt is text, token ids or chat messages, got a {type(prompt).__name__}"
            )
        if isinstance(prompt, str):
            return self._text_ids(prompt)
        if is_chat(prompt):
            return self._chat_ids(Chat(messages=cast("Sequence[Message]", prompt)))
        return _checked_ids(prompt)

    def _text_ids(self, text: str) -> Any:
        self._check_tokenizer()
        try:
            return self.tokenizer(text)["input_ids"]
        except Exception as error:  # a tokenizer raises whatever it likes
            raise RequestError(
                f"the prompt cannot be encoded: {type(error).__name__}: {error}"
            ) from error

    def _chat_ids(self, chat: Chat) -> Any:
        self._check_tokenizer()
        if chat.template is None and not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(
                f"the tokenizer of {self.name} has no chat template; give text, or a Chat with a "
                "template"
            )
        try:
            return chat.apply(self.tokenizer)
        except Exception as error:  # a template raises whatever it likes
            raise RequestError(
                f"the chat template of {self.name} raised {type(error).__name__}: {error}"
            ) from error

    def _check_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: give the prompt as token ids")


def is_chat(prompt: Prompt) -> bool:
    """Is it for the model's chat template?"""
    if isinstance(prompt, Chat):
        return True
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _checked_ids(prompt: Sequence[Any]) -> Sequence[Any]:
    for token in prompt:
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
            raise RequestError(
                f"a prompt is text, token ids or chat messages, got an item {token!r}"
            )
    return prompt


@attrs.define(eq=False)
class OpenChoice:
    """One of the outputs of a request.

    Attributes:
        index: 0 for the first.
        sequence: what the scheduler knows of it.
        stops: looks for stop strings, if the request has any.
        request: whose it is; set when the request is made.
        first_token_at: when its first token was sampled.
        last_token_at: when its latest token was sampled.
        finish_reason: how it ended, once it has.
    """

    index: int
    sequence: EngineSequence
    stops: StopStrings | None = None
    request: "Request" = attrs.field(init=False)
    first_token_at: float | None = None
    last_token_at: float = 0.0
    finish_reason: FinishReason | None = None


@attrs.define(eq=False)
class Request:
    """An open request, in the hands of the engine thread once it is submitted.

    The first choice computes the prompt; the others are queued when it has, as forks of it.
    """

    id: str
    choices: tuple[OpenChoice, ...]
    mailbox: Mailbox
    submitted_at: float
    scheduled_at: float | None = None
    num_ended: int = 0
    trace: Trace | None = None

    def __attrs_post_init__(self) -> None:
        """Let the scheduler's sequences lead back here."""
        for choice in self.choices:
            choice.request = self
            choice.sequence.request = choice

    @property
    def number(self) -> SequenceId:
        """Its first sequence, by which it is cancelled."""
        return self.choices[0].sequence.id

    def tell(self, event: Event, **more: str) -> None:
        """Log and trace what happens to it; see `kvpage.events`."""
        tell(self.trace, self.id, event, {**self._facts(), **more})

    def _facts(self) -> Facts:
        sequences = [choice.sequence for choice in self.choices]
        prompt_tokens = sequences[0].prompt_tokens
        reasons = [choice.finish_reason for choice in self.choices]
        return {
            "prompt_tokens": prompt_tokens,
            "output_tokens": sum(len(s.tokens) - prompt_tokens for s in sequences),
            "cached_tokens": sequences[0].cached_tokens,
            "preemptions": sum(s.num_preemptions for s in sequences),
            "finish_reasons": [reason for reason in reasons if reason is not None],
        }


def prepare(
    prompt: Prompt,
    params: SamplingParams,
    *,
    number: int,
    model: EngineModel,
    geometry: PoolGeometry,
    window: int,
    new_keys: Callable[[], PrefixKeys] | None,
    priority: int,
    adapter: str | None = None,
) -> tuple[OpenChoice, ...]:
    """Encode and check a request, for `params.n` choices. May take long; call it from a thread.

    The first choice has the sequence id `number`, the others the ids after it. A sequence
    holds `window` tokens at most while it generates; 0: all.

    Raises:
        RequestError: it cannot be served; the sentence says why.
    """
    if not isinstance(priority, int):
        raise RequestError(f"priority must be a whole number, got {priority!r}")
    adapter_number = model.adapter_number(adapter)
    tokens = model.encode(prompt)
    _check_vocabulary(params, model.vocab_size)
    stop_token_ids = params.stop_token_ids
    if not params.ignore_eos:
        stop_token_ids = (*model.eos_token_ids, *stop_token_ids)
    max_total_tokens = token_limit(len(tokens), params, geometry, window)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    wanted = params.structured_outputs
    matcher = None if wanted is None else model.grammars.compile(wanted)
    sequence = EngineSequence(
        id=SequenceId(number),
        tokens=tokens,
        prompt_tokens=len(tokens),
        max_total_tokens=max_total_tokens,
        params=params,
        seed=seed,
        rules=_rules(params, stop_token_ids, model),
        matcher=matcher,
        adapter=adapter_number,
        stop_token_ids=stop_token_ids,
        prefix_keys=new_keys() if new_keys else None,
        priority=priority,
    )
    forks = (_fork(sequence, index, new_keys) for index in range(1, params.n))
    return tuple(
        OpenChoice(index, choice, _stops(params, model))
        for index, choice in enumerate([sequence, *forks])
    )


def _fork(
    first: EngineSequence, index: int, new_keys: Callable[[], PrefixKeys] | None
) -> EngineSequence:
    """Another choice of the same prompt."""
    return attrs.evolve(
        first,
        id=SequenceId(first.id + index),
        seed=(first.seed + index * SEED_STRIDE) % 2**64,
        matcher=None if first.matcher is None else first.matcher.fork(),
        prefix_keys=new_keys() if new_keys else None,
        fork_of=first,
    )


def token_limit(
    prompt_tokens: int, params: SamplingParams, geometry: PoolGeometry, window: int
) -> int:
    """Where a request ends at the latest: tokens of its prompt and one output together.

    Under a sliding `window` (0: none) a request may be longer than the pool.

    Raises:
        RequestTooLong: the prompt, or what was asked for beside it, has no room.
    """
    room = geometry.max_model_len if window else geometry.num_slots
    limit = _max_total_tokens(prompt_tokens, params.max_tokens, room, geometry.max_model_len)
    _check_room(prompt_tokens, params.min_tokens, limit)
    return limit


def _max_total_tokens(prompt_tokens: int, max_tokens: int | None, room: int, limit: int) -> int:
    if prompt_tokens > room:
        raise RequestTooLong(
            f"the prompt has {prompt_tokens} tokens, and the pool has room for {room}"
        )
    if prompt_tokens >= limit:
        raise RequestTooLong(
            f"the prompt has {prompt_tokens} tokens, and max_model_len is {limit}: "
            f"it leaves no room for an answer"
        )
    if max_tokens is None:
        return limit
    if prompt_tokens + max_tokens > limit:
        raise RequestTooLong(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together "
            f"{prompt_tokens + max_tokens}, and max_model_len is {limit}"
        )
    return prompt_tokens + max_tokens


def _check_room(prompt_tokens: int, min_tokens: int, limit: int) -> None:
    if prompt_tokens + min_tokens > limit:
        raise RequestTooLong(
            f"the prompt has {prompt_tokens} tokens and min_tokens is {min_tokens}: together "
            f"{prompt_tokens + min_tokens}, and max_model_len is {limit}"
        )


def _check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        outside = [token for token in ids if token >= vocab_size]
        if outside:
            raise RequestError(
                f"{name} has token id {outside[0]}; the vocabulary has {vocab_size} tokens"
            )


def _rules(params: SamplingParams, end_ids: Sequence[int], model: EngineModel) -> TokenRules | None:
    rules = TokenRules(
        bias_ids=np.fromiter(params.logit_bias.keys(), np.int64),
        bias_values=np.fromiter(params.logit_bias.values(), np.float32),
        allowed_ids=None
        if params.allowed_token_ids is None
        else np.unique(np.array(params.allowed_token_ids, np.int64)),
        bad_words=model.encode_words(params.bad_words),
        min_tokens=params.min_tokens,
        # A configuration may name an end that the model does not know: it cannot come anyway.
        end_ids=np.array([token for token in end_ids if 0 <= token < model.vocab_size], np.int64),
        processors=params.logits_processors,
    )
    return rules if rules.change_anything else None


def _stops(params: SamplingParams, model: EngineModel) -> StopStrings | None:
    if not params.stop:
        return None
    detokenizer = model.detokenizer()
    if detokenizer is None:
        raise RequestError("this engine has no tokenizer: stop needs one; use stop_token_ids")
    return StopStrings(detokenizer, params.stop, min_tokens=params.min_tokens)
