"""The figures of a candidate, one after another, as table and page show them."""

from collections.abc import Callable
from typing import Literal

import attrs

from kvpage.comparison.records import CandidateResult, CandidateRun, Figure

MISSING = "–"


@attrs.frozen
class TableFigure:
    """One column or row of a table.

    Attributes:
        name: short.
        meaning: one sentence.
        read: the figure of a run.
        show: as text, unit included.
        better: which end is the better one; None where neither is.
    """

    name: str
    meaning: str
    read: Figure
    show: Callable[[float], str]
    better: Literal["more", "less"] | None = None

    def median(self, result: CandidateResult) -> str:
        """The median as text."""
        value = result.median(self.read)
        return MISSING if value is None else self.show(value)

    def spread(self, result: CandidateResult) -> str:
        """The smallest and the largest as text; empty with less than two runs."""
        values = result.values(self.read)
        return f"{self.show(min(values))} – {self.show(max(values))}" if len(values) > 1 else ""


def rate(value: float) -> str:
    """Tokens a second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def share(value: float) -> str:
    """A share in per cent."""
    return f"{value:.1%}"


def seconds(value: float) -> str:
    """Seconds in the unit that leaves three digits."""
    for limit, scale, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{value * scale:.3g} {unit}"
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


def size(value: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def count(value: float) -> str:
    """A number of things."""
    return f"{value:,.0f}"


def number(value: float) -> str:
    """A mean of numbers of things."""
    return f"{value:,.1f}"


def _first_token(quantile: float) -> Figure:
    return lambda run: run.first_token.quantile(quantile)


def _inter_token(quantile: float) -> Figure:
    return lambda run: run.inter_token.quantile(quantile)


def throughput(run: CandidateRun) -> float:
    """Output tokens a second."""
    return run.throughput


FIGURES = (
    TableFigure("tokens/s", "Output tokens a second, end to end.", throughput, rate, "more"),
    TableFigure("TTFT p50", "Time to first token, median.", _first_token(0.5), seconds, "less"),
    TableFigure("TTFT p95", "Time to first token, 95 %.", _first_token(0.95), seconds, "less"),
    TableFigure("TTFT p99", "Time to first token, 99 %.", _first_token(0.99), seconds, "less"),
    TableFigure("ITL p50", "Between two tokens, median.", _inter_token(0.5), seconds, "less"),
    TableFigure("ITL p95", "Between two tokens, 95 %.", _inter_token(0.95), seconds, "less"),
    TableFigure("ITL p99", "Between two tokens, 99 %.", _inter_token(0.99), seconds, "less"),
    TableFigure("running", "Sequences in the batch, mean.", lambda r: r.running, number, "more"),
    TableFigure(
        "utilisation",
        "Slots with a live token, of all slots.",
        lambda r: r.utilisation,
        share,
        "more",
    ),
    TableFigure(
        "internal waste",
        "Allocated slots without a token, of allocated slots.",
        lambda r: r.internal_waste,
        share,
        "less",
    ),
    TableFigure(
        "external waste",
        "Free slots that cannot serve the head of the queue, of all slots.",
        lambda r: r.external_waste,
        share,
        "less",
    ),
    TableFigure(
        "preemptions", "Times a sequence lost its blocks.", lambda r: r.preemptions, count, "less"
    ),
    TableFigure(
        "recomputed", "Tokens computed again.", lambda r: r.recomputed_tokens, count, "less"
    ),
    TableFigure("peak KV", "K and V of blocks in use, at most.", lambda r: r.peak_kv_bytes, size),
    TableFigure("peak process", "Resident memory, at most.", lambda r: r.peak_process_bytes, size),
    TableFigure(
        "table", "Block table entries in use, at most.", lambda r: r.peak_table_bytes, size, "less"
    ),
    TableFigure("model/step", "Mean seconds in the model.", lambda r: r.step_s, seconds),
    TableFigure(
        "host/step", "Mean seconds of a step outside it.", lambda r: r.host_s, seconds, "less"
    ),
    TableFigure("steps", "Steps executed.", lambda r: r.steps, count),
)
