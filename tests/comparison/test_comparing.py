"""Comparisons over fake runners: whole, failing, cut short."""

import asyncio
from time import perf_counter
from typing import Any

import pytest

from kvpage import Comparison, ComparisonSettings, Grant, PoolGeometry, compare
from kvpage.allocators.fixed import FixedAllocator
from kvpage.blocks import BlockId, SequenceId
from kvpage.comparison import comparing
from kvpage.comparison.comparing import Comparing, as_many_as_fit
from kvpage.comparison.measuring import Progress, column
from kvpage.comparison.workload import read_workload
from kvpage.simulator import TraceRequest
from kvpage.stats import BlockMap, SequenceBlocks
from tests.comparison.sources import BYTES_PER_TOKEN, FakeSource
from tests.engine.scenes import engine_threads
from tests.model.tiny import MAX_LEN, tiny_model

REQUESTS = [TraceRequest(i / 10, 10 + i, 5 + i % 3) for i in range(8)]
OUTPUT_TOKENS = sum(request.output_tokens for request in REQUESTS)


def ignore(_what: object) -> None:
    """Nobody looks."""


async def compared(
    source: FakeSource | None = None,
    *,
    on_progress: Any = ignore,
    on_result: Any = ignore,
    late_by: float = 0.0,
    **settings: Any,
) -> Comparison:
    """Compare over fake runners; `late_by` seconds have passed before it begins."""
    defaults: dict[str, Any] = {
        "allocators": ["fixed", "contiguous"],
        "block_sizes": [4, 8],
        "workload": REQUESTS,
        "max_model_len": 64,
        "scale": 1.0,
        "rounds": 2,
    }
    asked = ComparisonSettings(**(defaults | settings))
    workload = read_workload(asked.workload, len(REQUESTS), asked.seed)
    started = perf_counter() - late_by
    under_way = Comparing(source or FakeSource(), asked, workload, started=started)
    return await under_way.run(on_progress, on_result)


async def test_every_candidate_serves_every_request_in_every_round() -> None:
    """And each run has all its figures."""
    found = await compared()
    assert [result.label for result in found.results] == [
        "fixed/4",
        "fixed/8",
        "contiguous/4",
        "contiguous/8",
    ]
    for result in found.results:
        assert (len(result.runs), result.failure) == (2, None)
        for run in result.runs:
            assert run.output_tokens == OUTPUT_TOKENS
            assert len(run.first_token.seconds) == len(REQUESTS)
            assert len(run.inter_token.seconds) == OUTPUT_TOKENS - len(REQUESTS)
            assert 0 <= run.utilisation <= 1
            assert run.throughput == OUTPUT_TOKENS / run.duration_s
    assert found.state == "complete"


async def test_every_candidate_has_the_same_pool() -> None:
    """A quarter of the requests or two of the longest, in whole blocks of 4 and of 8."""
    found = await compared()
    assert found.slots == 128
    assert [result.num_blocks for result in found.results] == [32, 16, 32, 16]
    peaks = [run.peak_kv_bytes for result in found.results for run in result.runs]
    assert max(peaks) <= 128 * BYTES_PER_TOKEN


async def test_candidates_take_turns_and_each_round_begins_with_another() -> None:
    """A B C D, C D A B; before these, one engine to warm up."""
    source = FakeSource()
    await compared(source)
    assert source.opened == [
        "fixed/4",
        *("fixed/4", "fixed/8", "contiguous/4", "contiguous/8"),
        *("contiguous/4", "contiguous/8", "fixed/4", "fixed/8"),
    ]


async def test_reserving_rows_runs_as_many_requests_as_the_pool_has_rows() -> None:
    """Two of `max_model_len`, never more."""
    found = await compared(allocators=["contiguous"], block_sizes=[8])
    (result,) = found.results
    assert max(sample.running for _, sample in result.runs[0].series) <= 2


async def test_engines_are_closed() -> None:
    """Each before the next one is opened; none is left."""
    await compared()
    assert engine_threads() == []


async def test_what_is_known_is_told_after_each_run() -> None:
    """For reports that grow."""
    told: list[int] = []

    def on_result(found: Comparison) -> None:
        assert found.state == "running"
        told.append(sum(len(result.runs) for result in found.results))

    await compared(on_result=on_result)
    assert told == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_progress_names_the_candidate_and_the_round() -> None:
    """Often enough to see each run at least once."""
    seen: list[Progress] = []
    await compared(on_progress=seen.append, allocators=["fixed"])
    assert {(now.label, now.round, now.rounds) for now in seen} == {
        (label, number, 2) for label in ("fixed/4", "fixed/8") for number in (1, 2)
    }


class _Faulty(FixedAllocator):
    """Raises when a sequence grows."""

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        raise RuntimeError("planted")


async def test_a_strategy_that_fails_half_way_keeps_what_it_had() -> None:
    """It warms up and measures one round, then fails; the others go on without it."""
    built: list[PoolGeometry] = []

    def frail(geometry: PoolGeometry) -> FixedAllocator:
        built.append(geometry)
        return FixedAllocator(geometry) if len(built) < 3 else _Faulty(geometry)

    found = await compared(allocators=[frail, "fixed"], block_sizes=[4], rounds=3)
    broken, whole = found.results
    assert len(broken.runs) == 1
    assert broken.failure is not None
    assert broken.failure.startswith("allocator 'frail'")
    assert "planted" in broken.failure
    assert len(built) == 3
    assert (len(whole.runs), whole.failure) == (3, None)
    assert found.measured == (whole,)
    assert found.state == "complete"


async def test_a_strategy_that_cannot_be_built_is_one_failed_candidate() -> None:
    """In the words of the error."""

    def stillborn(_geometry: PoolGeometry) -> FixedAllocator:
        raise OSError("no room")

    found = await compared(allocators=[stillborn, "fixed"], block_sizes=[4])
    assert found.results[0].failure == (
        "allocator 'stillborn' raised OSError when it was built: no room"
    )
    assert len(found.results[1].runs) == 2


async def test_no_round_is_begun_that_would_end_too_late() -> None:
    """One round of an hour's limit, of which all but a blink has passed."""
    found = await compared(seconds=3600, late_by=3599.999, rounds=3)
    assert found.state == "out of time"
    assert sum(len(result.runs) for result in found.results) < 3 * 4


@pytest.mark.parametrize(
    ("seconds", "late_by", "expected"),
    [(None, 0.0, 20), (10.0**6, 0.0, 40), (100.0, 100.0, 6)],
    ids=["no limit", "time enough", "no time"],
)
async def test_as_many_requests_as_there_is_time_for(
    seconds: float | None, late_by: float, expected: int
) -> None:
    """Never so few that there is nothing to compare."""
    settings = ComparisonSettings(
        allocators=["fixed"], block_sizes=[8], max_model_len=64, scale=1.0, seconds=seconds
    )
    workload = read_workload(REQUESTS * 5, 40, 0)
    started = perf_counter() - late_by
    fitting = await as_many_as_fit(FakeSource(), settings, workload, started=started)
    assert fitting.requests == workload.requests[:expected]


async def test_time_is_shared_by_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six requests took a second: 30 runs in 90 seconds have 3 each, and 0.7 of that is used."""

    async def a_second(_self: Comparing) -> float:
        return 1.0

    monkeypatch.setattr(Comparing, "one_run", a_second)
    monkeypatch.setattr(comparing, "perf_counter", lambda: 100.0)
    settings = ComparisonSettings(
        allocators=["fixed", "contiguous"], block_sizes=[1, 2, 4, 8, 16], max_model_len=64,
        scale=1.0, seconds=90.0, rounds=3,
    )  # fmt: skip
    workload = read_workload(REQUESTS * 5, 40, 0)
    fitting = await as_many_as_fit(FakeSource(), settings, workload, started=100.0)
    assert len(fitting.requests) == 12


async def test_a_comparison_that_is_cancelled_leaves_no_engine() -> None:
    """As by Ctrl-C, after the first run."""

    def stop(_found: Comparison) -> None:
        task.cancel()

    task = asyncio.ensure_future(compared(on_result=stop))
    with pytest.raises(asyncio.CancelledError):
        await task
    for thread in engine_threads():
        thread.join(10)
    assert engine_threads() == []


@pytest.mark.usefixtures("one_torch_thread")
async def test_a_model_of_the_caller_s_own_is_compared() -> None:
    """A transformers model with random weights; it is not changed."""
    model = tiny_model("llama")
    found = await compare(
        model,
        allocators=["fixed", "dynamic"],
        block_sizes=[8],
        workload=REQUESTS,
        scale=1.0,
        rounds=1,
    )
    assert found.max_model_len == MAX_LEN
    assert [len(result.runs) for result in found.results] == [1, 1]
    assert found.token_bytes == 2 * 2 * 16 * 2 * 4  # layers, heads, dims, K and V, float32
    assert type(model).__name__ == "LlamaForCausalLM"


def test_a_column_tells_owners_reservations_and_the_cache() -> None:
    """Request 1 holds tokens in one of its two blocks; request 8 has the colour of request 0."""
    block_map = BlockMap(
        PoolGeometry(6, 4, 24),
        (
            SequenceBlocks("1", (BlockId(2), BlockId(0)), 3),
            SequenceBlocks("8", (BlockId(5),), 4),
        ),
        (BlockId(4),),
    )
    assert column(block_map).tolist() == [5, 0, 4, 0, 1, 2]
