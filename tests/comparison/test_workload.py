"""The requests of a comparison."""

from pathlib import Path

import pytest

import kvpage
from kvpage import ConfigError
from kvpage.comparison.workload import Workload, read_workload
from kvpage.errors import TraceError
from kvpage.simulator import TraceRequest

HEAD = "arrival_s,prompt_tokens,output_tokens\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.csv"
    path.write_text(text)
    return path


def of(*lengths: tuple[int, int]) -> Workload:
    return Workload("mine", tuple(TraceRequest(float(i), *pair) for i, pair in enumerate(lengths)))


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in workload.requests]


def test_a_trace_is_read_no_further_than_needed(tmp_path: Path) -> None:
    """So a huge file costs nothing, and what comes later may be anything."""
    path = written(tmp_path, HEAD + "0,10,20\n1,30,40\nnonsense\n")
    assert lengths(read_workload(path, 2, 0)) == [(10, 20), (30, 40)]


def test_a_path_may_be_text(tmp_path: Path) -> None:
    """As from a command line or a configuration."""
    path = written(tmp_path, HEAD + "0,10,20\n")
    assert read_workload(str(path), 5, 0).name == "mine"


async def test_hash_ids_may_stand_for_other_blocks_than_mooncakes(tmp_path: Path) -> None:
    """Said to `compare` and to `tune`, which read the workload before they load a model."""
    text = "arrival_s,prompt_tokens,output_tokens,hash_ids\n0,40,2,1 2 3\n"
    path = written(tmp_path, text)
    assert read_workload(path, 1, 0, hash_block_size=16).hash_block_size == 16
    for run in (kvpage.compare, kvpage.tune):
        with pytest.raises(TraceError, match="is hash_block_size right"):
            await run("./none", workload=path)
        with pytest.raises(ConfigError, match="there is no model"):
            await run("./none", workload=path, hash_block_size=16)


def test_a_named_workload_is_the_same_each_time() -> None:
    """Of the same seed."""
    assert read_workload("chat", 5, 3) == read_workload("chat", 5, 3)
    assert read_workload("chat", 5, 3) != read_workload("chat", 5, 4)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "mine.csv has no requests"),
        (HEAD, "mine.csv has no requests"),
        ("a,b\n1,2\n", "line 2: no field 'arrival_s' among: a, b"),
        (HEAD + "0,-3,4\n", "prompt_tokens must be a whole number of at least 1, got '-3'"),
        (HEAD + "0,3,0\n", "output_tokens must be a whole number of at least 1, got '0'"),
        (HEAD + "nan,3,4\n", "arrival_s must be a time of at least 0 s, got nan"),
        (HEAD + "0,3.5,4\n", "prompt_tokens must be a whole number of at least 1, got '3.5'"),
        ("x" * 200_000 + "\n1\n", "mine.csv"),
        ("\0" * 1000, "mine.csv"),
    ],
)
def test_a_bad_trace_is_one_sentence_with_its_name(
    tmp_path: Path, text: str, sentence: str
) -> None:
    """And the line, where there is one."""
    with pytest.raises(TraceError, match=sentence):
        read_workload(written(tmp_path, text), 10, 0)


def test_a_trace_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    """A path as such, or a name that could be either."""
    with pytest.raises(TraceError, match="No such file"):
        read_workload(tmp_path / "none.csv", 10, 0)
    with pytest.raises(ConfigError, match="no trace at 'chatt', and no workload of that name"):
        read_workload("chatt", 10, 0)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (TraceRequest(0.0, 0, 5), "request 1 of the workload has a length of 0"),
        (TraceRequest(0.0, 5, -1), "has a length of -1"),
        (TraceRequest(float("nan"), 5, 5), "arrives at nan"),
    ],
)
def test_a_caller_s_own_requests_are_checked_too(request_: TraceRequest, sentence: str) -> None:
    """They come from no file that was checked."""
    with pytest.raises(TraceError, match=sentence):
        read_workload([request_], 10, 0)
    with pytest.raises(TraceError, match="the workload has no requests"):
        read_workload([], 10, 0)


def test_lengths_are_scaled_to_a_mean_of_a_quarter_of_the_longest() -> None:
    """Of 100 tokens: the mean request of 250 tokens becomes one of 25."""
    scaled = of((150, 50), (200, 100)).scaled(None, 100)
    assert scaled.scale == pytest.approx(0.1)
    assert lengths(scaled) == [(15, 5), (20, 10)]


def test_short_requests_are_not_stretched() -> None:
    """They are what they are."""
    assert of((3, 2)).scaled(None, 100).scale == 1.0


def test_a_length_never_becomes_zero() -> None:
    """Every request has a prompt and an output."""
    assert lengths(of((1000, 1)).scaled(0.01, 100)) == [(10, 1)]


def test_requests_that_are_too_long_even_so_are_left_out_and_counted() -> None:
    """Cutting them would make another workload of it."""
    scaled = of((90, 10), (90, 11)).scaled(1.0, 100)
    assert (lengths(scaled), scaled.left_out) == ([(90, 10)], 1)
    with pytest.raises(TraceError, match="all 2 requests of mine are longer than 20 tokens"):
        of((90, 10), (90, 11)).scaled(1.0, 20)


def test_prompts_have_their_lengths_and_are_the_same_each_time() -> None:
    """Token ids below the vocabulary's size."""
    first, second = of((7, 1), (9, 1)).prompts(50, seed=1)
    assert (len(first), len(second)) == (7, 9)
    assert max(first + second) < 50
    assert of((7, 1), (9, 1)).prompts(50, seed=1) == [first, second]


def test_equal_hash_ids_give_equal_tokens() -> None:
    """As far as they reach: two blocks of 4 of the second prompt, one of the third."""
    requests = (
        TraceRequest(0.0, 10, 1, (1, 2, -3)),
        TraceRequest(0.0, 9, 1, (1, 2, 4)),
        TraceRequest(0.0, 9, 1, (1, 5)),
    )
    one, two, three = Workload("mine", requests, hash_block_size=4).prompts(1000, seed=0)
    assert one[:8] == two[:8]
    assert one[:4] == three[:4]
    assert one[8] != two[8]
    assert one[4:8] != three[4:8]


def test_hash_blocks_are_scaled_with_the_lengths() -> None:
    """Or they would name other parts of the prompts."""
    assert of((10, 1)).scaled(0.125, 100).hash_block_size == 64


def test_requests_come_at_once_or_at_a_rate() -> None:
    """Gaps as in the trace, stretched: three requests in two seconds at one a second."""
    requests = tuple(TraceRequest(at, 5, 5) for at in (10.0, 10.5, 14.0))
    assert Workload("mine", requests).delays(None) == [0, 0, 0]
    assert Workload("mine", requests).delays(1.0) == [0, 0.25, 2]


def test_a_trace_without_time_comes_evenly() -> None:
    """All its requests arrive at the same moment."""
    requests = tuple(TraceRequest(3.0, 5, 5) for _ in range(3))
    assert Workload("mine", requests).delays(2.0) == [0, 0.5, 1]
