"""The search against trying everything."""

import attrs
import pytest

from kvpage.errors import ConfigError
from kvpage.traffic import TraceRequest
from kvpage.tuning.candidates import Candidate, SearchSpace
from kvpage.tuning.search import TOLERANCE, Demand, Search, simulate
from tests.tuning.scenes import COST, SPACE, workload

MIB = 2**20
BUDGET = 4 * MIB


def demand(count: int = 40, *, prompt: float = 4.0) -> Demand:
    return Demand(workload(count, prompt=prompt).requests, 512)


@pytest.mark.parametrize("prompt", [pytest.param(3.0, marks=pytest.mark.slow), 4.5])
def test_finds_what_the_full_sweep_finds(prompt: float) -> None:
    """Within 3 % of the best of all candidates, having simulated a part of them."""
    asked = demand(30, prompt=prompt)
    search = Search(SPACE, asked, COST, budget_bytes=BUDGET)
    found = search.best()
    swept = [simulate(c, asked, COST) for c in SPACE.candidates(BUDGET)]
    best = max(swept, key=lambda s: s.tokens_s)
    assert found.tokens_s >= 0.97 * best.tokens_s
    assert len(search.simulated) < len(swept) / 2


def test_takes_no_more_than_it_needs() -> None:
    """One request at a time has no use for memory, rows or large steps."""
    asked = Demand([TraceRequest(0.0, 40, 20)] * 3, 64)
    space = attrs.evolve(SPACE, max_num_seqs=(1, 4))
    search = Search(space, asked, COST, budget_bytes=BUDGET)
    found = search.best().candidate
    assert found.kv_bytes == MIB
    assert found.max_batch_tokens == min(SPACE.max_batch_tokens) or found.max_num_seqs == 4


def test_gives_up_no_more_than_it_says() -> None:
    """The cheap settings are within the tolerance of the best that was simulated."""
    search = Search(SPACE, demand(), COST, budget_bytes=BUDGET)
    found = search.best()
    peak = max(s.tokens_s for s in search.simulated.values())
    assert found.tokens_s >= (1 - TOLERANCE) * peak


def test_neighbours_differ_in_one_setting() -> None:
    """Every value of every setting once, the candidate's own among them."""
    search = Search(SPACE, demand(40), COST, budget_bytes=BUDGET)
    centre = search.best().candidate
    for name, others in search.neighbours(centre).items():
        assert centre in [other.candidate for other in others]
        for other in others:
            value = getattr(other.candidate, name)
            assert other.candidate == attrs.evolve(centre, **{name: value})


def test_simulates_each_candidate_once() -> None:
    """The second time it is remembered."""
    search = Search(SPACE, demand(20), COST, budget_bytes=BUDGET)
    candidate = Candidate("fixed", 8, BUDGET, 4, 64)
    assert search.simulate(candidate) is search.simulate(candidate)


def test_memory_below_the_longest_request_is_a_problem_not_an_error() -> None:
    """The other candidates go on."""
    simulated = simulate(Candidate("fixed", 8, MIB // 4, 4, 64), demand(20), COST)
    assert simulated.tokens_s == 0.0
    assert simulated.problem == "256 tokens of memory, less than max_model_len"


def test_a_strategy_that_fails_is_a_problem_not_an_error() -> None:
    """It says what was wrong."""
    candidate = Candidate("contiguous:reserve=nothing", 8, BUDGET, 4, 64)
    simulated = simulate(candidate, demand(20), COST)
    assert simulated.problem is not None
    assert "reserve" in simulated.problem


def test_no_memory_at_all_is_one_sentence() -> None:
    """With both numbers."""
    with pytest.raises(ConfigError, match=r"holds fewer than max_model_len \(512\) tokens"):
        Search(SPACE, demand(20), COST, budget_bytes=1024)


def test_no_candidate_at_all_is_one_sentence() -> None:
    """With the reason of one of them."""
    space = attrs.evolve(SPACE, allocators=("contiguous:reserve=nothing",))
    with pytest.raises(ConfigError, match=r"no candidate can serve these requests: .*reserve"):
        Search(space, demand(20), COST, budget_bytes=BUDGET).best()


def test_prefixes_that_the_trace_names_are_shared() -> None:
    """Equal prompts are computed once, so throughput is higher."""
    alone = [TraceRequest(0.0, 256, 8)] * 30
    shared = [attrs.evolve(request, hash_ids=(1, 2, 3, 4)) for request in alone]
    candidate = Candidate("fixed", 8, BUDGET, 16, 256)
    slow, fast = (
        simulate(candidate, Demand(requests, 512, hash_block_size=64), COST).tokens_s
        for requests in (alone, shared)
    )
    assert fast > 1.5 * slow


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"block_sizes": ()}, "block_sizes needs different values to try"),
        ({"block_sizes": (8, 8)}, "block_sizes needs different values"),
        ({"max_num_seqs": (0,)}, "max_num_seqs must be whole numbers of at least 1, got 0"),
        ({"memory_shares": (1.5,)}, "above 0 and at most 1, got 1.5"),
        ({"allocators": ("fixed:block_size=8",)}, "names a block size"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(values: dict[str, object], sentence: str) -> None:
    """In one sentence, before anything is done."""
    with pytest.raises(ConfigError, match=sentence):
        SearchSpace(**values)  # type: ignore[arg-type]
