"""Log-probabilities: of the model's own logits, for the rows that asked."""

import numpy as np
import pytest
import torch

from kvpage import Logprobs, SamplingParams
from kvpage.draw import NO_TOKEN
from kvpage.sampling import PART_BYTES, SamplingRows, logprobs_of, token_logprobs


def rows_of(wishes: list[int | None]) -> SamplingRows:
    rows = SamplingRows.empty(len(wishes))
    for row, wish in enumerate(wishes):
        rows.put(row, SamplingParams(logprobs=wish), 0)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_they_are_the_log_softmax_of_the_logits(dtype: torch.dtype) -> None:
    """In float32, whatever the model computes in; the likeliest first, as many as asked for."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = token_logprobs(logits, rows_of([2, None, 5]), np.array([7, 8, 9]))
    expected = logits.float().log_softmax(dim=-1)
    assert found[1] is None
    for row, token, num_top in ((0, 7, 2), (2, 9, 5)):
        of_row = found[row]
        assert of_row is not None
        assert of_row.own == pytest.approx(float(expected[row, token]), abs=1e-6)
        values, ids = expected[row].topk(num_top)
        assert [value for _, value in of_row.top] == pytest.approx(values.tolist(), abs=1e-6)
        if dtype is torch.float32:  # no ties
            assert [token for token, _ in of_row.top] == ids.tolist()


def test_nobody_asked() -> None:
    """Then there is nothing, not even a list of nothings."""
    assert token_logprobs(torch.zeros(2, 5), rows_of([None, None]), np.array([1, 2])) == []


def test_zero_asks_for_the_tokens_own_only() -> None:
    """Beside a row that asks for more."""
    found = token_logprobs(torch.zeros(2, 4), rows_of([0, 1]), np.array([3, 0]))
    first, second = found
    assert first is not None
    assert first.own == pytest.approx(-np.log(4))
    assert first.top == ()
    assert second is not None
    assert len(second.top) == 1


@pytest.mark.parametrize("wish", [4, 5, 10**30])
def test_more_than_there_are_is_all(wish: int) -> None:
    """Every token of the vocabulary once."""
    [found] = token_logprobs(torch.zeros(1, 4), rows_of([wish]), np.array([0]))
    assert found is not None
    assert sorted(token for token, _ in found.top) == [0, 1, 2, 3]


def test_a_forbidden_token_has_its_log_probability_all_the_same() -> None:
    """What a request changes is not the model's opinion; minus infinity is the model's own."""
    logits = torch.tensor([[0.0, -torch.inf]])
    [found] = logprobs_of(logits, np.array([1]), np.array([2]))
    assert found == Logprobs(-np.inf, ((0, 0.0), (1, -np.inf)))


def test_a_row_without_a_token_does_no_harm() -> None:
    """It fails for other reasons; the rows beside it are reported."""
    _, found = token_logprobs(torch.zeros(2, 4), rows_of([0, 0]), np.array([NO_TOKEN, 2]))
    assert found is not None
    assert found.own == pytest.approx(-np.log(4))


def test_more_rows_than_are_worked_on_at_once() -> None:
    """As a long prompt has them: each row's own numbers, in order."""
    vocabulary = 30_000
    num_rows = PART_BYTES // (4 * vocabulary) * 2 + 3
    logits = torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(1))
    tokens, num_top = np.arange(num_rows) * 7, np.arange(num_rows) % 3
    found = logprobs_of(logits, tokens, num_top)
    expected = logits.log_softmax(dim=-1)[np.arange(num_rows), tokens]
    assert [of_row.own for of_row in found] == pytest.approx(expected.tolist(), abs=1e-5)
    assert [len(of_row.top) for of_row in found] == num_top.tolist()
