"""The draw: which tokens can come, and which one comes at a point, against a plain definition."""

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvpage import SamplingParams
from kvpage.draw import FEW, LOOK, NO_TOKEN, RUN, Cuts, draw, most_likely
from kvpage.sampling import PART_BYTES, SamplingRows, sample, uniforms

Floats = npt.NDArray[np.float64]

VOCABULARIES = [1, 2, 100, RUN - 1, RUN, RUN + 1, LOOK, LOOK + 1, 5000]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@attrs.frozen
class Cut:
    """The cuts of one row; see `SamplingParams`."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def on(self, num_rows: int, vocabulary: int, device: str = "cpu") -> Cuts:
        """The same cuts for some rows."""

        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((num_rows, 1), value, dtype=dtype, device=device)

        return Cuts(
            temperature=column(self.temperature, torch.float32),
            min_p=column(self.min_p, torch.float32) if self.min_p else None,
            top_k=column(min(self.top_k, vocabulary), torch.int64) if self.top_k else None,
            top_p=column(self.top_p, torch.float32) if self.top_p < 1 else None,
        )


def reference(logits: Floats, cut: Cut) -> tuple[Floats, bool]:
    """Probabilities by the definition, step by step in float64; does rounding decide a cut?

    Tokens rank by their logits, equal ones by their ids.
    """
    weights = np.exp((logits - logits.max()) / cut.temperature)
    near = 0 < cut.min_p < 1 and bool((np.abs(weights - cut.min_p) < 1e-6).any())
    weights[weights < cut.min_p] = 0.0
    ranked = np.argsort(-logits, kind="stable")
    weights[ranked[cut.top_k or len(ranked) :]] = 0.0
    shares = weights[ranked] / weights.sum()
    before = np.cumsum(shares) - shares
    near |= cut.top_p < 1 and bool((np.abs(before[1:][shares[1:] > 0] - cut.top_p) < 1e-6).any())
    if cut.top_p < 1:
        weights[ranked[before >= cut.top_p]] = 0.0
    return weights / weights.sum(), near


def drawn_at(logits: torch.Tensor, cut: Cut, points: Floats) -> npt.NDArray[np.int64]:
    """What is drawn from one row of logits at each of some points."""
    rows = logits.float().repeat(len(points), 1)
    cuts = cut.on(len(points), logits.shape[-1])
    tokens: npt.NDArray[np.int64] = draw(rows, cuts, torch.from_numpy(points)[:, None]).numpy()
    return tokens


def check(logits: torch.Tensor, cut: Cut) -> None:
    """Every token with a probability comes inside its share of the unit interval, no other ever."""
    probabilities, near = reference(logits[0].double().numpy(), cut)
    assert not near
    upto = np.cumsum(probabilities)
    # Where shares are too narrow for float32, rounding decides which one a point meets.
    tokens = np.flatnonzero(probabilities > 1e-6)
    tokens = tokens[:: max(1, len(tokens) // 50)]
    middles = upto[tokens] - probabilities[tokens] / 2
    np.testing.assert_array_equal(drawn_at(logits, cut, middles), tokens)
    extremes = np.array([0.0, 2.0**-53, 1 - 2.0**-30, 1 - 2.0**-53])
    assert (probabilities[drawn_at(logits, cut, extremes)] > 0).all()


CUTS = [
    Cut(),
    Cut(temperature=0.25),
    Cut(top_k=1),
    Cut(top_k=40),
    Cut(top_k=LOOK + 500),
    Cut(top_p=1e-9),
    Cut(top_p=0.513),
    Cut(top_p=0.9477),
    Cut(min_p=0.0517),
    Cut(min_p=1.0),
    Cut(temperature=1.5, min_p=0.0217, top_k=33, top_p=0.8123),
    Cut(temperature=40.0, top_p=0.9311),
    Cut(temperature=1e9, top_k=3),
]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_draws_follow_the_definition(cut: Cut, vocabulary: int) -> None:
    """Peaky and flat, few and many tokens: temperature 40 keeps thousands of 5,000."""
    generator = torch.Generator().manual_seed(vocabulary)
    check(3 * torch.randn(1, vocabulary, generator=generator), cut)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_ties_rank_by_id(cut: Cut, dtype: torch.dtype) -> None:
    """Half-precision logits tie all the time; rounded to halves, whole crowds do."""
    generator = torch.Generator().manual_seed(5)
    for vocabulary in (100, 3000):
        logits = torch.randn(1, vocabulary, generator=generator)
        check((3 * logits).to(dtype), cut)
        check((6 * logits).round().div(2).to(dtype), cut)


@pytest.mark.parametrize("cut", [Cut(top_k=7), Cut(top_p=0.4997), Cut(top_p=0.99951)], ids=str)
def test_equal_logits_keep_the_first_ids(cut: Cut) -> None:
    """A uniform distribution, larger than what is looked at first."""
    check(torch.zeros(1, 4000), cut)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_what_is_forbidden_never_comes(cut: Cut) -> None:
    """Minus infinity nearly everywhere, runs without any token in front, between and behind."""
    logits = torch.full((1, 6 * RUN), -torch.inf)
    allowed = [RUN + 1, RUN + 2, 2 * RUN - 1, 4 * RUN, 4 * RUN + 7]
    logits[0, allowed] = torch.tensor([1.0, 0.3, 2.0, -1.0, 0.5])
    check(logits, cut)


def test_a_rank_that_top_k_cut_does_not_count_for_top_p() -> None:
    """Half of the probability of what top-k left, not half of all."""
    logits = torch.linspace(1, 0, 3000)[None]
    for top_k in (10, LOOK - 1, LOOK, LOOK + 1, 2999, 3000):
        check(logits, Cut(top_k=top_k, top_p=0.5003))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_most_likely_token_is_the_first_of_the_largest(
    vocabulary: int, dtype: torch.dtype
) -> None:
    """As `argmax` says, among many ties; a row without a finite largest logit has none."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(20, vocabulary, generator=generator).mul(2).round().to(dtype)
    expected = logits.float().numpy().argmax(axis=-1)
    for rows in (1, FEW, len(logits)):
        np.testing.assert_array_equal(most_likely(logits[:rows]).numpy(), expected[:rows])
    logits[0], logits[1, -1], logits[2, 0] = -torch.inf, torch.nan, torch.inf
    for rows in (3, len(logits)):
        assert most_likely(logits[:rows])[:3].tolist() == [NO_TOKEN] * 3


def kinds() -> list[dict[str, Any]]:
    """Parameters of every kind of work."""
    return [
        {"temperature": 0},
        {},
        {"temperature": 0.7},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
        {"temperature": 5.0, "top_p": 0.97},
        {"top_k": 10**6},
    ]


def rows_of(params: list[SamplingParams]) -> SamplingRows:
    rows = SamplingRows.empty(len(params))
    for row, of_row in enumerate(params):
        rows.put(row, of_row, of_row.seed or 0)
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_company(dtype: torch.dtype) -> None:
    """More rows than are worked on at once, of all kinds mixed: each as if it were alone."""
    vocabulary = 20_000
    num_rows = 2 * PART_BYTES // (4 * vocabulary) + 9
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(num_rows, vocabulary, generator=generator)).to(dtype)
    every = kinds()
    params = [SamplingParams(seed=i, **every[i * i % len(every)]) for i in range(num_rows)]
    indices = np.arange(num_rows)
    together = sample(logits, rows_of(params), indices).tolist()
    alone = [
        sample(logits[i : i + 1], rows_of(params[i : i + 1]), indices[i : i + 1]).item()
        for i in range(num_rows)
    ]
    assert together == alone


def test_each_kind_of_row_is_drawn_by_its_own_parameters() -> None:
    """Through `sample`, at the point that seed and index give."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(1, 3000, generator=generator)
    num_rows, checked = 45, 0
    params = [SamplingParams(seed=i, **kinds()[i % len(kinds())]) for i in range(num_rows)]
    indices = np.arange(num_rows) % 4
    tokens = sample(logits.repeat(num_rows, 1), rows_of(params), indices).tolist()
    points = uniforms(np.arange(num_rows, dtype=np.uint64), indices)
    for of_row, point, token in zip(params, points, tokens, strict=True):
        if of_row.greedy:
            assert token == int(logits.argmax())
            continue
        cut = Cut(of_row.temperature, of_row.min_p, of_row.top_k, of_row.top_p)
        upto = np.cumsum(reference(logits[0].double().numpy(), cut)[0])
        if np.abs(upto - point).min() > 1e-6:
            checked += 1
            assert token == np.searchsorted(upto, point, side="right")
    assert checked > 35


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_any_number_of_rows(num_rows: int) -> None:
    """None at all, as in a step of chunks only; one; a few greedy ones."""
    logits = torch.eye(5)[:num_rows]
    rows = rows_of([SamplingParams(temperature=0)] * num_rows)
    assert sample(logits, rows, np.zeros(num_rows, np.int64)).tolist() == list(range(num_rows))


@pytest.mark.parametrize(("top_p", "expected"), [(0.5, {0, 1}), (0.500001, {0, 1, 2}), (0.25, {0})])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, expected: set[int]) -> None:
    """Of four equal tokens, exactly half are two."""
    points = np.linspace(0, 0.999, 50)
    assert set(drawn_at(torch.zeros(1, 4), Cut(top_p=top_p), points).tolist()) == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_gpu_draws_what_a_cpu_draws(cut: Cut) -> None:
    """Largest numbers are found another way there; ties included, away from boundaries."""
    generator = torch.Generator().manual_seed(2)
    logits = (6 * torch.randn(8, 5000, generator=generator)).round().div(2)
    points = torch.rand(8, 1, dtype=torch.float64, generator=generator)
    found = draw(logits.cuda(), cut.on(8, 5000, "cuda"), points.cuda())
    assert found.tolist() == draw(logits, cut.on(8, 5000), points).tolist()
    assert torch.equal(most_likely(logits.cuda()).cpu(), most_likely(logits))
