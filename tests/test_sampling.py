"""Choosing tokens: what is refused, what is reachable, and what a seed means."""

import copy
import pickle
from functools import partial
from typing import Any

import anyio
import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvpage import AsyncEngine, PoolGeometry, RequestError, SamplingParams
from kvpage.request import EngineModel
from kvpage.sampling import SamplingRows, sample, uniforms
from tests.engine.runners import GEOMETRY, VOCAB_SIZE, SamplingRunner
from tests.engine.scenes import complete_all

Floats = npt.NDArray[np.float64]


def draw(
    logits: torch.Tensor, params: list[SamplingParams], *, indices: list[int] | None = None
) -> list[int]:
    """One token for each row of `logits [n, vocabulary]`, by the parameters of that row."""
    rows = SamplingRows.empty(len(params))
    for row, of_row in enumerate(params):
        rows.put(row, of_row, of_row.seed or 0)
    at = np.array(indices or [0] * len(params), np.int64)
    tokens: list[int] = sample(logits, rows, at).tolist()
    return tokens


# -- refusals --------------------------------------------------------------------------------------

NAN, INFINITY = float("nan"), float("inf")
LARGEST = "3.40282e+38"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"temperature": value}, f"temperature must be at least 0 and at most {LARGEST}, got ")
        for value in (NAN, INFINITY, -INFINITY, -0.1, 1e39, True, "1", None)
    ),
    *(
        ({"top_k": value}, "top_k must be an integer of at least 0, got ")
        for value in (-1, 1.0, True, NAN, "1", None)
    ),
    *(
        ({"top_p": value}, "top_p must be above 0 and at most 1, got ")
        for value in (0, 0.0, -0.1, 1.1, NAN, True, None)
    ),
    *(
        ({"min_p": value}, "min_p must be at least 0 and at most 1, got ")
        for value in (-0.1, 1.1, NAN, INFINITY, False, None)
    ),
    *(
        ({"max_tokens": value}, "max_tokens must be an integer of at least 1, got ")
        for value in (0, -1, 1.5, True, "1")
    ),
    *(
        ({"seed": value}, f"seed must be an integer of at least 0 and at most {2**64 - 1}, got ")
        for value in (-1, 2**64, 0.5, True)
    ),
    *(
        ({"stop_token_ids": value}, "stop_token_ids must hold token ids, got ")
        for value in ([-1], [True], ["a"], [1.0], "end", [None])
    ),
    ({"stop_token_ids": 5}, "a sequence of values is due where 5 was given"),
    ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ({"stop": ""}, "stop must hold texts that are not empty, got ''"),
    ({"stop": ["a", 1]}, "stop must hold texts that are not empty, got 1"),
    ({"bad_words": [""]}, "bad_words must hold texts that are not empty, got ''"),
    ({"min_tokens": -1}, "min_tokens must be an integer of at least 0, got -1"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens is 3 and max_tokens is 2"),
    *(
        ({"repetition_penalty": value}, "repetition_penalty must be above 0 and at most ")
        for value in (0, -1.0, NAN, INFINITY, True)
    ),
    ({"presence_penalty": 2.1}, "presence_penalty must be at least -2 and at most 2, got 2.1"),
    ({"frequency_penalty": NAN}, "frequency_penalty must be at least -2 and at most 2, got nan"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias must hold token ids, got -1"),
    *(
        ({"logit_bias": {3: value}}, "logit_bias of token 3 must be a number, got ")
        for value in (NAN, INFINITY, 1e39, True, "1")
    ),
    ({"logit_bias": [1]}, "logit_bias maps token ids to numbers, got [1]"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty: no token could be generated"),
    ({"allowed_token_ids": [-2]}, "allowed_token_ids must hold token ids, got -2"),
    ({"logprobs": -1}, "logprobs must be an integer of at least 0, got -1"),
    ({"logits_processors": ["x"]}, "logits_processors must hold callables, got 'x'"),
]


@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=lambda value: repr(value)[:60])
def test_what_cannot_work_is_refused_at_construction(values: dict[str, Any], sentence: str) -> None:
    """Each in a sentence that names the parameter, its bounds and the value."""
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**values)
    assert str(refusal.value).startswith(sentence)


def test_whole_numbers_are_numbers() -> None:
    """Integers do where real numbers are due, lists where tuples are kept."""
    params = SamplingParams(temperature=2, top_p=1, min_p=0, stop_token_ids=[3, 4], stop="end")
    assert (params.temperature, params.stop_token_ids, params.stop) == (2, (3, 4), ("end",))


# -- greedy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9])
def test_a_temperature_near_zero_is_argmax(temperature: float) -> None:
    """Dividing by it would overflow; whatever the seed, the most likely token comes."""
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(200)]
    assert draw(logits, params) == logits.argmax(dim=-1).tolist()


def test_a_tiny_temperature_that_is_drawn_finds_the_most_likely_token() -> None:
    """Just above the greedy limit nothing overflows either."""
    logits = torch.tensor([[1e4, -1e4, 0.0, 9.9e3]]).repeat(50, 1)
    assert set(draw(logits, [SamplingParams(temperature=2e-5, seed=s) for s in range(50)])) == {0}


# -- against a plain reference ---------------------------------------------------------------------


def reference_probabilities(logits: Floats, params: SamplingParams) -> Floats | None:
    """The definition, one step after another, in float64; None if rounding decides a cut."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    near = np.abs(weights - params.min_p).min() < 1e-5
    weights[weights < params.min_p] = 0.0
    ranked = np.argsort(-weights, kind="stable")
    if params.top_k:
        weights[ranked[params.top_k :]] = 0.0
    before = np.cumsum(weights[ranked] / weights.sum()) - weights[ranked] / weights.sum()
    near |= np.abs(before - params.top_p)[weights[ranked] > 0].min() < 1e-5
    weights[ranked[(before >= params.top_p) & (np.arange(len(ranked)) > 0)]] = 0.0
    probabilities: Floats = weights / weights.sum()
    return None if near else probabilities


def check_against_reference(
    logits: Floats, params: SamplingParams, probabilities: Floats, num_seeds: int
) -> None:
    """Every seed's draw is where its uniform number points in the cumulative distribution."""
    each_seed = [attrs.evolve(params, seed=seed) for seed in range(num_seeds)]
    drawn = np.array(draw(torch.from_numpy(logits).float().repeat(num_seeds, 1), each_seed))
    cumulative = np.cumsum(probabilities)
    points = uniforms(np.arange(num_seeds, dtype=np.uint64), np.zeros(num_seeds, np.int64))
    expected = np.searchsorted(cumulative, points, side="right")
    # float32 may put a point on the other side of a boundary that it nearly hits.
    clear = np.abs(cumulative[None] - points[:, None]).min(axis=1) > 1e-6
    assert clear.mean() > 0.95
    np.testing.assert_array_equal(drawn[clear], expected[clear])
    assert (probabilities[drawn] > 0).all()


def random_params(rng: np.random.Generator, vocabulary: int) -> SamplingParams:
    """Each cut is on in half of the cases, so that all combinations come."""
    return SamplingParams(
        temperature=float(rng.choice([0.3, 1.0, 2.5])),
        top_k=int(rng.integers(1, vocabulary + 3)) if rng.random() < 0.5 else 0,
        top_p=float(rng.uniform(0.01, 1)) if rng.random() < 0.5 else 1.0,
        min_p=float(rng.uniform(0, 1)) if rng.random() < 0.5 else 0.0,
    )


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 17, 255, 256, 257, 1000, 3000])
def test_draws_follow_the_definition(vocabulary: int) -> None:
    """Any mixture of temperature, top-k, top-p, min-p: the exact cumulative distribution."""
    rng = np.random.default_rng(vocabulary)
    for _ in range(6):
        # A shuffled ladder with noise: no ties, so that the k largest are beyond dispute.
        logits = rng.permutation(np.linspace(-4, 4, vocabulary)) + rng.uniform(0, 1e-4, vocabulary)
        params = random_params(rng, vocabulary)
        probabilities = reference_probabilities(logits, params)
        if probabilities is not None:
            check_against_reference(logits, params, probabilities, 60)


def test_top_p_counts_what_top_k_left() -> None:
    """However many tokens top-k keeps: half of their probability, not half of all."""
    logits = np.concatenate([np.linspace(2, 1, 100), np.linspace(0.5, 0, 1900)])
    for top_k in (10, 63, 64, 65, 100, 1023, 1024, 1025, 1999, 2000):
        params = SamplingParams(top_k=top_k, top_p=0.5)
        probabilities = reference_probabilities(logits, params)
        assert probabilities is not None
        check_against_reference(logits, params, probabilities, 40)


@pytest.mark.parametrize("top_k", [3, 4, 10**6, 10**30])
def test_top_k_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    """It is clamped: the same draws as without it."""
    logits = torch.tensor([[0.1, 0.2, 0.3]]).repeat(100, 1)
    clamped = draw(logits, [SamplingParams(top_k=top_k, seed=s) for s in range(100)])
    # Drawn another way, so up to rounding at the boundaries, which no seed here hits.
    assert clamped == draw(logits, [SamplingParams(seed=s) for s in range(100)])


def test_among_equals_top_k_still_keeps_k() -> None:
    """Ties at the boundary are broken: never more than k tokens are reachable."""
    logits = torch.zeros(500, 40)
    params = [SamplingParams(top_k=3, seed=seed) for seed in range(500)]
    assert len(set(draw(logits, params))) == 3


def test_tokens_without_probability_never_come() -> None:
    """Minus infinity in the model's own logits stays unreachable, at the edges of runs as well."""
    for vocabulary in (5, 256, 600):
        logits = torch.full((100, vocabulary), -torch.inf)
        logits[:, [0, vocabulary // 2]] = 0.0
        for cut in ({}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.1}):
            params = [SamplingParams(seed=seed, **cut) for seed in range(100)]
            assert set(draw(logits, params)) == {0, vocabulary // 2}


def test_the_model_s_logits_are_not_changed() -> None:
    """`sample` works on copies, greedy rows and drawn rows alike."""
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    draw(logits, [SamplingParams(temperature=0), *[SamplingParams(top_k=3, min_p=0.1)] * 3])
    assert torch.equal(logits, before)


# -- seeds -----------------------------------------------------------------------------------------


def test_uniform_numbers_are_what_they_always_were() -> None:
    """A seed means the same tokens in every release: the numbers themselves are a promise."""
    found = uniforms(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 7, 100]))
    assert found.tolist() == [0.6524484863740322, 0.24696520214533768, 0.3430236274313533]


def test_uniform_numbers_lie_in_the_unit_interval_evenly() -> None:
    """Of 100,000 numbers of neighbouring seeds and indices, every tenth gets its share."""
    seeds, indices = np.meshgrid(np.arange(1000, dtype=np.uint64), np.arange(100))
    numbers = uniforms(seeds.ravel(), indices.ravel())
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert abs(counts / 10_000 - 1).max() < 0.03


def mixed_params(number: int) -> list[SamplingParams]:
    """Rows that take every path: greedy, from all, by top-k, by top-p, by everything."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 8.0, "top_p": 0.999},
    ]
    return [SamplingParams(seed=i, **kinds[i % len(kinds)]) for i in range(number)]


@pytest.mark.parametrize("vocabulary", [50, 3001])
def test_a_row_draws_the_same_alone_and_in_any_batch(vocabulary: int) -> None:
    """Rounding included, with the many ties of bfloat16 logits."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(35, vocabulary, generator=generator).bfloat16()
    params = mixed_params(35)
    together = draw(logits, params)
    alone = [draw(logits[i : i + 1], params[i : i + 1])[0] for i in range(35)]
    backwards = draw(logits.flip(0), params[::-1])[::-1]
    assert together == alone == backwards


TOO_SMALL = PoolGeometry(num_blocks=12, block_size=4, max_model_len=44)
"""Room for one sequence of full length, and hardly a second."""


async def generate_all(geometry: PoolGeometry, **settings: Any) -> tuple[list[list[int]], int]:
    """The tokens of seven requests at once, one of each kind, and the number of preemptions."""
    runner = SamplingRunner(geometry)
    model = EngineModel("fake", VOCAB_SIZE)
    async with AsyncEngine.from_runner(runner, geometry, model, **settings) as engine:
        calls = [
            partial(engine.complete, [number, 5, 6], attrs.evolve(params, max_tokens=25))
            for number, params in enumerate(mixed_params(7))
        ]
        completions = await complete_all(engine, calls)
        return [list(one.token_ids) for one in completions], engine.stats().preemptions


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_preempted() -> None:
    """Requests of every kind, one after another, all at once, and in a pool far too small."""
    alone, _ = anyio.run(partial(generate_all, GEOMETRY, max_num_seqs=1))
    together, _ = anyio.run(partial(generate_all, GEOMETRY, max_num_seqs=7))
    chunked, _ = anyio.run(partial(generate_all, GEOMETRY, max_batch_tokens=2))
    preempted, preemptions = anyio.run(partial(generate_all, TOO_SMALL))
    swapped, more_preemptions = anyio.run(partial(generate_all, TOO_SMALL, preempt="swap"))
    assert alone == together == chunked == preempted == swapped
    assert min(preemptions, more_preemptions) > 0
    assert all(len(tokens) == 25 for tokens in alone)


def test_parameters_can_be_copied_and_sent() -> None:
    """To another process, say; what is read-only stays so."""
    params = SamplingParams(max_tokens=5, stop="end", logit_bias={3: -1.5})
    for again in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert again == params
        with pytest.raises(TypeError):
            again.logit_bias[4] = 1.0  # type: ignore[index]
