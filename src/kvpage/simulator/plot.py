"""Reports as a picture: utilisation and running requests over time."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kvpage.errors import ConfigError
from kvpage.simulator.report import Report

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Refuse early what `plot` could not do.

    Raises:
        ConfigError: no such kind of picture, or matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a plot is a file {' or '.join(SUFFIXES)}, got {str(path)!r}")
    _figure_class()


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draw one row for each trace, one line for each allocator.

    Raises:
        ConfigError: see `check_plot`.
    """
    check_plot(path)
    traces = list(dict.fromkeys(report.trace for report in reports))
    # A figure of its own, not pyplot's: that would pick a window system and keep global state.
    figure = _figure_class()(figsize=(11, 1 + 2.6 * len(traces)), layout="constrained")
    axes = figure.subplots(len(traces), 2, squeeze=False)
    for (filled, running), trace in zip(axes, traces, strict=True):
        for report in [report for report in reports if report.trace == trace]:
            _draw(filled, running, report)
        filled.set(title=trace, ylabel="utilisation", ylim=(0, 1))
        running.set(title=trace, ylabel="requests running")
        running.set_ylim(bottom=0)
        filled.legend(fontsize="small")
    figure.savefig(path)


def _draw(filled: Any, running: Any, report: Report) -> None:
    times = [time for time, _ in report.series]
    samples = [sample for _, sample in report.series]
    filled.plot(times, [s.live_slots / report.slots for s in samples], label=report.label)
    running.plot(times, [s.running for s in samples])
    unit = "steps" if report.simulated_s is None else "seconds"
    filled.set_xlabel(unit)
    running.set_xlabel(unit)


def _figure_class() -> Any:
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ConfigError(
            "a plot needs matplotlib, which is not installed: pip install 'kvpage[plot]'"
        ) from error
