"""Reports as JSON, as CSV, as a picture."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from kvpage.allocators.dynamic import DynamicAllocator
from kvpage.allocators.fixed import FixedAllocator
from kvpage.errors import ConfigError
from kvpage.plugins import AllocatorSpec
from kvpage.simulator import (
    Replay,
    ReplaySettings,
    Report,
    TraceRequest,
    check_plot,
    plot,
    write_csv,
    write_json,
)


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    """Two allocators, only one of which can trim."""
    requests = [TraceRequest(0.0, 100, 60)] * 100
    settings = ReplaySettings(slots=2048, max_model_len=512)
    specs = [
        AllocatorSpec("fixed", FixedAllocator, 16),
        AllocatorSpec("dynamic", DynamicAllocator, 8),
    ]
    return [Replay(requests, spec, settings, name="equal").run() for spec in specs]


def test_json_has_figures_and_series(reports: list[Report]) -> None:
    """One object a report, with every figure and the pool over time."""
    out = io.StringIO()
    write_json(reports, out)
    fixed, dynamic = json.loads(out.getvalue())
    assert fixed["allocator"] == "fixed"
    assert fixed["utilisation"] == reports[0].utilisation
    assert fixed["allocator_calls_admit"] >= 100
    assert "allocator_calls_trim" in dynamic
    assert len(fixed["series"]) == len(reports[0].series)
    assert fixed["series"][0]["live_slots"] == reports[0].series[0][1].live_slots


def test_csv_has_a_line_for_each_report(reports: list[Report]) -> None:
    """The header names what any of the reports has; what one lacks is empty."""
    out = io.StringIO()
    write_csv(reports, out)
    out.seek(0)
    fixed, dynamic = csv.DictReader(out)
    assert float(fixed["utilisation"]) == reports[0].utilisation
    assert fixed["queue_wait_mean_s"] == ""
    assert fixed["allocator_calls_trim"] == ""
    assert dynamic["allocator_calls_trim"] != ""
    assert "series" not in fixed


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot_writes_a_picture(reports: list[Report], tmp_path: Path, suffix: str) -> None:
    """A file of the kind that its name says."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    path = tmp_path / f"out{suffix}"
    plot(reports, path)
    start = {".png": b"\x89PNG", ".svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(start)


def test_plot_refuses_other_pictures() -> None:
    """Before anything is replayed."""
    with pytest.raises(ConfigError, match=r"a plot is a file .png or .svg, got 'out.pdf'"):
        check_plot(Path("out.pdf"))


def test_plot_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib: one sentence with the command that helps."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvpage\[plot\]'"):
        check_plot(Path("out.png"))
