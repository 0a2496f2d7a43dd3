"""`kvpage simulate` from the outside."""

import csv
import io
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvpage.cli.simulate import simulate
from kvpage.errors import KvpageError, TraceError

TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(
    f"{i},{20 + i % 50},{30 + i % 20}\n" for i in range(200)
)


def run(*arguments: str) -> Result:
    """Run the command; what it raises, `kvpage` itself turns into a sentence."""
    app = typer.Typer()
    app.command()(simulate)
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, KvpageError):
        raise result.exception
    return result


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A trace of 200 short requests."""
    path = tmp_path / "short.csv"
    path.write_text(TRACE)
    return str(path)


def test_prints_a_table_with_a_column_for_each_allocator(trace: str) -> None:
    """Names, block sizes and figures of both, under the trace's name."""
    two = ("--allocator", "fixed:block_size=16", "--allocator", "fixed:block_size=32")
    result = run(trace, *two, "--slots", "1024", "--max-model-len", "512")
    assert result.exit_code == 0
    assert "short" in result.stdout
    assert "fixed/16" in result.stdout
    assert "fixed/32" in result.stdout
    assert "utilisation" in result.stdout
    assert "200 requests, 0 longer than the model left out" in result.stdout


def test_csv_to_standard_output_is_nothing_but_csv(trace: str) -> None:
    """So that it can be piped; the progress bar goes to standard error."""
    result = run(trace, "--allocator", "fixed", "--slots", "1024", "--csv", "-")
    (row,) = csv.DictReader(io.StringIO(result.stdout))
    assert row["completed"] == "200"


def test_writes_json(trace: str, tmp_path: Path) -> None:
    """A file with reports and series, beside the table."""
    path = tmp_path / "out.json"
    result = run(trace, "--allocator", "fixed", "--slots", "1024", "--json", str(path))
    (report,) = json.loads(path.read_text())
    assert report["trace"] == "short"
    assert report["series"]
    assert "utilisation" in result.stdout


def test_workloads_run_without_a_trace() -> None:
    """A named workload, timed, with cancellations."""
    result = run(
        *("--workload", "chat", "--requests", "50", "--allocator", "fixed", "--arrivals"),
        *("--cancel-rate", "0.2", "--max-model-len", "16384", "--csv", "-"),
    )
    (row,) = csv.DictReader(io.StringIO(result.stdout))
    assert int(row["completed"]) + int(row["cancelled"]) == 50
    assert float(row["queue_wait_mean_s"]) >= 0


def test_a_step_time_implies_arrivals(trace: str) -> None:
    """200 requests, one a second, with steps of 10 ms: little more than 200 s."""
    result = run(trace, "--allocator", "fixed", "--step-time", "0.01,0,0", "--csv", "-")
    (row,) = csv.DictReader(io.StringIO(result.stdout))
    assert 199 <= float(row["simulated_s"]) <= 200


def test_says_why_a_figure_is_missing(trace: str) -> None:
    """A pool that never was full."""
    result = run(trace, "--allocator", "fixed")
    assert "too short to measure a full pool with fixed/16" in result.stdout


def test_refuses_to_replay_nothing() -> None:
    """Neither trace nor workload."""
    with pytest.raises(KvpageError, match="give a TRACE or a --workload"):
        run("--allocator", "fixed")


def test_a_missing_trace_is_one_sentence() -> None:
    """With its name."""
    with pytest.raises(TraceError, match=r"nowhere\.csv cannot be read: No such file"):
        run("nowhere.csv", "--allocator", "fixed")


def test_a_plot_of_another_kind_is_refused_before_the_replay(trace: str) -> None:
    """Nothing is worse than an error after an hour."""
    with pytest.raises(KvpageError, match=r"a plot is a file \.png or \.svg"):
        run(trace, "--plot", "out.gif")


def test_a_file_that_cannot_be_written_is_one_sentence(trace: str, tmp_path: Path) -> None:
    """With its name."""
    with pytest.raises(KvpageError, match="cannot be written"):
        run(trace, "--allocator", "fixed", "--csv", str(tmp_path / "no" / "out.csv"))
