"""Fit of the simulator's named workloads to the public traces they stand for.

python benchmarks/workload_fit.py traces/            # the table of the documentation
python benchmarks/workload_fit.py traces/ --tables   # the quantiles that workloads.py holds
"""

import csv
import gzip
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from kvpage.simulator.workloads import PERCENTILES, WORKLOADS, Requests, Sessions

Columns = dict[str, npt.NDArray[np.float64]]

SHOWN = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
DRAWN = 20_000


def main(
    traces: Annotated[Path, typer.Argument(help="Directory with the traces, as *.csv.gz.")],
    tables: Annotated[bool, typer.Option(help="Print quantiles instead of the fit.")] = False,
) -> None:
    for name, workload in WORKLOADS.items():
        measured = observed(workload, traces)
        if tables:
            print(f"# {name}: {workload.source}")
            for field, values in measured.items():
                print(f"{field}: {quantiles(values)}")
        else:
            print(fit(name, measured, workload))


def observed(workload: Requests | Sessions, traces: Path) -> Columns:
    """What the workload is fitted to, by the name of the workload's attribute."""
    with gzip.open(traces / f"{workload.source}.csv.gz", "rt") as lines:
        rows = list(csv.DictReader(lines))
    if isinstance(workload, Sessions):
        return observed_sessions(rows)
    arrival = np.array([float(row["arrival_s"]) for row in rows])
    return {
        "prompt": np.array([float(row["prompt_tokens"]) for row in rows]),
        "output": np.array([float(row["output_tokens"]) for row in rows]),
        "gap_s": np.diff(arrival),
    }


def observed_sessions(rows: list[dict[str, str]]) -> Columns:
    """Calls of a session in order of time. A prompt that shrank (compaction) grew by nothing."""
    sessions = defaultdict(list)
    for row in rows:
        call = (float(row["arrival_s"]), float(row["prompt_tokens"]), float(row["output_tokens"]))
        sessions[row["session"]].append(call)
    calls = [np.array(session) for session in sessions.values()]
    return {
        "calls": np.array([float(len(session)) for session in calls]),
        "first_prompt": np.array([session[0, 1] for session in calls]),
        "growth": np.concatenate([np.diff(session[:, 1]).clip(min=0) for session in calls]),
        "output": np.concatenate([session[:, 2] for session in calls]),
        "pause_s": np.concatenate([np.diff(session[:, 0]) for session in calls]),
    }


def quantiles(values: npt.NDArray[np.float64]) -> str:
    return " ".join(f"{value:.3g}" for value in np.percentile(values, PERCENTILES))


def fit(name: str, measured: Columns, workload: Requests | Sessions) -> str:
    """Markdown rows: the trace's quantiles and mean, and those of `DRAWN` numbers drawn."""
    random = np.random.default_rng(0)
    lines = []
    for field, trace in measured.items():
        drawn = getattr(workload, field).draw(random, DRAWN)
        pairs = [(np.quantile(trace, q), np.quantile(drawn, q)) for q in SHOWN]
        pairs.append((trace.mean(), drawn.mean()))
        cells = " | ".join(f"{short(a)} / {short(b)}" for a, b in pairs)
        lines.append(f"| {name} | {field} | {cells} |")
    return "\n".join(lines)


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    typer.run(main)
