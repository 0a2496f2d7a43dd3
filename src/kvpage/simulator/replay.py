"""A trace under an allocator: production's scheduler and block manager, no model.

*Saturated* (no step times given): the queue is never empty, so the pool is always as full as the
strategy can make it. Measured from when as many requests have ended as were running when the pool
first was full, to when the trace has no more requests for the queue; every step counts the same.

*With arrivals*: requests come when the trace says, a step takes as long as `StepTime` says, and
everything is measured, weighted by time.
"""

from collections.abc import Callable, Iterable
from time import perf_counter

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.allocators.base import AllocatorFactory
from kvpage.batch import RunningBatch
from kvpage.block_manager import BlockManager
from kvpage.config import DEFAULT_BLOCK_SIZE
from kvpage.errors import TraceError
from kvpage.plan import StepPlan, StepResult
from kvpage.plugins import AllocatorSpec, build_allocator
from kvpage.scheduler import Schedule, Scheduler
from kvpage.simulator.feed import Errand, Feed
from kvpage.simulator.instruments import Sample, Series, Waits, metered
from kvpage.simulator.report import Report
from kvpage.simulator.settings import ReplaySettings
from kvpage.simulator.traces import MOONCAKE_BLOCK
from kvpage.traffic import TraceRequest

QUEUE_DEPTH = 64
"""Waiting sequences that a saturated replay keeps ready; only the ramp-up admits more a step."""

STEPS_PER_TICK = 256


@attrs.define
class _Counts:
    """What a replay adds up."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    measured_steps: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    entries: int = 0
    extents: int = 0

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.cancelled


class Replay:
    """One trace under one allocator. Made for one `run`."""

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        allocator: str | AllocatorFactory | AllocatorSpec,
        settings: ReplaySettings,
        *,
        name: str = "trace",
        hash_block_size: int = MOONCAKE_BLOCK,
    ) -> None:
        """Build the pool and find the first request.

        Args:
            requests: read lazily, once.
            allocator: as for an engine: a name, `"name:key=value,..."`, or a factory.
            settings: the pool, the batch, the clock.
            name: the trace's name, for report and messages.
            hash_block_size: tokens that one hash id stands for.

        Raises:
            PluginError: no such allocator.
            ConfigError: the pool cannot be.
            TraceError: the trace cannot be read.
        """
        self._spec = AllocatorSpec.parse(allocator)
        self._settings = settings
        self._name = name
        geometry = settings.geometry(self._spec.block_size or DEFAULT_BLOCK_SIZE)
        self._allocator = metered(build_allocator(self._spec, geometry))
        self._blocks = BlockManager(
            geometry,
            self._allocator,
            max_num_seqs=settings.max_num_seqs,
            name=self._spec.name,
            prefix_cache=settings.prefix_cache,
        )
        self._batch = RunningBatch(settings.max_num_seqs, geometry.max_model_len)
        budget = settings.max_batch_tokens or geometry.num_slots
        self._scheduler = Scheduler(self._blocks, self._batch, max_batch_tokens=budget)
        self._feed = Feed(requests, geometry, settings, hash_block_size=hash_block_size)
        self._cancel_at: npt.NDArray[np.int64] = np.zeros(settings.max_num_seqs, np.int64)
        self._now_s = self._feed.next_arrival_s or 0.0
        self._ramp_ends_at: int | None = None
        self._counts = _Counts()
        self._waits = Waits()
        self._series = Series()
        self._window = Series(capacity=2)

    def run(self, tick: Callable[[], None] | None = None) -> Report:
        """Replay to the end of the trace and of its last request.

        Args:
            tick: called now and then.

        Raises:
            TraceError: a line of the trace makes no sense, or no request is short enough.
        """
        start = perf_counter()
        while self._step():
            if tick and self._counts.steps % STEPS_PER_TICK == 0:
                tick()
        if not self._feed.requests:
            raise TraceError(
                f"all {self._feed.skipped} requests of {self._name} are longer than "
                f"max_model_len, {self._settings.max_model_len} tokens"
            )
        return self._report(perf_counter() - start)

    # -- one step ------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Feed, schedule, measure, pretend to compute; False when everything is over."""
        self._fill_queue()
        schedule = self._scheduler.schedule()
        self._counts.failed += len(schedule.failures)
        self._note_admissions(schedule)
        if schedule.plan is None:
            return bool(schedule.failures) or self._skip_to_next_arrival()
        step_time = self._settings.step_time
        duration = step_time.of(schedule.plan) if step_time else 1.0
        self._measure(schedule.plan, duration)
        self._now_s += duration
        self._compute(schedule.plan)
        if self._settings.cancel_rate:
            self._cancel_due()
        return True

    def _fill_queue(self) -> None:
        while self._next_is_due() and (sequence := self._feed.take()):
            self._scheduler.add(sequence)

    def _next_is_due(self) -> bool:
        arrival_s = self._feed.next_arrival_s
        if self._settings.step_time is None:
            return self._scheduler.num_waiting < QUEUE_DEPTH
        return arrival_s is not None and arrival_s <= self._now_s

    def _skip_to_next_arrival(self) -> bool:
        """Nothing runs. The scheduler fails what cannot run alone, so nothing waits either."""
        arrival_s = self._feed.next_arrival_s
        if arrival_s is None:
            return False
        self._now_s = max(self._now_s, arrival_s)
        return True

    def _note_admissions(self, schedule: Schedule) -> None:
        for sequence in schedule.admitted:
            errand: Errand = sequence.request
            self._cancel_at[sequence.row] = errand.cancel_at_tokens
            if sequence.num_preemptions == 0 and self._settings.step_time is not None:
                self._waits.add(self._now_s - errand.arrival_s)

    def _compute(self, plan: StepPlan) -> None:
        """What a runner does, with token 0 for everybody; sequences end by their length."""
        batch, counts, rows = self._batch, self._counts, plan.sample_rows
        ending = rows[batch.num_tokens[rows] + 1 >= batch.max_total_tokens[rows]]
        for row in ending.tolist():
            self._note_end(row)
        self._scheduler.update(plan, StepResult(np.zeros(len(rows), np.int64)))
        counts.steps += 1
        counts.output_tokens += len(rows)
        counts.computed_tokens += len(plan.token_ids)

    def _note_end(self, row: int) -> None:
        """Look at a table as long as it gets; only the entries that hold tokens count."""
        num_blocks = self._blocks.geometry.blocks_for(int(self._batch.num_tokens[row]))
        steps = np.diff(self._blocks.tables[row, :num_blocks])
        self._counts.entries += num_blocks
        self._counts.extents += 1 + int(np.count_nonzero(steps != 1))
        self._counts.completed += 1

    def _cancel_due(self) -> None:
        due = (self._batch.num_tokens > 0) & (self._batch.num_tokens >= self._cancel_at)
        for row in np.flatnonzero(due).tolist():
            sequence = self._batch.sequences[row]
            assert sequence is not None
            self._scheduler.cancel(sequence)
            self._counts.cancelled += 1

    # -- measuring -----------------------------------------------------------------------------

    def _measure(self, plan: StepPlan, duration: float) -> None:
        sample = self._sample(plan)
        self._series.add(duration, self._now_s, sample)
        if self._in_window():
            self._counts.measured_steps += 1
            self._window.add(duration, self._now_s, sample)

    def _sample(self, plan: StepPlan) -> Sample:
        """The pool while the step runs.

        Only the last blocks of a sequence have room left, and these are never shared, so room
        minus tokens, summed over all rows (free rows have neither), is what is allocated in vain.
        """
        pool = self._blocks.statistics()
        new_tokens = len(plan.token_ids)
        tokens = int(self._batch.num_computed.sum()) + new_tokens
        unused = int(self._blocks.capacity_tokens.sum()) - tokens
        allocated = pool.used_blocks * pool.block_size
        return Sample(
            live_slots=allocated - unused - new_tokens / 2,
            allocated_slots=allocated,
            unused_slots=unused,
            blocked_slots=pool.free_blocks * pool.block_size if self._scheduler.blocked else 0,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            output_tokens=len(plan.sample_rows),
        )

    def _in_window(self) -> bool:
        if self._settings.step_time is not None:
            return True
        if self._ramp_ends_at is None:
            if self._scheduler.blocked or self._batch.next_row is None:
                self._ramp_ends_at = self._counts.ended + self._scheduler.num_running
            return False
        return self._counts.ended >= self._ramp_ends_at and self._scheduler.num_waiting > 0

    def _report(self, wall_s: float) -> Report:
        counts, scheduler, settings = self._counts, self._scheduler, self._settings
        geometry, costs = self._blocks.geometry, self._allocator.costs
        mean = self._window.mean()
        return Report(
            trace=self._name,
            allocator=str(self._spec),
            block_size=geometry.block_size,
            slots=geometry.num_slots,
            requests=self._feed.requests,
            skipped=self._feed.skipped,
            completed=counts.completed,
            failed=counts.failed,
            cancelled=counts.cancelled,
            steps=counts.steps,
            measured_steps=counts.measured_steps,
            simulated_s=None if settings.step_time is None else self._now_s,
            output_tokens=counts.output_tokens,
            utilisation=mean and mean.live_slots / geometry.num_slots,
            internal_waste=mean and mean.unused_slots / mean.allocated_slots,
            external_waste=mean and mean.blocked_slots / geometry.num_slots,
            running=mean and mean.running,
            tokens_per_step=mean and mean.output_tokens,
            queue_wait_mean_s=self._waits.mean(),
            queue_wait_p99_s=self._waits.quantile(0.99),
            preemptions=scheduler.num_preemptions,
            recomputed_tokens=scheduler.recomputed_tokens,
            recomputed_share=_ratio(scheduler.recomputed_tokens, counts.computed_tokens) or 0.0,
            entries_per_request=_ratio(counts.entries, counts.completed),
            extents_per_request=_ratio(counts.extents, counts.completed),
            grants_per_request=_ratio(self._allocator.granted_extents, costs["admit"].calls),
            copied_tokens=self._allocator.moved_blocks * geometry.block_size,
            prefix_hit_rate=_ratio(scheduler.cached_prompt_tokens, scheduler.prompt_tokens) or 0.0,
            allocator_ns={name: _ratio(c.total_ns, c.calls) or 0.0 for name, c in costs.items()},
            allocator_calls={name: c.calls for name, c in costs.items()},
            wall_s=wall_s,
            series=self._series.points(),
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
