"""Reading traces: three published formats, and one clear sentence for everything else."""

import gzip
from pathlib import Path

import pytest

from kvpage.errors import TraceError
from kvpage.simulator import TraceFile, TraceRequest

OWN = "arrival_s,prompt_tokens,output_tokens\n0,374,44\n4.315,396,109\n"


def written(folder: Path, text: str, name: str = "trace.csv") -> TraceFile:
    path = folder / name
    path.write_text(text)
    return TraceFile(path)


def test_reads_own_columns(tmp_path: Path) -> None:
    """The three columns of kvpage's own format."""
    assert list(written(tmp_path, OWN)) == [
        TraceRequest(0.0, 374, 44),
        TraceRequest(4.315, 396, 109),
    ]


def test_reads_hash_ids_and_ignores_other_columns(tmp_path: Path) -> None:
    """Hash ids are separated by spaces; a column nobody asked for does no harm."""
    trace = written(
        tmp_path, "arrival_s,session,prompt_tokens,output_tokens,hash_ids\n1,7,600,2,4 9\n"
    )
    assert list(trace) == [TraceRequest(1.0, 600, 2, (4, 9))]


def test_reads_gzip_whatever_it_is_called(tmp_path: Path) -> None:
    """Compression is told by the content, not by the name."""
    path = tmp_path / "trace.csv"
    path.write_bytes(gzip.compress(OWN.encode()))
    assert len(list(TraceFile(path))) == 2


def test_reads_azure(tmp_path: Path) -> None:
    """Azure's columns; times count from the first row, with its seven decimals."""
    trace = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109\r\n",
    )
    first, second = trace
    assert first == TraceRequest(0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)


def test_reads_mooncake(tmp_path: Path) -> None:
    """Mooncake's JSON lines, with times in milliseconds."""
    line = '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}'
    trace = written(tmp_path, f"{line}\n\n", "trace.jsonl")
    assert list(trace) == [TraceRequest(27.482, 600, 52, (46, 47))]


def test_a_trace_can_be_read_again(tmp_path: Path) -> None:
    """Every iteration starts at the beginning."""
    trace = written(tmp_path, OWN)
    assert list(trace) == list(trace)


def test_the_share_read_grows_to_one(tmp_path: Path) -> None:
    """A progress bar can follow."""
    trace = written(tmp_path, OWN)
    shares = [trace.share_read, *(trace.share_read for _ in trace)]
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("0,-1,44", "line 3: prompt_tokens must be a whole number of at least 1, got '-1'"),
        ("0,0,44", "line 3: prompt_tokens must be a whole number of at least 1, got '0'"),
        ("0,5,nan", "line 3: output_tokens must be a whole number of at least 1, got 'nan'"),
        ("0,5,1.5", "line 3: output_tokens must be a whole number of at least 1, got '1.5'"),
        ("0,5,", "line 3: output_tokens must be a whole number of at least 1, got ''"),
        ("nan,5,1", "line 3: arrival_s must be a time of at least 0 s, got nan"),
        ("soon,5,1", "line 3: arrival_s is not a time"),
        ("-1,5,1", "line 3: arrival_s must be a time of at least 0 s, got -1"),
        ("1,5", "line 3: no field 'output_tokens' among: arrival_s, prompt_tokens"),
        ("0,5,1\n1,5,1\n0.5,5,1", "line 5: arrives at 0.5 s, before the request above it (1 s)"),
    ],
)
def test_refuses_a_bad_row_with_file_and_line(tmp_path: Path, row: str, sentence: str) -> None:
    """Whatever is wrong with a line, the sentence says where and what."""
    trace = written(tmp_path, f"arrival_s,prompt_tokens,output_tokens\n0,9,9\n{row}\n")
    with pytest.raises(TraceError) as refused:
        list(trace)
    assert str(refused.value).startswith(f"{trace.path}, {sentence}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n", "has no requests"),
        ("time,in,out\n0,1,2\n", "line 2: no field 'arrival_s' among: time, in, out"),
        ("{broken\n", "line 1: no field 'timestamp' among: none"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}', "line 1: input_length must"),
        ('{"timestamp": 0, "input_length": 2.5, "output_length": 1}', "line 1: input_length must"),
        (
            "arrival_s,prompt_tokens,output_tokens,hash_ids\n0,600,1,4\n0,600,1,4 9 11\n",
            "line 3: 3 hash_ids for a prompt of 600 tokens, which has 2 blocks of 512 tokens",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens,hash_ids\n0,600,1,4 x\n",
            "line 2: hash_ids must be whole numbers",
        ),
    ],
)
def test_refuses_a_file_that_is_no_trace(tmp_path: Path, text: str, sentence: str) -> None:
    """Empty files, other columns, broken lines, hash ids of another block size."""
    with pytest.raises(TraceError, match="trace") as refused:
        list(written(tmp_path, text))
    assert sentence in str(refused.value)


def test_refuses_what_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a directory, a gzip file cut short."""
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(OWN.encode())[:-20])
    for path in (tmp_path / "missing.csv", tmp_path, cut):
        with pytest.raises(TraceError, match="cannot be read"):
            list(TraceFile(path))
