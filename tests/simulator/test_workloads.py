"""Named workloads: repeatable, in order, and like the traces they stand for."""

from itertools import islice, pairwise

import attrs
import numpy as np
import pytest

from kvpage.errors import ConfigError
from kvpage.simulator import WORKLOADS, DrawnTrace
from kvpage.simulator.workloads import PERCENTILES, SESSION_BLOCK, Quantiles, Requests, Sessions


@pytest.mark.parametrize("name", WORKLOADS)
def test_draws_the_same_requests_for_the_same_seed(name: str) -> None:
    """Iterating twice, or a trace of the same seed, gives equal requests; another seed does not."""
    trace = DrawnTrace(name, num_requests=50, seed=3)
    assert list(trace) == list(trace) == list(DrawnTrace(name, num_requests=50, seed=3))
    assert list(trace) != list(DrawnTrace(name, num_requests=50, seed=4))


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_are_in_order_of_arrival(name: str) -> None:
    """Sessions interleave, and still nobody arrives before the request above."""
    arrivals = [request.arrival_s for request in DrawnTrace(name, num_requests=500)]
    assert len(arrivals) == 500
    assert all(earlier <= later for earlier, later in pairwise(arrivals))


@pytest.mark.parametrize("name", [n for n, w in WORKLOADS.items() if isinstance(w, Requests)])
def test_lengths_have_the_quantiles_of_the_trace(name: str) -> None:
    """The quartiles of drawn prompts are those of the table, within the noise of 5,000 draws."""
    workload = WORKLOADS[name]
    assert isinstance(workload, Requests)
    prompts = np.array([r.prompt_tokens for r in DrawnTrace(name, num_requests=5000)])
    for percent in (20, 50, 80):
        quantile = workload.prompt.values[PERCENTILES.index(percent)]
        assert 100 * np.mean(prompts <= quantile) == pytest.approx(percent, abs=3)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_every_distribution_is_complete(workload: Requests | Sessions) -> None:
    """One value for each percentile, never falling; `numpy.interp` does not check it."""
    values = attrs.asdict(workload, recurse=False).values()
    distributions = [value for value in values if isinstance(value, Quantiles)]
    assert distributions
    for distribution in distributions:
        assert len(distribution.values) == len(PERCENTILES)
        assert list(distribution.values) == sorted(distribution.values)


def test_calls_of_a_session_repeat_what_was_said_before() -> None:
    """The ids of a call begin with those of the call before, and cover the whole prompt."""
    agent = WORKLOADS["agent"]
    assert isinstance(agent, Sessions)
    calls = list(islice(agent.endless(np.random.default_rng(0)), 300))
    session = [call for call in calls if call.hash_ids[0] == calls[0].hash_ids[0]]
    assert len(session) > 2
    assert len(session) < len(calls)
    for call in calls:
        assert len(call.hash_ids) == -(-call.prompt_tokens // SESSION_BLOCK)
    for before, after in pairwise(session):
        assert after.hash_ids[: len(before.hash_ids)] == before.hash_ids
        assert after.prompt_tokens >= before.prompt_tokens


def test_refuses_an_unknown_name() -> None:
    """The sentence lists what there is."""
    with pytest.raises(ConfigError, match="no workload named 'talk'; there are: chat, code"):
        DrawnTrace("talk", num_requests=1)
