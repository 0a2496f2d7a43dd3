"""`kvpage simulate`: what allocators do with a trace."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvpage.cli import options
from kvpage.errors import ConfigError
from kvpage.simulator import (
    MOONCAKE_BLOCK,
    WORKLOADS,
    DrawnTrace,
    Replay,
    ReplaySettings,
    Report,
    StepTime,
    TraceFile,
    check_plot,
    plot,
    write_csv,
    write_json,
)

STANDARD_OUTPUT = Path("-")
WIDTH_OF_FILES = 160
DEFAULT_ALLOCATORS = ("fixed", "dynamic:block_size=8", "contiguous")


def simulate(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE...", help="CSV or JSON lines, plain or .gz."),
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help=f"Draw requests: {', '.join(WORKLOADS)}.")
    ] = None,
    allocator: Annotated[
        list[str] | None,
        typer.Option(help="name or name:key=value,...; block_size is the pool's. [default: three]"),
    ] = None,
    slots: Annotated[int, typer.Option(help="Token slots in the pool.")] = 100_000,
    max_model_len: Annotated[
        int, typer.Option(help="Longest request in tokens; longer ones are left out.")
    ] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 4096,
    max_batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens per step. [default: as many as slots]")
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="Share prompts by the trace's hash ids.")
    ] = False,
    arrivals: Annotated[
        bool, typer.Option("--arrivals", help="Requests come when the trace says.")
    ] = False,
    step_time: Annotated[
        str | None,
        typer.Option(help="Seconds of a step: base,per_token,per_kv_token. Implies --arrivals."),
    ] = None,
    cancel_rate: Annotated[float, typer.Option(help="Share of requests that are cancelled.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of workloads and cancellations.")] = 0,
    requests: Annotated[int, typer.Option(help="Requests to draw for a workload.")] = 10_000,
    hash_block_size: options.HashBlockSize = MOONCAKE_BLOCK,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write reports and series; - is stdout.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write one line a report; - is stdout.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw utilisation over time: .png or .svg.")
    ] = None,
) -> None:
    """Replay traces through scheduler, block manager and allocators, without a model."""
    settings = ReplaySettings(
        slots=slots,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=prefix_cache,
        step_time=_step_time(step_time, arrivals=arrivals),
        cancel_rate=cancel_rate,
        seed=seed,
    )
    if plot_file is not None:
        check_plot(plot_file)
    sources: list[TraceFile | DrawnTrace] = [
        *(TraceFile(path, hash_block_size=hash_block_size) for path in traces or ()),
        *(DrawnTrace(name, num_requests=requests, seed=seed) for name in workload or ()),
    ]
    if not sources:
        raise ConfigError("nothing to replay: give a TRACE or a --workload")
    reports = _replay_all(sources, allocator or DEFAULT_ALLOCATORS, settings)
    if STANDARD_OUTPUT not in (json_file, csv_file):
        _show(reports)
    if json_file is not None:
        with _opened(json_file) as out:
            write_json(reports, out)
    if csv_file is not None:
        with _opened(csv_file) as out:
            write_csv(reports, out)
    if plot_file is not None:
        plot(reports, plot_file)


def _step_time(numbers: str | None, *, arrivals: bool) -> StepTime | None:
    if numbers is not None:
        return StepTime.parse(numbers)
    return StepTime() if arrivals else None


def _replay_all(
    sources: Sequence[TraceFile | DrawnTrace], allocators: Sequence[str], settings: ReplaySettings
) -> list[Report]:
    """Every trace under every allocator, with a bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        return [
            _replay_one(progress, source, allocator, settings)
            for source in sources
            for allocator in allocators
        ]


def _replay_one(
    progress: Progress, source: TraceFile | DrawnTrace, allocator: str, settings: ReplaySettings
) -> Report:
    task = progress.add_task(f"{source.name} · {allocator}", total=1.0)
    replay = Replay(
        source, allocator, settings, name=source.name, hash_block_size=source.hash_block_size
    )
    report = replay.run(lambda: progress.update(task, completed=source.share_read))
    progress.update(task, completed=1.0)
    return report


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """`path` for writing, or standard output.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path == STANDARD_OUTPUT:
        yield sys.stdout
        return
    try:
        out = path.open("w", newline="")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    with out:
        yield out


# -- the table ---------------------------------------------------------------------------------


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _call_time(report: Report) -> str:
    calls = sum(report.allocator_calls.values())
    total_ns = sum(
        nanoseconds * report.allocator_calls[name]
        for name, nanoseconds in report.allocator_ns.items()
    )
    return f"{total_ns / calls / 1000:.2f} µs" if calls else "–"


_ROWS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("utilisation", lambda r: _percent(r.utilisation)),
    ("internal waste", lambda r: "–" if r.internal_waste is None else f"{r.internal_waste:.2%}"),
    ("external waste", lambda r: _percent(r.external_waste)),
    ("requests running", lambda r: _number(r.running)),
    ("tokens per step", lambda r: _number(r.tokens_per_step)),
    ("queue wait, mean", lambda r: _seconds(r.queue_wait_mean_s)),
    ("queue wait, 99 %", lambda r: _seconds(r.queue_wait_p99_s)),
    ("preemptions", lambda r: f"{r.preemptions:,}"),
    ("recomputed tokens", lambda r: _percent(r.recomputed_share)),
    ("table entries per request", lambda r: _number(r.entries_per_request)),
    ("extents per request", lambda r: _number(r.extents_per_request)),
    ("copied per output token", lambda r: f"{r.copied_tokens / max(1, r.output_tokens):.2f}"),
    ("prompt tokens from cache", lambda r: _percent(r.prefix_hit_rate)),
    ("allocator, per call", _call_time),
    ("completed", lambda r: f"{r.completed:,}"),
    ("failed", lambda r: f"{r.failed:,}"),
    ("cancelled", lambda r: f"{r.cancelled:,}"),
)


def _show(reports: Sequence[Report]) -> None:
    """One table a trace, one column an allocator."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_OF_FILES)
    for trace in dict.fromkeys(report.trace for report in reports):
        shown = [report for report in reports if report.trace == trace]
        console.print(trace, style="bold", highlight=False)
        table = Table("", *(report.label for report in shown), box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for name, cell in _ROWS:
            table.add_row(name, *(cell(report) for report in shown))
        console.print(table)
        console.print(_note(shown[0], shown), style="dim", soft_wrap=True, highlight=False)
        console.print()


def _note(first: Report, reports: Sequence[Report]) -> str:
    """What was replayed, and why a figure may be missing."""
    note = f"{first.requests:,} requests, {first.skipped:,} longer than the model left out"
    unfilled = [report.label for report in reports if report.utilisation is None]
    if unfilled:
        note += (
            f"; the trace is too short to measure a full pool with {', '.join(unfilled)}: "
            f"take fewer slots"
        )
    return note
