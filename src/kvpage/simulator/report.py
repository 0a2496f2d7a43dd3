"""What a replay reports, and as which text."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import attrs

from kvpage.simulator.instruments import Sample


@attrs.frozen(kw_only=True)
class Report:
    """The outcome of one trace under one allocator.

    Shares are between 0 and 1. Means are over the measured window and weighted by time (by steps
    where there is no clock); None where the window is empty.

    Attributes:
        trace: the trace's name.
        allocator: the strategy with its options.
        block_size: tokens per block.
        slots: token slots in the pool.
        requests: requests of the trace that were replayed.
        skipped: requests that were left out, being longer than `max_model_len`.
        completed: requests that generated all their tokens.
        failed: requests that ended with an error, such as one that outgrew the pool.
        cancelled: requests that were cancelled.
        steps: steps in all.
        measured_steps: steps in the measured window.
        simulated_s: what the simulated clock shows at the end; None without arrivals.
        output_tokens: tokens generated.
        utilisation: slots with a live token, of all slots. Of the tokens that a step writes, half
            count, since it writes them while it runs.
        internal_waste: allocated slots without a token once the step has run, of allocated slots.
        external_waste: free slots that cannot serve the head of the queue, of all slots.
        running: mean sequences in the batch.
        tokens_per_step: mean tokens generated in a step.
        queue_wait_mean_s: from arrival to first admission; None without arrivals.
        queue_wait_p99_s: the same, 99th percentile.
        preemptions: how often a sequence lost its blocks.
        recomputed_tokens: tokens computed again because of that.
        recomputed_share: of all computed tokens.
        entries_per_request: block table entries of a request at its end.
        extents_per_request: runs of adjacent blocks in these entries.
        grants_per_request: extents granted, divided by admissions.
        copied_tokens: slots copied because the strategy moved blocks.
        prefix_hit_rate: prompt tokens that the prefix cache gave.
        allocator_ns: mean wall time of a call, by method, in nanoseconds.
        allocator_calls: calls, by method.
        wall_s: wall time of the replay.
        series: points `(time, sample)` over the whole replay; time in seconds, or in steps.
    """

    trace: str
    allocator: str
    block_size: int
    slots: int
    requests: int
    skipped: int
    completed: int
    failed: int
    cancelled: int
    steps: int
    measured_steps: int
    simulated_s: float | None
    output_tokens: int
    utilisation: float | None
    internal_waste: float | None
    external_waste: float | None
    running: float | None
    tokens_per_step: float | None
    queue_wait_mean_s: float | None
    queue_wait_p99_s: float | None
    preemptions: int
    recomputed_tokens: int
    recomputed_share: float
    entries_per_request: float | None
    extents_per_request: float | None
    grants_per_request: float | None
    copied_tokens: int
    prefix_hit_rate: float
    allocator_ns: Mapping[str, float]
    allocator_calls: Mapping[str, int]
    wall_s: float
    series: Sequence[tuple[float, Sample]] = attrs.field(repr=False)

    @property
    def label(self) -> str:
        """The allocator with the block size: `"fixed/16"`."""
        return f"{self.allocator}/{self.block_size}"

    def figures(self) -> dict[str, Any]:
        """Every attribute but the series, with mappings spread out as `allocator_ns_admit`."""
        flat: dict[str, Any] = {}
        for name, value in attrs.asdict(self, recurse=False).items():
            if isinstance(value, Mapping):
                flat |= {f"{name}_{key}": entry for key, entry in value.items()}
            elif name != "series":
                flat[name] = value
        return flat


def write_json(reports: Iterable[Report], out: IO[str]) -> None:
    """A JSON list with one object a report, the series as `{"time": ..., "live_slots": ...}`."""
    documents = [
        report.figures()
        | {"series": [{"time": time} | sample._asdict() for time, sample in report.series]}
        for report in reports
    ]
    json.dump(documents, out, indent=1)
    out.write("\n")


def write_csv(reports: Sequence[Report], out: IO[str]) -> None:
    """A header and one line a report. A figure that a report does not have is an empty field."""
    rows = [report.figures() for report in reports]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
