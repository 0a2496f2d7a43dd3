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
from kvpage.blocks import PoolGeometry, SequenceId
from kvpage.config import DEFAULT_BLOCK_SIZE
from kvpage.errors import ConfigError, TraceError
from kvpage.plan import StepPlan, StepResult
from kvpage.plugins import AllocatorSpec, build_allocator
from kvpage.scheduler import Schedule, Scheduler
from kvpage.simulator.feed import FedSequence, Feed
from kvpage.simulator.instruments import Sample, Series, Waits, metered
from kvpage.simulator.report import Report
from kvpage.simulator.traces import MOONCAKE_BLOCK, TraceRequest

QUEUE_DEPTH = 64
"""Waiting sequences that a saturated replay keeps ready; only the ramp-up admits more a step."""

STEPS_PER_TICK = 256


def _at_least_one(_instance: object, attribute: "attrs.Attribute[int]", value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{attribute.name} must be at least 1, got {value}")


def _share(_instance: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{attribute.name} must be between 0 and 1, got {value}")


@attrs.frozen
class StepTime:
    """How long a step takes: `base + per_token * tokens + per_kv_token * tokens in the cache`.

    The defaults are arithmetic for 8 billion parameters in bf16 with 128 KiB of K and V a token on
    one H100: weights read at 3.3 TB/s and a millisecond around them; 2 operations a parameter at
    half of 990 TFLOP/s; K and V read at 80 % of 3.3 TB/s.

    Attributes:
        base_s: seconds of any step.
        per_token_s: seconds for each token that is computed.
        per_kv_token_s: seconds for each token that is attended to.
    """

    base_s: float = 6e-3
    per_token_s: float = 3.2e-5
    per_kv_token_s: float = 5e-8

    @classmethod
    def parse(cls, numbers: str) -> "StepTime":
        """Read the three numbers, separated by commas.

        Raises:
            ConfigError: they are not three numbers, or no such times.
        """
        try:
            base_s, per_token_s, per_kv_token_s = map(float, numbers.split(","))
        except ValueError as error:
            raise ConfigError(
                f"a step time is three numbers of seconds, base,per_token,per_kv_token, "
                f"got {numbers!r}"
            ) from error
        return cls(base_s, per_token_s, per_kv_token_s)

    def __attrs_post_init__(self) -> None:
        if not self.base_s > 0 or not min(self.per_token_s, self.per_kv_token_s) >= 0:
            raise ConfigError(
                f"a step takes time above 0 s, got {self.base_s:g}, {self.per_token_s:g}, "
                f"{self.per_kv_token_s:g}"
            )

    def of(self, plan: StepPlan) -> float:
        """Seconds that `plan` takes."""
        return (
            self.base_s
            + self.per_token_s * len(plan.token_ids)
            + self.per_kv_token_s * int(plan.kv_lens.sum())
        )


@attrs.frozen(kw_only=True)
class ReplaySettings:
    """The pool and the batch, and how time passes.

    Attributes:
        slots: token slots in the pool.
        max_model_len: longest sequence in tokens; longer requests are left out and counted.
        max_num_seqs: sequences that run at once.
        max_batch_tokens: tokens that one step computes at most; None lets a prompt of any length
            through in one step.
        prefix_cache: share the prompts' blocks by the trace's hash ids.
        step_time: None replays saturated, without a clock.
        cancel_rate: share of the requests that are cancelled, each after a random part of its
            output.
        seed: of the cancellations.
    """

    slots: int = attrs.field(default=100_000, validator=_at_least_one)
    max_model_len: int = attrs.field(default=2048, validator=_at_least_one)
    max_num_seqs: int = attrs.field(default=4096, validator=_at_least_one)
    max_batch_tokens: int | None = attrs.field(default=None, validator=_at_least_one)
    prefix_cache: bool = False
    step_time: StepTime | None = None
    cancel_rate: float = attrs.field(default=0.0, validator=_share)
    seed: int = 0

    def geometry(self, block_size: int) -> PoolGeometry:
        """The pool in blocks of `block_size` tokens.

        Raises:
            ConfigError: not even one block fits.
        """
        if self.slots < block_size:
            raise ConfigError(f"{self.slots} slots hold no block of {block_size} tokens")
        return PoolGeometry(self.slots // block_size, block_size, self.max_model_len)


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
        self._scheduler = Scheduler(
            self._blocks,
            self._batch,
            max_batch_tokens=settings.max_batch_tokens or geometry.num_slots,
        )
        self._feed = Feed(
            requests,
            geometry,
            hash_block_size=hash_block_size,
            cancel_rate=settings.cancel_rate,
            seed=settings.seed,
        )
        self._live: dict[SequenceId, FedSequence] = {}
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
        self._note_failures(schedule)
        self._note_admissions()
        if schedule.plan is None:
            return self._skip_to_next_arrival()
        step_time = self._settings.step_time
        duration = step_time.of(schedule.plan) if step_time else 1.0
        self._measure(schedule.plan, duration)
        self._now_s += duration
        self._compute(schedule.plan)
        if self._settings.cancel_rate:
            self._cancel_due()
        return True

    def _fill_queue(self) -> None:
        while self._next_is_due():
            fed = self._feed.take()
            assert fed is not None
            self._live[fed.sequence.id] = fed
            self._scheduler.add(fed.sequence)

    def _next_is_due(self) -> bool:
        arrival_s = self._feed.next_arrival_s
        if arrival_s is None:
            return False
        if self._settings.step_time is None:
            return self._scheduler.num_waiting < QUEUE_DEPTH
        return arrival_s <= self._now_s

    def _skip_to_next_arrival(self) -> bool:
        """Nothing runs. The scheduler fails what cannot run alone, so nothing waits either."""
        arrival_s = self._feed.next_arrival_s
        if arrival_s is None:
            return False
        self._now_s = max(self._now_s, arrival_s)
        return True

    def _note_failures(self, schedule: Schedule) -> None:
        for sequence, _ in schedule.failures:
            self._counts.failed += 1
            del self._live[sequence.id]

    def _note_admissions(self) -> None:
        for seq in self._allocator.admitted:
            fed = self._live.get(seq)
            if fed is None:  # its grant was refused by the block manager
                continue
            self._cancel_at[fed.sequence.row] = fed.cancel_at_tokens
            if fed.sequence.num_preemptions == 0 and self._settings.step_time is not None:
                self._waits.add(self._now_s - fed.arrival_s)
        self._allocator.admitted.clear()

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
        sequence = self._batch.sequences[row]
        assert sequence is not None
        num_blocks = self._blocks.geometry.blocks_for(int(self._batch.num_tokens[row]))
        steps = np.diff(self._blocks.tables[row, :num_blocks])
        self._counts.entries += num_blocks
        self._counts.extents += 1 + int(np.count_nonzero(steps != 1))
        self._counts.completed += 1
        del self._live[sequence.id]

    def _cancel_due(self) -> None:
        due = (self._batch.num_tokens > 0) & (self._batch.num_tokens >= self._cancel_at)
        for row in np.flatnonzero(due).tolist():
            sequence = self._batch.sequences[row]
            assert sequence is not None
            self._scheduler.cancel(sequence)
            self._counts.cancelled += 1
            del self._live[sequence.id]

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
