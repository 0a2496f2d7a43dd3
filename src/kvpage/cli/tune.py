"""`kvpage tune`: which settings for this traffic, this model, this machine."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import attrs
import typer
from rich.console import Console
from rich.table import Table

from kvpage.cli import options
from kvpage.cli.files import check_writable, replace
from kvpage.simulator import MOONCAKE_BLOCK
from kvpage.tuning import Measured, Recommendation, SearchSpace, Simulated, TuningSettings
from kvpage.tuning import tune as tune_engine
from kvpage.tuning.candidates import memory_text

WIDTH_OF_FILES = 160
INTERRUPTED = 130

_AXIS_NAMES = {
    "allocator": "allocator",
    "block_size": "block size",
    "kv_bytes": "kv_memory",
    "max_num_seqs": "max_num_seqs",
    "max_batch_tokens": "max_batch_tokens",
}


def tune(
    trace: options.Trace = None,
    workload: options.Workload = None,
    hash_block_size: options.HashBlockSize = MOONCAKE_BLOCK,
    model: options.Model = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="At most, like 512MiB. [default: what an engine takes by itself]"),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest request, in tokens. [default: the model's]")
    ] = None,
    allocator: options.Allocators = None,
    block_size: options.BlockSizes = None,
    requests: Annotated[int, typer.Option(help="Requests of the workload to look at.")] = 20_000,
    scale: Annotated[float, typer.Option(help="Multiplies lengths.")] = 1.0,
    seconds: Annotated[
        float, typer.Option(help="For measuring the finalists end to end; 0 leaves it out.")
    ] = 300.0,
    rounds: Annotated[int, typer.Option(help="How often each finalist is measured.")] = 3,
    seed: options.Seed = 0,
    dtype: options.Dtype = None,
    device: options.Device = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Everything, for other programs.")
    ] = None,
) -> None:
    """Recommend an engine's settings for a workload on a model on this machine."""
    values: dict[str, Any] = {}
    if allocator:
        values["allocators"] = allocator
    if block_size:
        values["block_sizes"] = block_size
    settings: dict[str, Any] = {
        "workload": options.one_workload(trace, workload),
        "hash_block_size": hash_block_size,
        "requests": requests,
        "scale": scale,
        "kv_memory": kv_memory,
        "max_model_len": max_model_len,
        "space": SearchSpace(**values),
        "seconds": seconds,
        "rounds": rounds,
        "seed": seed,
    }
    TuningSettings(**settings)  # refuses what cannot work before anything is loaded
    run = partial(tune_engine, model, dtype=dtype, device=device, **settings)
    raise typer.Exit(run_and_show(run, json_file))


class _Results:
    """Keeps what is known, and writes it after each result.

    Attributes:
        latest: what was found last.
    """

    def __init__(self, json_file: Path | None) -> None:
        self.latest: Recommendation | None = None
        self._json_file = json_file
        if json_file is not None:
            check_writable(json_file)

    def keep(self, found: Recommendation) -> None:
        """Remember `found`, and write it if there is a file."""
        self.latest = found
        if self._json_file is not None:
            replace(self._json_file, json.dumps(found.as_dict(), indent=1) + "\n")


def run_and_show(run: Any, json_file: Path | None) -> int:
    """Tune with a status line on standard error, and print what was found; the exit code.

    Args:
        run: tunes; takes the callbacks `on_progress` and `on_result`.
        json_file: rewritten after each result.

    Raises:
        ConfigError: the file cannot be written.
    """
    results = _Results(json_file)
    interrupted = False
    try:
        with Console(stderr=True).status("starting") as status:
            callbacks = {"on_progress": status.update, "on_result": results.keep}
            results.keep(anyio.run(partial(run, **callbacks)))
    except KeyboardInterrupt:
        if results.latest is None:
            raise
        interrupted = True
        results.keep(attrs.evolve(results.latest, state="interrupted"))
    assert results.latest is not None, "a tuning gives a result"
    show(results.latest)
    return INTERRUPTED if interrupted else 0


def show(found: Recommendation) -> None:
    """Print the settings, the evidence, and what it would cost to be wrong."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_OF_FILES)
    console.print(
        f"{found.workload} on {found.model}: {found.requests:,} requests simulated, "
        f"{found.left_out:,} longer than {found.max_model_len} tokens left out",
        style="dim",
        highlight=False,
    )
    console.print()
    console.print(_evidence(found))
    console.print()
    for reason in found.reasons():
        console.print(reason, highlight=False)
    if found.state not in ("complete", "simulated"):
        console.print(f"{found.state}: not every round was measured", highlight=False)
    console.print()
    console.print("The cost of being wrong, in throughput (simulated)", style="bold")
    console.print(_losses(found))
    console.print()
    console.print("To use it", style="bold")
    console.print(found.call, highlight=False, soft_wrap=True, markup=False)
    for measured in found.measured:
        if measured.problem is not None:
            print(f"kvpage: {measured.candidate} failed: {measured.problem}", file=sys.stderr)


def _evidence(found: Recommendation) -> Table:
    """A row for each finalist."""
    table = Table(
        "",
        "settings",
        "simulated",
        "measured",
        "smallest–largest",
        "step",
        "running",
        "utilisation",
        box=None,
        pad_edge=False,
    )
    for column in table.columns[2:]:
        column.justify = "right"
    simulated = {s.candidate: s for s in found.simulated}
    finalists = found.measured or (Measured(found.chosen.candidate, found.chosen.tokens_s),)
    for finalist in finalists:
        of = simulated[finalist.candidate]
        table.add_row(
            "→" if finalist.candidate == found.chosen.candidate else "",
            str(finalist.candidate),
            f"{finalist.simulated_tokens_s:.1f}/s",
            f"{finalist.median:.1f}/s" if finalist.tokens_s else "–",
            f"{min(finalist.tokens_s):.1f}–{max(finalist.tokens_s):.1f}"
            if finalist.tokens_s
            else "–",
            f"{of.step_s * 1000:.0f} ms",
            f"{of.running:.1f}",
            f"{of.utilisation:.1%}",
        )
    return table


def _losses(found: Recommendation) -> Table:
    """A row for each setting, a cell for each of its values."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, alternatives in found.losses():
        cells = [_loss(name, other, loss, found.best) for other, loss in alternatives]
        table.add_row(_AXIS_NAMES[name], *cells)
    return table


def _loss(name: str, other: Simulated, loss: float, best: Simulated) -> str:
    value = getattr(other.candidate, name)
    text = memory_text(value) if name == "kv_bytes" else str(value)
    if other.candidate == best.candidate:
        return f"[bold]{text}[/bold]"
    return f"{text}: {'cannot' if other.problem else f'{-loss:+.1%}'}"
