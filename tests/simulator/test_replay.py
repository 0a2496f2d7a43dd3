"""Replays: what must come out when the trace leaves no choice, and what must hold for any."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from kvpage.allocators.base import Grant
from kvpage.allocators.contiguous import ContiguousAllocator
from kvpage.allocators.dynamic import DynamicAllocator
from kvpage.allocators.fixed import FixedAllocator
from kvpage.blocks import Extent, PoolGeometry, SequenceId
from kvpage.errors import ConfigError, TraceError
from kvpage.plugins import AllocatorSpec
from kvpage.simulator import Replay, ReplaySettings, Report, StepTime, TraceRequest
from kvpage.simulator.replay import QUEUE_DEPTH, STEPS_PER_TICK

FIXED = AllocatorSpec("fixed", FixedAllocator, 16)
DYNAMIC = AllocatorSpec("dynamic", DynamicAllocator, 8)
CONTIGUOUS = AllocatorSpec("contiguous", ContiguousAllocator, 16)
EXACT = AllocatorSpec("contiguous", ContiguousAllocator, 16, {"reserve": "request"})
STRATEGIES = [FIXED, DYNAMIC, CONTIGUOUS, EXACT]

SMALL = ReplaySettings(slots=8192, max_model_len=1024)
SECOND_STEPS = StepTime(base_s=1.0, per_token_s=0.0, per_kv_token_s=0.0)


def chat(count: int) -> list[TraceRequest]:
    """Requests of many lengths, all of them short enough for `SMALL`."""
    random = np.random.default_rng(5)
    lengths = random.lognormal(4.0, 0.9, (count, 2)).astype(int) + 1
    return [TraceRequest(0.0, int(prompt), int(output)) for prompt, output in lengths]


def replay(
    requests: Any, allocator: AllocatorSpec, settings: ReplaySettings, **options: Any
) -> Report:
    return Replay(requests, allocator, settings, **options).run()


@pytest.mark.parametrize("allocator", STRATEGIES, ids=str)
def test_every_request_generates_all_its_tokens(allocator: AllocatorSpec) -> None:
    """Whatever is preempted in between, nothing is lost and nothing generated twice."""
    requests = chat(600)
    too_long = TraceRequest(0.0, 1000, 25)
    report = replay([*requests, too_long], allocator, SMALL)
    assert report.requests == report.completed == 600
    assert report.skipped == 1
    assert report.output_tokens == sum(r.output_tokens for r in requests)
    assert report.failed == report.cancelled == 0


@pytest.mark.parametrize("allocator", STRATEGIES, ids=str)
def test_equal_replays_report_equal_figures(allocator: AllocatorSpec) -> None:
    """No clock and no chance in it: all but the timings are the same."""
    timings = {"wall_s"}
    first, again = (
        {
            name: value
            for name, value in replay(chat(200), allocator, SMALL).figures().items()
            if name not in timings and not name.startswith("allocator_ns")
        }
        for _ in range(2)
    )
    assert first == again


def test_reserved_rows_bound_the_contiguous_batch() -> None:
    """8,192 slots are eight rows of 1,024, and no more sequences ever run."""
    report = replay(chat(300), CONTIGUOUS, SMALL)
    assert report.running == 8.0
    assert report.extents_per_request == 1.0
    assert report.preemptions == 0


def test_utilisation_of_known_lengths() -> None:
    """Equal requests over one reserved row: the mean of their length while they run.

    A request of 100 + 50 tokens writes 100 tokens in its first step and one in each of 49 more.
    Half of a step's tokens count in it.
    """
    settings = ReplaySettings(slots=1024, max_model_len=1024)
    report = replay([TraceRequest(0.0, 100, 50)] * 20, CONTIGUOUS, settings)
    live = [50.0, *(100.5 + k for k in range(49))]
    assert report.utilisation == pytest.approx(np.mean(live) / 1024)
    unused = [1024 - 100 - k for k in range(50)]
    assert report.internal_waste == pytest.approx(np.mean(unused) / 1024)
    assert report.external_waste == 0.0  # the row is taken whole, nothing is free
    assert report.tokens_per_step == report.running == 1.0


def test_internal_waste_of_blocks_is_half_a_block() -> None:
    """(B - 1) / 2 slots a sequence, as a share of what it holds, for requests of many lengths."""
    for block_size in (8, 32):
        spec = AllocatorSpec("fixed", FixedAllocator, block_size)
        report = replay(chat(1500), spec, SMALL)
        assert report.internal_waste is not None
        assert report.running is not None
        allocated = (1 - (report.external_waste or 0)) * report.slots
        expected = (block_size - 1) / 2 * report.running / allocated
        assert report.internal_waste == pytest.approx(expected, abs=0.008)


def test_single_slots_waste_nothing_inside() -> None:
    """With blocks of one token every allocated slot is used."""
    report = replay(chat(300), AllocatorSpec("fixed", FixedAllocator, 1), SMALL)
    assert report.internal_waste == 0.0


def test_external_waste_counts_while_the_head_is_blocked() -> None:
    """Ten rows of 96 and 64 slots over: these serve nobody, and are all that is lost outside."""
    spec = AllocatorSpec("contiguous", ContiguousAllocator, 16)
    settings = ReplaySettings(slots=1024, max_model_len=96)
    report = replay([TraceRequest(0.0, 40, 56)] * 200, spec, settings)
    assert report.external_waste == pytest.approx(64 / 1024)
    unused = [96 - 40 - k for k in range(56)]
    assert report.internal_waste == pytest.approx(np.mean(unused) / 96)


def test_counts_entries_and_runs_of_blocks() -> None:
    """One request alone in a fresh pool: its ten blocks lie in one run."""
    report = replay([TraceRequest(0.0, 100, 60)], FIXED, SMALL)
    assert report.entries_per_request == 10
    assert report.extents_per_request == 1
    assert report.grants_per_request == 10


def test_preemption_is_counted_with_what_it_costs() -> None:
    """Requests that all grow over a pool too small for them get in each other's way."""
    settings = ReplaySettings(slots=512, max_model_len=512)
    report = replay([TraceRequest(0.0, 8, 200)] * 30, FIXED, settings)
    assert report.completed == 30
    assert report.preemptions > 0
    assert report.recomputed_tokens > 0
    total = report.recomputed_tokens + 30 * (8 + 199)
    assert report.recomputed_share == pytest.approx(report.recomputed_tokens / total)


def test_what_outgrows_the_pool_fails_and_is_counted() -> None:
    """A prompt beyond the pool, and an output that gets there, end alone; the others go on."""
    settings = ReplaySettings(slots=64, max_model_len=2048)
    requests = [
        TraceRequest(0.0, 100, 1),
        TraceRequest(0.0, 8, 8),
        TraceRequest(0.0, 32, 100),
        TraceRequest(0.0, 8, 8),
    ]
    report = replay(requests, FIXED, settings)
    assert (report.completed, report.failed) == (2, 2)


class _Liar(FixedAllocator):
    """Grants a block outside the pool to every third sequence."""

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        grant = super().admit(seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens)
        wrong = Extent(self._geometry.num_blocks, 1)  # type: ignore[arg-type]
        return Grant((wrong,)) if seq % 3 == 0 else grant


def test_a_faulty_allocator_fails_its_requests_only() -> None:
    """A bad answer costs the request that it was given to."""
    report = replay([TraceRequest(0.0, 10, 5)] * 30, AllocatorSpec("liar", _Liar, 16), SMALL)
    assert (report.completed, report.failed) == (20, 10)


def test_a_trace_without_a_short_request_is_refused() -> None:
    """Nothing would be measured; the sentence has the numbers."""
    with pytest.raises(TraceError, match="all 2 requests of long are longer than max_model_len"):
        replay([TraceRequest(0.0, 2000, 1)] * 2, FIXED, SMALL, name="long")


def test_a_pool_that_is_never_full_is_not_measured() -> None:
    """No figure is better than one of an empty pool."""
    report = replay([TraceRequest(0.0, 100, 10)] * 3, FIXED, SMALL)
    assert report.utilisation is None
    assert report.internal_waste is None
    assert report.measured_steps == 0
    assert report.completed == 3


def test_the_trace_is_read_as_it_is_needed() -> None:
    """However long the trace, what is in memory are the batch and a short queue."""
    read = 0

    def endless() -> Iterator[TraceRequest]:
        nonlocal read
        for request in repeat(TraceRequest(0.0, 100, 100), 2000):
            read += 1
            yield request

    ahead = []
    replaying = Replay(endless(), FIXED, SMALL)
    report = replaying.run(lambda: ahead.append(read))
    # A request runs for 100 steps, and at most 80 of them have room.
    for tick, requests_read in enumerate(ahead[:-1], start=1):
        ended = (tick * STEPS_PER_TICK // 100 + 1) * 80
        assert requests_read <= ended + 80 + QUEUE_DEPTH
    assert report.completed == 2000


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_equal_prompts_share_their_blocks(block_size: int) -> None:
    """The second of two equal prompts, run after it, computes its last block only."""
    settings = ReplaySettings(slots=1024, max_model_len=512, max_num_seqs=1, prefix_cache=True)
    requests = [TraceRequest(0.0, 128, 4, tuple(range(8)))] * 2
    spec = AllocatorSpec("fixed", FixedAllocator, block_size)
    report = replay(requests, spec, settings, hash_block_size=16)
    assert report.prefix_hit_rate == (128 - block_size) / 256


def test_nothing_is_shared_unless_asked() -> None:
    """Hash ids alone do not turn the prefix cache on; and `contiguous` cannot share at all."""
    requests = [TraceRequest(0.0, 128, 4, tuple(range(8)))] * 2
    off = ReplaySettings(slots=1024, max_model_len=512, max_num_seqs=1)
    on = ReplaySettings(slots=1024, max_model_len=512, max_num_seqs=1, prefix_cache=True)
    assert replay(requests, FIXED, off, hash_block_size=16).prefix_hit_rate == 0.0
    assert replay(requests, CONTIGUOUS, on, hash_block_size=16).prefix_hit_rate == 0.0


def test_utilisation_counts_shared_blocks_once() -> None:
    """Many sequences over one prefix use little more than one of them."""
    settings = ReplaySettings(
        slots=4096, max_model_len=512, prefix_cache=True, step_time=SECOND_STEPS
    )
    requests = [TraceRequest(float(i), 480, 30, tuple(range(30))) for i in range(16)]
    report = replay(requests, FIXED, settings, hash_block_size=16)
    assert max(sample.running for _, sample in report.series) == 16
    assert max(sample.allocated_slots for _, sample in report.series) <= 480 + 16 * 64
    assert min(sample.live_slots for _, sample in report.series) > 0


# -- arrivals ----------------------------------------------------------------------------------


def test_the_clock_follows_arrivals_and_steps() -> None:
    """Steps of a second: idle time is skipped, who comes in mid-step waits for its end."""
    settings = ReplaySettings(slots=1024, max_model_len=512, step_time=SECOND_STEPS)
    requests = [
        TraceRequest(5.0, 10, 3),
        TraceRequest(100.0, 10, 3),
        TraceRequest(100.25, 10, 2),
    ]
    report = replay(requests, FIXED, settings)
    assert report.simulated_s == 103.0  # the last one runs from 101 to 103, as does the second
    assert report.steps == report.measured_steps == 6
    assert report.queue_wait_mean_s == pytest.approx(0.75 / 3)
    assert report.queue_wait_p99_s == pytest.approx(0.75, rel=0.04)


def test_step_time_has_three_parts() -> None:
    """A prompt of 10 and two tokens more: tokens computed are 10 and 1, tokens read 10 and 11."""
    step_time = StepTime(base_s=1.0, per_token_s=0.1, per_kv_token_s=0.01)
    settings = ReplaySettings(slots=1024, max_model_len=512, step_time=step_time)
    report = replay([TraceRequest(0.0, 10, 2)], FIXED, settings)
    assert report.simulated_s == pytest.approx(2 + 1.1 + 0.21)


def test_a_saturated_replay_has_no_clock() -> None:
    """Arrival times are not looked at, and nothing is said of waiting."""
    report = replay([TraceRequest(9.0 * i, 10, 2) for i in range(50)], FIXED, SMALL)
    assert report.steps == 2
    assert report.simulated_s is None
    assert report.queue_wait_mean_s is None


def test_a_full_pool_makes_requests_wait() -> None:
    """Two requests at once in a pool of one row: the second waits for the first to end."""
    settings = ReplaySettings(slots=512, max_model_len=512, step_time=SECOND_STEPS)
    report = replay([TraceRequest(0.0, 10, 20)] * 2, CONTIGUOUS, settings)
    assert report.queue_wait_mean_s == pytest.approx((0 + 20) / 2)


def test_waiting_ends_with_the_first_admission() -> None:
    """Both start at once; one is preempted later, which is no wait in the queue."""
    settings = ReplaySettings(slots=256, max_model_len=256, step_time=SECOND_STEPS)
    report = replay([TraceRequest(0.0, 32, 150)] * 2, FIXED, settings)
    assert report.preemptions > 0
    assert report.queue_wait_mean_s == 0.0


# -- cancellations -----------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", STRATEGIES, ids=str)
def test_cancelled_requests_leave_early(allocator: AllocatorSpec) -> None:
    """Each request completes or is cancelled; those that leave have generated less."""
    requests = chat(300)
    settings = ReplaySettings(slots=8192, max_model_len=1024, cancel_rate=0.5, seed=1)
    report = replay(requests, allocator, settings)
    assert report.completed + report.cancelled == report.requests
    assert report.cancelled == pytest.approx(150, abs=40)
    assert report.output_tokens < sum(r.output_tokens for r in requests)


def test_a_cancelled_request_leaves_anywhere_in_its_output() -> None:
    """On average in the middle, and never before its first token."""
    settings = ReplaySettings(slots=8192, max_model_len=1024, cancel_rate=1.0)
    report = replay([TraceRequest(0.0, 100, 200)] * 400, FIXED, settings)
    assert report.cancelled == 400
    assert report.output_tokens == pytest.approx(400 * 100, rel=0.1)


def test_cancellations_follow_the_seed() -> None:
    """The same seed, the same cancellations; another seed, others."""
    settings = [
        ReplaySettings(slots=8192, max_model_len=1024, cancel_rate=0.5, seed=seed)
        for seed in (1, 1, 2)
    ]
    tokens = [replay(chat(100), FIXED, each).output_tokens for each in settings]
    assert tokens[0] == tokens[1] != tokens[2]


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"max_batch_tokens": 0}, "max_batch_tokens must be at least 1, got 0"),
        ({"cancel_rate": 1.5}, "cancel_rate must be between 0 and 1, got 1.5"),
    ],
)
def test_refuses_settings_that_cannot_work(options: dict[str, Any], sentence: str) -> None:
    """Before anything runs, with the number."""
    with pytest.raises(ConfigError, match=sentence):
        ReplaySettings(**options)


@pytest.mark.parametrize("numbers", ["1,2", "a,b,c", "0,1,1", "-1,0,0", "nan,0,0", "1,-1,0"])
def test_refuses_a_step_time_that_is_none(numbers: str) -> None:
    """Three numbers, the first above zero, none below."""
    with pytest.raises(ConfigError, match="step"):
        StepTime.parse(numbers)


def test_a_pool_smaller_than_a_block_is_refused() -> None:
    """No block, no pool."""
    with pytest.raises(ConfigError, match="8 slots hold no block of 16 tokens"):
        Replay([TraceRequest(0.0, 1, 1)], FIXED, ReplaySettings(slots=8))


def test_a_token_budget_spreads_a_prompt_over_steps() -> None:
    """As in production: a prompt of 100 tokens at 40 a step takes three."""
    settings = ReplaySettings(slots=1024, max_model_len=512, max_batch_tokens=40)
    report = replay([TraceRequest(0.0, 100, 1)], FIXED, settings)
    assert report.steps == 3
    assert report.output_tokens == 1


def test_geometry_is_what_the_settings_say() -> None:
    """Slots are rounded down to whole blocks."""
    assert ReplaySettings(slots=100).geometry(16) == PoolGeometry(6, 16, 2048)
