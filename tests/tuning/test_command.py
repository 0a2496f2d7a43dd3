"""`kvpage tune` from the outside, and `kvpage.tune` with a model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import typer
from typer.testing import CliRunner, Result

import kvpage
from kvpage import KvpageError
from kvpage.cli.tune import run_and_show, tune
from kvpage.tuning import Recommendation
from tests.model.tiny import tiny_model
from tests.tuning.test_tuning import SETTINGS, Bench, tuning

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def run(*arguments: str) -> Result:
    """Run the command; what it raises, `kvpage` itself turns into a sentence."""
    app = typer.Typer()
    app.command()(tune)
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, KvpageError):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "has no requests"),
        (HEADER, "has no requests"),
        ("arrival_s,prompt,output\n1,2,3\n", "no field 'prompt_tokens' among"),
        (HEADER + "0,-4,3\n", "prompt_tokens must be a whole number of at least 1, got '-4'"),
        (HEADER + "0,4,0\n", "output_tokens must be a whole number of at least 1, got '0'"),
        (HEADER + "nan,4,3\n", "arrival_s must be a time of at least 0 s, got nan"),
        (HEADER + "0,nan,3\n", "prompt_tokens must be a whole number of at least 1, got 'nan'"),
    ],
)
def test_a_trace_that_makes_no_sense_is_one_sentence(
    tmp_path: Path, content: str, sentence: str
) -> None:
    """Before the model is loaded."""
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(KvpageError, match=sentence):
        run(str(path), "--model", "no/such-model")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nowhere.csv",), r"nowhere\.csv cannot be read: No such file"),
        (("--workload", "nothing"), "no workload"),
        (("x.csv", "--workload", "chat"), "not both"),
        (("--allocator", "nothing"), "nothing"),
        (("--seconds", "-1"), "seconds must be a number above 0"),
        (("--json", "/no/such/folder/x.json"), "there is no folder /no/such/folder"),
    ],
)
def test_arguments_that_make_no_sense_are_one_sentence(
    arguments: tuple[str, ...], sentence: str
) -> None:
    """Before the model is loaded."""
    with pytest.raises(KvpageError, match=sentence):
        run(*arguments, "--model", "no/such-model")


async def recommendation(
    on_progress: Callable[[str], None], on_result: Callable[[Recommendation], None]
) -> Recommendation:
    bench = Bench({"fixed": 9.0, "dynamic": 8.0})
    return await tuning().run(bench, on_progress, on_result)


def test_prints_the_evidence_and_the_call(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And writes the same as JSON."""
    path = tmp_path / "found.json"
    assert run_and_show(recommendation, path) == 0
    printed = capsys.readouterr().out
    for text in ("The cost of being wrong", "kvpage.AsyncEngine.from_pretrained(", "9.0/s"):
        assert text in printed
    assert json.loads(path.read_text())["state"] == "complete"


def test_what_was_found_is_kept_when_it_is_interrupted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ctrl-C after the search: the simulated recommendation is printed and written."""

    async def interrupted(on_result: Callable[[Recommendation], None], **_: Any) -> Recommendation:
        on_result(await tuning(attrs.evolve(SETTINGS, seconds=0.0)).run(Bench({})))
        raise KeyboardInterrupt

    path = tmp_path / "found.json"
    assert run_and_show(interrupted, path) == 130
    assert "from_pretrained(" in capsys.readouterr().out
    assert json.loads(path.read_text())["state"] == "interrupted"


def test_nothing_found_yet_is_nothing_to_print() -> None:
    """The interruption goes on to the caller."""

    async def interrupted(**_: Any) -> Recommendation:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_and_show(interrupted, None)


async def test_tunes_a_model(tmp_path: Path) -> None:
    """Calibrated, simulated and measured for real, on the traffic of an engine."""
    traffic = kvpage.Traffic(
        tuple(kvpage.TraceRequest(float(n), 10 + n % 7, 4 + n % 3) for n in range(40)), 40
    )
    space = kvpage.SearchSpace(
        allocators=("fixed", "dynamic"),
        block_sizes=(8, 16),
        memory_shares=(0.5, 1.0),
        max_num_seqs=(4, 8),
        max_batch_tokens=(32, 64),
    )
    found = await kvpage.tune(
        tiny_model("llama"), workload=traffic, space=space, kv_memory="2048 tokens", seconds=0.5
    )
    assert found.state in ("complete", "out of time")
    assert all(measured.problem is None for measured in found.measured)
    assert found.settings["allocator"] in space.allocators
    assert found.settings["max_model_len"] == 256
