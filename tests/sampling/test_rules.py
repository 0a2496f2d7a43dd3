"""Processors, rules and penalties: against transformers' own classes, row by row."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
)

from kvpage import SamplingParams, StepFailed
from kvpage.draw import NO_TOKEN
from kvpage.logits import apply_penalties
from kvpage.sampling import failures, process
from tests.sampling.requests import Batch, Request, changed_logits, next_tokens

VOCABULARY = 27
END = 3


def random_logits(num_rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocabulary, generator=generator) * 3


def oracle(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """One row, by transformers where it has the rule, and written out where it has not."""
    params, scores = request.params, logits[None].clone()
    token_ids = torch.tensor([request.tokens])
    for processor in [*params.logits_processors, *_processors_of(request)]:
        scores = processor(token_ids, scores)
    counts = torch.bincount(torch.tensor(request.output, dtype=torch.int64), minlength=len(logits))
    penalty = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    changed: torch.Tensor = scores[0] - penalty
    return changed


def _processors_of(request: Request) -> list[Any]:
    params = request.params
    processors: list[Any] = []
    if params.allowed_token_ids is not None:
        processors.append(Allow(params.allowed_token_ids))
    if params.bad_words:
        words = [text for word in params.bad_words for text in (word, f" {word}")]
        ids = [[max(0, ord(letter) - 96) for letter in word] for word in words]
        processors.append(NoBadWordsLogitsProcessor(ids))
    if params.min_tokens:
        processors.append(
            MinNewTokensLengthLogitsProcessor(len(request.prompt), params.min_tokens, END)
        )
    if params.logit_bias:
        biases = {(token,): bias for token, bias in params.logit_bias.items()}
        processors.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    return processors


class Allow(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Forbids all tokens but some."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self._tokens] = scores[:, self._tokens]
        return allowed


def halve_repeated(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A callable that looks at the tokens so far."""
    scores[:, input_ids[0, -1]] /= 2
    return scores


tokens = st.integers(0, VOCABULARY - 1)
a_word = st.text("abcd", min_size=1, max_size=3)
some_params: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"temperature": st.just(0)},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.1, 1.3, 5.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.25, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.25, 2.0]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.3, 4.0])),
        "allowed_token_ids": st.lists(tokens, min_size=6, max_size=12, unique=True),
        "bad_words": st.lists(a_word, max_size=3),
        "min_tokens": st.integers(0, 6),
        "logits_processors": st.sampled_from(
            [(), (halve_repeated,), (TemperatureLogitsWarper(0.7), halve_repeated)]
        ),
    },
)
some_requests = st.builds(
    Request,
    params=some_params.map(lambda chosen: SamplingParams(**chosen)),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    output=st.lists(st.integers(0, 4), max_size=9),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(some_requests, min_size=1, max_size=7), st.integers(0, 1000))
def test_every_row_is_changed_as_transformers_would(requests: list[Request], seed: int) -> None:
    """Any mixture of rules and penalties in one batch; the penalties' sums round differently."""
    logits = random_logits(len(requests), seed=seed)
    found = changed_logits(logits, requests)
    expected = torch.stack([oracle(row, r) for row, r in zip(logits, requests, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.lists(some_requests, min_size=2, max_size=7), st.integers(0, 1000))
def test_a_row_is_changed_alone_as_in_a_batch(requests: list[Request], seed: int) -> None:
    """Bit for bit, and the greedy token is the largest of what came out."""
    logits = random_logits(len(requests), seed=seed)
    together = changed_logits(logits, requests)
    alone = [changed_logits(logits[i : i + 1], [r])[0] for i, r in enumerate(requests)]
    assert torch.equal(together, torch.stack(alone))
    largest = together.amax(dim=-1)
    chosen = next_tokens(logits, requests)
    assert [row[token] for row, token in zip(together, chosen, strict=True) if token >= 0] == [
        row for row in largest if row.isfinite()
    ]


EXACT: list[tuple[dict[str, Any], Any]] = [
    ({"repetition_penalty": 1.3}, RepetitionPenaltyLogitsProcessor(1.3)),
    ({"repetition_penalty": 0.6}, RepetitionPenaltyLogitsProcessor(0.6)),
    ({"logit_bias": {2: 1.5, 9: -7.25}}, SequenceBiasLogitsProcessor({(2,): 1.5, (9,): -7.25})),
    ({"bad_words": ["ab", "d"]}, NoBadWordsLogitsProcessor([[1, 2], [0, 1, 2], [4], [0, 4]])),
    ({"min_tokens": 5}, MinNewTokensLengthLogitsProcessor(3, 5, END)),
    ({"min_tokens": 4}, MinNewTokensLengthLogitsProcessor(3, 4, END)),
    ({"allowed_token_ids": [5, 7, 5]}, Allow([5, 7])),
    ({"logits_processors": [TemperatureLogitsWarper(0.3)]}, TemperatureLogitsWarper(0.3)),
]


@pytest.mark.parametrize(("values", "processor"), EXACT, ids=lambda value: repr(value)[:40])
def test_a_single_rule_equals_transformers_to_the_bit(
    values: dict[str, Any], processor: Any
) -> None:
    """Four tokens generated, the last of them the beginning of a bad word."""
    request = Request(SamplingParams(**values), [4, 4, 9], [2, 0, 5, 1])
    logits = random_logits(1)
    expected = processor(torch.tensor([request.tokens]), logits.clone())
    assert torch.equal(changed_logits(logits, [request]), expected)


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    """What the prompt says is not penalised; a token costs once, and each time that it came."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    changed = changed_logits(torch.zeros(1, 8), [Request(params, [6, 6, 7], [2, 5, 2, 2])])
    assert changed[0].tolist() == [0, 0, -0.5 - 3 * 0.25, 0, 0, -0.75, 0, 0]


def test_repetition_counts_the_prompt_too() -> None:
    """A positive logit is divided, a negative one multiplied, once however often it was seen."""
    params = SamplingParams(repetition_penalty=2.0)
    logits = torch.tensor([[3.0, 3.0, -3.0, -3.0]])
    changed = changed_logits(logits, [Request(params, [0, 0], [2, 2])])
    assert changed.tolist() == [[1.5, 3.0, -6.0, -3.0]]


def test_histories_of_different_lengths_do_not_mix() -> None:
    """A short history beside a long one: nothing is read beyond it, token 0 least of all."""
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    requests = [Request(params, [5], [6]), Request(params, [1] * 60, [2] * 60)]
    changed = changed_logits(torch.ones(2, 8), requests)
    assert changed.tolist() == [[1, 1, 1, 1, 1, 0.5, -0.5, 1], [1, 0.5, 0.5 - 60, 1, 1, 1, 1, 1]]


def test_tokens_that_a_model_cannot_generate_are_not_penalised() -> None:
    """Some models embed more tokens than they have logits: such a token is no other row's."""
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    batch = Batch.of([Request(params, [9]), Request(params, [2])], vocabulary=10)
    logits = torch.ones(2, 8)
    assert batch.history is not None
    apply_penalties(logits, batch.sampling.penalties, batch.history)
    assert logits.tolist() == [[1.0] * 8, [1.0, 1.0, 0.5, *[1.0] * 5]]


def test_a_bad_word_longer_than_the_text_does_no_harm() -> None:
    """Its beginning cannot have come yet."""
    params = SamplingParams(bad_words=["aaaaaaaa"])
    logits = random_logits(1)
    assert torch.equal(changed_logits(logits, [Request(params, [1, 1], [1])]), logits)


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    """The text counts, not who wrote it."""
    params = SamplingParams(bad_words=["abc"])
    changed = changed_logits(torch.zeros(1, 8), [Request(params, [1, 2])])
    assert changed[0].isinf().nonzero().flatten().tolist() == [3]


def test_rules_hold_whatever_a_processor_does() -> None:
    """Processors come first: one that makes a forbidden token likely cannot let it in."""

    def insist(_input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([2]), 1e9)

    params = SamplingParams(temperature=0, allowed_token_ids=[4, 5], logits_processors=[insist])
    assert next_tokens(torch.zeros(1, 8), [Request(params)]) == [4]


def test_a_processor_sees_prompt_and_output_and_the_models_logits() -> None:
    """int64 [1, t] and float32 [1, vocabulary], a copy that it may change."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((input_ids, scores.clone()))
        return scores.zero_()

    logits = random_logits(1).half()
    params = SamplingParams(temperature=0, logits_processors=[note], logit_bias={7: 1.0})
    assert next_tokens(logits, [Request(params, [4, 9], [2, 5])]) == [7]
    [(input_ids, scores)] = seen
    assert torch.equal(input_ids, torch.tensor([[4, 9, 2, 5]]))
    assert torch.equal(scores, logits.float())


def test_a_processor_that_raises_spoils_its_own_row_only() -> None:
    """Its row has no token and a failure with the cause; the others are sampled as ever."""

    def fail(_input_ids: torch.Tensor, _scores: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")

    cause = SamplingParams(temperature=0, logits_processors=[fail])
    requests = [Request(SamplingParams(temperature=0)), Request(cause), Request(cause)]
    logits = random_logits(3)
    batch = Batch.of(requests, VOCABULARY)
    _, raised = process(logits, batch.sampling, batch.history)
    tokens = next_tokens(logits, requests)
    assert tokens == [int(logits[0].argmax()), NO_TOKEN, NO_TOKEN]
    failed = failures(np.array(tokens), batch.sampling, raised)
    assert list(failed) == [1, 2]
    assert str(failed[1]) == "a logits processor failed: ValueError: boom"
    assert isinstance(failed[1].__cause__, ValueError)


@pytest.mark.parametrize("answer", [None, torch.zeros(3), torch.zeros(1, 5), 7])
def test_a_processor_that_answers_nonsense_fails_as_one_that_raises(answer: Any) -> None:
    """None, a wrong shape, a number."""
    params = SamplingParams(temperature=0, logits_processors=[lambda *_: answer])
    batch = Batch.of([Request(params)], VOCABULARY)
    processed, raised = process(random_logits(1), batch.sampling, batch.history)
    assert processed.isnan().all()
    assert f"it has to return logits [1, {VOCABULARY}], got" in str(raised[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_where_all_is_forbidden_there_is_no_token(temperature: float, cut: dict[str, Any]) -> None:
    """Only the ends are allowed, and it is too early for an end: said, not papered over."""
    params = SamplingParams(temperature=temperature, allowed_token_ids=[END], min_tokens=2, **cut)
    requests = [Request(params), Request(params, output=[5, 5]), Request(SamplingParams(top_k=1))]
    logits = random_logits(3)
    tokens = next_tokens(logits, requests)
    assert tokens == [NO_TOKEN, END, int(logits[2].argmax())]
    batch = Batch.of(requests, VOCABULARY)
    [(row, failure)] = failures(np.array(tokens), batch.sampling, {}).items()
    assert row == 0
    assert isinstance(failure, StepFailed)
    assert "no token to choose" in str(failure)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("cut", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}])
def test_logits_that_are_no_numbers_spoil_their_own_row_only(
    value: float, cut: dict[str, Any]
) -> None:
    """A model that breaks down on one request gives no token for it, never a wild one."""
    requests = [Request(SamplingParams(**cut))] * 2
    logits = random_logits(2)
    logits[0, 13] = value
    tokens = next_tokens(logits, requests)
    assert tokens[0] == NO_TOKEN
    assert 0 <= tokens[1] < VOCABULARY


def test_rules_find_their_rows_among_others() -> None:
    """Rows that are drawn and rows that are not, with and without rules, in any order."""
    waits = SamplingParams(temperature=0, min_tokens=2)
    repeats = SamplingParams(temperature=0, frequency_penalty=2.0)
    drawn = SamplingParams(top_k=1)
    logits = torch.tensor([[0.0, 1.0, 0.5, 1.5]])
    expected = [
        (Request(drawn), 3),
        (Request(repeats, output=[3]), 1),
        (Request(waits, output=[1]), 1),
        (Request(waits, output=[1, 1]), 3),
        (Request(SamplingParams(temperature=0)), 3),
        (Request(repeats, output=[3, 1]), 2),
        (Request(SamplingParams(top_k=1, repetition_penalty=2.0), prompt=[3]), 1),
    ]
    for shift in range(len(expected)):
        requests, tokens = zip(*expected[shift:], *expected[:shift], strict=True)
        assert next_tokens(logits.repeat(len(requests), 1), requests) == list(tokens)
