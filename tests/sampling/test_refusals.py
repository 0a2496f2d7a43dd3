"""What is refused when a request is prepared: in the caller's task, in one sentence."""

from typing import Any

import numpy as np
import pytest

from kvpage import RequestError, RequestTooLong, SamplingParams, SequenceId
from kvpage.request import EngineModel, OpenChoice, prepare
from tests.sampling.requests import GEOMETRY, LetterTokenizer

VOCABULARY = 27


def prepared(values: dict[str, Any], tokenizer: Any, eos: tuple[int, ...] = ()) -> OpenChoice:
    [choice] = prepare(
        [1, 2, 3],
        SamplingParams(**values),
        number=SequenceId(0),
        model=EngineModel("letters", VOCABULARY, eos, tokenizer),
        geometry=GEOMETRY,
        window=0,
        new_keys=None,
        priority=0,
    )
    return choice


class MuteTokenizer(LetterTokenizer):
    """Has no tokens for z, and chokes on q."""

    def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
        if "q" in text:
            raise KeyError("q")
        return super().__call__(text.replace("z", "").strip(), **options)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"stop_token_ids": [3, 27]},
            "stop_token_ids has token id 27; the vocabulary has 27 tokens",
        ),
        ({"logit_bias": {99: 1.0}}, "logit_bias has token id 99; the vocabulary has 27 tokens"),
        (
            {"allowed_token_ids": [0, 10**30]},
            f"allowed_token_ids has token id {10**30}; the vocabulary has 27 tokens",
        ),
        ({"bad_words": ["z"]}, "the bad word 'z' has no tokens"),
        ({"bad_words": ["aq"]}, "the bad word 'aq' cannot be encoded: KeyError: 'q'"),
        (
            {"min_tokens": 198},
            "the prompt has 3 tokens and min_tokens is 198: together 201, and max_model_len is 200",
        ),
    ],
)
def test_what_the_model_cannot_do_is_refused(values: dict[str, Any], sentence: str) -> None:
    """Token ids out of the vocabulary, words that are none, more tokens than fit."""
    with pytest.raises(RequestError) as refusal:
        prepared(values, MuteTokenizer())
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"stop": "a"}, "this engine has no tokenizer: stop needs one; use stop_token_ids"),
        ({"bad_words": "a"}, "this engine has no tokenizer: bad_words needs one"),
    ],
)
def test_texts_need_a_tokenizer(values: dict[str, Any], sentence: str) -> None:
    """Without one, only token ids can be meant."""
    with pytest.raises(RequestError) as refusal:
        prepared(values, None)
    assert str(refusal.value) == sentence


def test_just_as_many_tokens_as_fit_are_not_refused() -> None:
    """One less than what is too long."""
    assert prepared({"min_tokens": 197}, None).sequence.max_total_tokens == 200
    with pytest.raises(RequestTooLong):
        prepared({"min_tokens": 198}, None)


def test_what_the_model_cannot_generate_needs_no_rule() -> None:
    """Ends and bad words beyond the vocabulary, as configurations and tokenizers have them."""
    rules = prepared(
        {"min_tokens": 2, "bad_words": ["{"]}, LetterTokenizer(), (5, 27, -1)
    ).sequence.rules
    assert rules is not None
    assert rules.bad_words == ()
    np.testing.assert_array_equal(rules.end_ids, [5])


def test_the_largest_numbers_harm_nobody() -> None:
    """They are clamped where a column cannot hold them."""
    values = {"top_k": 10**30, "logprobs": 10**30, "prompt_logprobs": 10**30}
    assert prepared(values, None).sequence.params.top_k == 10**30
