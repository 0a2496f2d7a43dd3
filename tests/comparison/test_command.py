"""`kvpage compare` from the outside."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvpage import Comparison, ComparisonSettings
from kvpage.cli.compare import compare, run_and_show, shown_command
from kvpage.errors import ConfigError, KvpageError
from kvpage.pretrained import default_model_path
from tests.comparison.found import comparison, result

FOUND = comparison([result("fixed/8", 98, 99, 100), result("contiguous/8", 50, 50, 51)])
SETTINGS = ComparisonSettings(allocators=["fixed", "contiguous"], block_sizes=[8])


def run(*arguments: str) -> Result:
    """Run the command; what it raises, `kvpage` itself turns into a sentence."""
    app = typer.Typer()
    app.command()(compare)
    outcome = CliRunner().invoke(app, list(arguments))
    if isinstance(outcome.exception, KvpageError):
        raise outcome.exception
    return outcome


def giving(*found: Comparison, then: BaseException | None = None) -> Callable[..., Any]:
    """A comparison that tells these in turn, and ends with the last, or by an exception."""

    async def compared(*, on_progress: Any, on_result: Callable[[Comparison], None]) -> Comparison:
        for each in found:
            on_result(each)
        if then is not None:
            raise then
        return found[-1]

    return compared


def shown(tmp_path: Path, compared: Callable[..., Any]) -> int:
    return run_and_show(
        compared, SETTINGS, tmp_path / "out.html", tmp_path / "out.json", "kvpage compare"
    )


def test_prints_a_table_and_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every candidate, with where the report is."""
    assert shown(tmp_path, giving(FOUND)) == 0
    printed = capsys.readouterr().out
    assert "fixed/8" in printed
    assert "98.0 – 100" in printed
    assert "fixed/8 is the fastest" in printed
    assert "out.html" in printed


def test_writes_both_files(tmp_path: Path) -> None:
    """Whole, and no other."""
    shown(tmp_path, giving(FOUND))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json"]
    assert json.loads((tmp_path / "out.json").read_text())["command"] == "kvpage compare"
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the files and in the table."""
    assert shown(tmp_path, giving(FOUND, then=KeyboardInterrupt())) == 130
    assert json.loads((tmp_path / "out.json").read_text())["state"] == "interrupted"
    assert "interrupted: 6 of 6 runs were measured" in capsys.readouterr().out


def test_ctrl_c_before_the_first_run_writes_nothing(tmp_path: Path) -> None:
    """There is nothing to keep."""
    with pytest.raises(KeyboardInterrupt):
        shown(tmp_path, giving(then=KeyboardInterrupt()))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_candidate_is_one_sentence_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are in the table."""
    failed = comparison([result("fixed/8", 99, 100), result("contiguous/8", failure="it broke")])
    assert shown(tmp_path, giving(failed)) == 2
    printed = capsys.readouterr()
    assert "kvpage: contiguous/8 failed: it broke" in printed.err
    assert "fixed/8" in printed.out


def test_files_that_cannot_be_written_are_refused_before_the_comparison(tmp_path: Path) -> None:
    """Nothing is worse than an error after five minutes."""
    with pytest.raises(ConfigError, match="there is no folder"):
        run("--html", str(tmp_path / "no" / "out.html"))
    with pytest.raises(ConfigError, match="it is a folder"):
        run("--html", str(tmp_path / "out.html"), "--json", str(tmp_path))


def test_bad_settings_are_refused_before_the_model_is_loaded() -> None:
    """One sentence each."""
    with pytest.raises(ConfigError, match="give a TRACE or a --workload, not both"):
        run("trace.csv", "--workload", "chat")
    with pytest.raises(ConfigError, match="scale must be a number above 0, got -1"):
        run("--scale", "-1")
    with pytest.raises(KvpageError, match="no allocator named 'buddy'"):
        run("--allocator", "buddy")
    with pytest.raises(KvpageError, match=r"nowhere\.csv cannot be read"):
        run("nowhere.csv")


def test_the_command_is_shown_as_it_was_typed() -> None:
    """Ready to be pasted."""
    typed = ["/somewhere/bin/kvpage", "compare", "--kv-memory", "4096 tokens"]
    assert shown_command(typed) == "kvpage compare --kv-memory '4096 tokens'"


@pytest.mark.slow
def test_the_default_model_is_compared(tmp_path: Path) -> None:
    """Two strategies over one block size, two rounds, few requests."""
    try:
        default_model_path()
    except ConfigError as missing:
        pytest.skip(str(missing))
    files = ("--html", str(tmp_path / "out.html"), "--json", str(tmp_path / "out.json"))
    outcome = run(
        *("--allocator", "fixed", "--allocator", "contiguous", "--block-size", "16"),
        *("--requests", "6", "--rounds", "2", "--seconds", "600", *files),
    )
    assert outcome.exit_code == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert [len(found["runs"]) for found in document["results"]] == [2, 2]
    tokens = {run["output_tokens"] for found in document["results"] for run in found["runs"]}
    assert tokens == {document["workload"]["output_tokens"]}
