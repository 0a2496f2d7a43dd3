"""The closed form, by hand and against the simulator."""

import pytest

from kvpage.traffic import TraceRequest
from kvpage.tuning.candidates import Candidate
from kvpage.tuning.estimate import Lengths, concurrency, estimate
from kvpage.tuning.search import Demand, simulate
from tests.tuning.scenes import COST

MIB = 2**20
TWO = Lengths.of([TraceRequest(0.0, 100, 10), TraceRequest(0.0, 40, 30)])


def candidate(allocator: str = "fixed", block_size: int = 16, **changes: int) -> Candidate:
    values = {"kv_bytes": 8 * MIB, "max_num_seqs": 256, "max_batch_tokens": 512} | changes
    return Candidate(allocator, block_size, **values)


def room(candidate: Candidate, lengths: Lengths, max_model_len: int = 1024) -> float:
    return concurrency(candidate, lengths, bytes_per_token=1024, max_model_len=max_model_len)


def test_a_running_request_holds_its_prompt_and_half_its_output() -> None:
    """Weighed by output, since that is how long it runs."""
    assert TWO.live_tokens == (10 * (100 + 5) + 30 * (40 + 15)) / 40
    assert (TWO.requests, TWO.prompt_tokens, TWO.output_tokens, TWO.longest) == (2, 140, 40, 110)
    assert TWO.pairs == 100 * 101 / 2 + 40 * 41 / 2


def test_paging_wastes_half_a_block_a_request() -> None:
    """8,192 slots, 1 % kept free, 120 live tokens and 7.5 in vain."""
    lengths = Lengths.of([TraceRequest(0.0, 70, 100)] * 1000)
    assert room(candidate(), lengths) == pytest.approx(0.99 * 8192 / 127.5)


def test_rows_hold_the_longest_that_may_come() -> None:
    """Eight rows of 1,024, whatever the requests are."""
    lengths = Lengths.of([TraceRequest(0.0, 70, 100)] * 1000)
    assert room(candidate("contiguous"), lengths) == 8
    assert room(candidate("contiguous:reserve=request"), lengths) > 60


def test_no_more_run_than_there_are_or_than_are_allowed() -> None:
    """Two requests; four sequences."""
    many = Lengths.of([TraceRequest(0.0, 10, 10)] * 100)
    assert room(candidate(), TWO) == 2
    assert room(candidate(max_num_seqs=4), many) == 4


@pytest.mark.parametrize(("allocator", "block_size"), [("fixed", 64), ("contiguous", 16)])
@pytest.mark.parametrize("max_num_seqs", [4, 256])
def test_the_simulator_agrees_about_equal_requests(
    allocator: str, block_size: int, max_num_seqs: int
) -> None:
    """But for the ends of the replay, and preemptions, which the closed form knows nothing of."""
    requests = [TraceRequest(0.0, 100, 60)] * 300
    one = candidate(allocator, block_size, max_num_seqs=max_num_seqs)
    said = estimate(one, Lengths.of(requests), COST, max_model_len=1024)
    simulated = simulate(one, Demand(requests, 1024), COST)
    assert simulated.tokens_s == pytest.approx(said.tokens_s, rel=0.2)
