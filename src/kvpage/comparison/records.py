"""What a comparison found, as values."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import attrs
import numpy as np

from kvpage.comparison.settings import Candidate, ComparisonSettings
from kvpage.comparison.workload import Workload
from kvpage.simulator.instruments import Sample

State = Literal["running", "complete", "out of time", "interrupted"]


def _sorted(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted(values))


@attrs.frozen
class Distribution:
    """Observed seconds.

    Attributes:
        seconds: all of them, sorted.
    """

    seconds: tuple[float, ...] = attrs.field(converter=_sorted, repr=False)

    def quantile(self, share: float) -> float | None:
        """Seconds that `share` of the observations do not exceed; None without observations."""
        if not self.seconds:
            return None
        return float(np.quantile(self.seconds, share))


@attrs.frozen(eq=False)
class MemoryFilm:
    """Who held which block over time: one column for each moment.

    Attributes:
        times: seconds since the run began, one for each column.
        columns: one byte for each block shown: 0 free, 1 cached, then `2 + 2 * (owner % 8)` where
            the block holds tokens and one more where it is reserved only.
        stride: every so many-th block is shown.
    """

    times: tuple[float, ...]
    columns: tuple[bytes, ...] = attrs.field(repr=False)
    stride: int


@attrs.frozen(kw_only=True, eq=False)
class CandidateRun:
    """One pass of the requests through one candidate. Shares are between 0 and 1.

    Means of the pool are over the time in which requests waited for room; where none ever did, over
    the whole run.

    Attributes:
        duration_s: from the first submission to the last token.
        output_tokens: tokens generated.
        first_token: from submission to the first token, one for each request, as its reader saw it.
        inter_token: between two tokens of a request, as its reader saw it.
        utilisation: slots that hold a live token after a step, of all slots.
        internal_waste: allocated slots that hold no token, of allocated slots.
        external_waste: free slots that cannot serve the head of the queue, of all slots.
        running: mean sequences in the batch.
        steps: steps executed.
        step_s: mean seconds of a step in the model.
        host_s: mean seconds of a step outside the model: deciding, delivering.
        preemptions: how often a sequence lost its blocks.
        recomputed_tokens: tokens computed again because of that.
        cached_prompt_tokens: prompt tokens that the prefix cache gave.
        peak_kv_bytes: K and V of the blocks in use, at most.
        peak_table_bytes: block table entries in use, at most, 4 bytes each.
        peak_process_bytes: resident memory of the whole process, at most.
        series: points `(seconds, sample)` over the whole run.
        film: who held which block.
    """

    duration_s: float
    output_tokens: int
    first_token: Distribution
    inter_token: Distribution
    utilisation: float
    internal_waste: float
    external_waste: float
    running: float
    steps: int
    step_s: float
    host_s: float
    preemptions: int
    recomputed_tokens: int
    cached_prompt_tokens: int
    peak_kv_bytes: int
    peak_table_bytes: int
    peak_process_bytes: int
    series: tuple[tuple[float, Sample], ...] = attrs.field(repr=False)
    film: MemoryFilm = attrs.field(repr=False)

    @property
    def throughput(self) -> float:
        """Output tokens a second, end to end."""
        return self.output_tokens / self.duration_s


Figure = Callable[[CandidateRun], float | None]
"""Reads one number off a run."""


@attrs.frozen(eq=False)
class CandidateResult:
    """One candidate and its runs so far.

    Attributes:
        candidate: strategy and block size.
        num_blocks: blocks in its pool.
        runs: one for each round.
        failure: what ended it, in one sentence; None if nothing did.
    """

    candidate: Candidate
    num_blocks: int
    runs: tuple[CandidateRun, ...] = ()
    failure: str | None = None

    @property
    def label(self) -> str:
        """The strategy with the block size: `"fixed/16"`."""
        return self.candidate.label

    def values(self, figure: Figure) -> tuple[float, ...]:
        """The figure of each run that has it."""
        found = (figure(run) for run in self.runs)
        return tuple(value for value in found if value is not None)

    def median(self, figure: Figure) -> float | None:
        """The middle run's figure; None without runs."""
        values = self.values(figure)
        return statistics.median(values) if values else None

    def spread(self, figure: Figure) -> float | None:
        """The largest figure less the smallest; None with less than two runs."""
        values = self.values(figure)
        return max(values) - min(values) if len(values) > 1 else None

    @property
    def throughput(self) -> float | None:
        """The median of output tokens a second; None without runs."""
        return self.median(lambda run: run.throughput)

    @property
    def middle_run(self) -> CandidateRun | None:
        """The run of median throughput (of two, the slower): what the pictures show."""
        ranked = sorted(self.runs, key=lambda run: run.throughput)
        return ranked[(len(ranked) - 1) // 2] if ranked else None


@attrs.frozen
class Machine:
    """What a comparison ran on.

    Attributes:
        processor: the CPU's name.
        cores: that this process may use.
        memory_bytes: in all.
        device: where the model computed: `"cpu"` or the GPU's name.
        system: kernel and architecture.
        versions: `(name, version)` of Python, kvpage and what computes.
    """

    processor: str
    cores: int
    memory_bytes: int
    device: str
    system: str
    versions: tuple[tuple[str, str], ...]


@attrs.frozen(kw_only=True, eq=False)
class Comparison:
    """Candidates, what was measured of them, and under which conditions.

    Attributes:
        model: its name.
        machine: what it ran on.
        settings: what was asked.
        workload: the requests.
        max_model_len: longest request, in tokens.
        slots: token slots in every candidate's pool.
        token_bytes: K and V of one token in all layers.
        results: one for each candidate, in the order asked.
        state: `"running"`, `"complete"`, `"out of time"` or `"interrupted"`.
        elapsed_s: since the comparison began, loading the model included.
    """

    model: str
    machine: Machine
    settings: ComparisonSettings
    workload: Workload
    max_model_len: int
    slots: int
    token_bytes: int
    results: tuple[CandidateResult, ...]
    state: State
    elapsed_s: float

    @property
    def measured(self) -> tuple[CandidateResult, ...]:
        """The results that have runs and did not fail."""
        return tuple(r for r in self.results if r.runs and r.failure is None)

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies' names, each once, in the order asked."""
        return tuple(dict.fromkeys(r.candidate.strategy for r in self.results))

    def fastest_of(self, strategy: str) -> CandidateResult | None:
        """The measured candidate of `strategy` with the highest median throughput."""
        return fastest([r for r in self.measured if r.candidate.strategy == strategy])


def fastest(results: Sequence[CandidateResult]) -> CandidateResult | None:
    """The one with the highest median throughput; None of none."""
    return max(results, key=lambda result: result.throughput or 0.0, default=None)
