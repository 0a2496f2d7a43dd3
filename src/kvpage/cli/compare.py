"""`kvpage compare`: strategies and block sizes, end to end, on a real model."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import attrs
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from kvpage import comparison as compared
from kvpage.cli import options
from kvpage.cli.files import check_writable, replace
from kvpage.comparison.figures import FIGURES
from kvpage.comparison.records import CandidateResult, Comparison
from kvpage.simulator import MOONCAKE_BLOCK

DEFAULT_REPORT = Path("kvpage-compare.html")
DEFAULT_SECONDS = 270.0
WIDTH_OF_FILES = 200
INTERRUPTED, FAILED = 130, 2
"""Exit codes."""


def compare(
    trace: options.Trace = None,
    workload: options.Workload = None,
    hash_block_size: options.HashBlockSize = MOONCAKE_BLOCK,
    model: options.Model = None,
    allocator: options.Allocators = None,
    block_size: options.BlockSizes = None,
    requests: Annotated[
        int | None,
        typer.Option(help="How many requests of the workload. [default: as many as fit]"),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Multiplies lengths. [default: mean is a quarter of max-model-len]"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second. [default: all at once]")
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="Like 64MiB or '4096 tokens'. [default: a quarter of all requests]"),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest request, in tokens. [default: 512]")
    ] = None,
    max_num_seqs: options.MaxNumSeqs = 64,
    max_batch_tokens: options.MaxBatchTokens = 512,
    prefix_cache: Annotated[bool, typer.Option(help="Share equal prefixes.")] = True,
    rounds: Annotated[int, typer.Option(help="How often each candidate is measured.")] = 3,
    seconds: Annotated[
        float, typer.Option(help="Begin no round that would end later.")
    ] = DEFAULT_SECONDS,
    seed: options.Seed = 0,
    dtype: options.Dtype = None,
    device: options.Device = None,
    html_file: Annotated[
        Path, typer.Option("--html", help="The report, one page with everything in it.")
    ] = DEFAULT_REPORT,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Every run, for other programs.")
    ] = None,
) -> None:
    """Send the same requests through several strategies and block sizes, and compare them."""
    settings: dict[str, Any] = {
        "workload": options.one_workload(trace, workload),
        "hash_block_size": hash_block_size,
        "requests": requests,
        "scale": scale,
        "rate": rate,
        "kv_memory": kv_memory,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_batch_tokens": max_batch_tokens,
        "prefix_cache": prefix_cache,
        "rounds": rounds,
        "seconds": seconds,
        "seed": seed,
    }
    if allocator:
        settings["allocators"] = allocator
    if block_size:
        settings["block_sizes"] = block_size
    asked = compared.ComparisonSettings(**settings)
    run = partial(compared.compare, model, dtype=dtype, device=device, **settings)
    raise typer.Exit(run_and_show(run, asked, html_file, json_file, shown_command(sys.argv)))


Run = Callable[..., Any]
"""`compare` with everything but its two callbacks."""


def run_and_show(
    run: Run,
    settings: compared.ComparisonSettings,
    html_file: Path,
    json_file: Path | None,
    command: str,
) -> int:
    """Compare with bars on standard error, write the files after each run, print the table.

    Args:
        run: compares; takes the callbacks `on_progress` and `on_result`.
        settings: what it will do.
        html_file: rewritten after each run.
        json_file: the same, if there is one.
        command: what the user typed, for the report.

    Returns:
        The exit code.

    Raises:
        ConfigError: a file cannot be written.
    """
    files = _Files(html_file, json_file, command)
    columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[now]}"))
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bars = _Bars(progress, [candidate.label for candidate in settings.candidates()])

            def on_result(so_far: Comparison) -> None:
                files.write(so_far)
                bars.note(so_far)

            found = anyio.run(partial(run, on_progress=bars.move, on_result=on_result))
    except KeyboardInterrupt:
        if files.latest is None:
            raise
        found = attrs.evolve(files.latest, state="interrupted")
    files.write(found)
    _show(found, html_file)
    if found.state == "interrupted":
        return INTERRUPTED
    return FAILED if any(result.failure for result in found.results) else 0


def shown_command(arguments: Sequence[str]) -> str:
    """What was typed, without the path of the program."""
    return shlex.join(["kvpage", *arguments[1:]])


class _Files:
    """Writes what is known, each time whole, so that a reader never finds half a file.

    Attributes:
        latest: what was written last.
    """

    def __init__(self, html_file: Path, json_file: Path | None, command: str) -> None:
        self.latest: Comparison | None = None
        self._html_file = html_file
        self._json_file = json_file
        self._command = command
        for path in (html_file, json_file):
            if path is not None:
                check_writable(path)

    def write(self, found: Comparison) -> None:
        self.latest = found
        replace(self._html_file, compared.html_report(found, command=self._command))
        if self._json_file is not None:
            document = compared.json_document(found, command=self._command)
            replace(self._json_file, json.dumps(document, indent=1) + "\n")


# -- while it runs -----------------------------------------------------------------------------


class _Bars:
    """A bar for each candidate, with what goes on in it."""

    def __init__(self, progress: Progress, labels: Sequence[str]) -> None:
        self._progress = progress
        self._tasks = {label: progress.add_task(label, total=1.0, now="") for label in labels}

    def move(self, now: compared.Progress) -> None:
        """Show how far a run is."""
        done = (now.round - 1 + now.finished / now.requests) / now.rounds
        self._progress.update(self._tasks[now.label], completed=done, now=_now(now))

    def note(self, so_far: Comparison) -> None:
        """Show what is finished, and which candidates have failed; why is said at the end."""
        for result in so_far.results:
            done = len(result.runs) / so_far.settings.rounds
            self._progress.update(self._tasks[result.label], completed=done)
            if result.failure is not None:
                self._progress.update(self._tasks[result.label], now="failed")


def _now(now: compared.Progress) -> str:
    stats = now.statistics
    speed = now.output_tokens / now.seconds if now.seconds else 0.0
    return (
        f"round {now.round}/{now.rounds} · {speed:5.0f} tokens/s · "
        f"{stats.utilisation:4.0%} utilised · {stats.num_waiting:3} waiting"
    )


# -- at the end --------------------------------------------------------------------------------


def _show(found: Comparison, html_file: Path) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_OF_FILES)
    for results in _by_width([r for r in found.results if r.runs], console.width):
        console.print(_table(results))
        console.print()
    for sentence in compared.verdict(found).sentences:
        console.print(sentence, style="bold", highlight=False)
    if found.state != "complete":
        runs = sum(len(result.runs) for result in found.results)
        whole = len(found.results) * found.settings.rounds
        console.print(f"{found.state}: {runs} of {whole} runs were measured", highlight=False)
    console.print(f"report: {html_file}", style="dim", highlight=False, soft_wrap=True)
    for result in found.results:
        if result.failure is not None:
            print(f"kvpage: {result.label} failed: {result.failure}", file=sys.stderr)


def _by_width(results: Sequence[CandidateResult], width: int) -> Iterator[list[CandidateResult]]:
    """As many results at a time as a terminal of this width takes side by side."""
    names = 2 + max(len(figure.name) for figure in FIGURES)
    column = 2 + max((len(result.label) for result in results), default=1)
    at_once = max(1, (width - names) // max(column, 11))
    for first in range(0, len(results), at_once):
        yield list(results[first : first + at_once])


def _table(results: Sequence[CandidateResult]) -> Table:
    """A row for each figure, medians; below the throughputs their smallest and largest."""
    table = Table("", *(result.label for result in results), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for figure in FIGURES:
        table.add_row(figure.name, *(figure.median(result) for result in results))
        if figure.name == "tokens/s":
            table.add_row("", *(figure.spread(result) for result in results), style="dim")
    return table
