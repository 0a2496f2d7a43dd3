"""Request traces: arrival, length of prompt, length of output, read one line at a time.

Three formats, told apart by their first line, each plain or gzip'ed::

    arrival_s,prompt_tokens,output_tokens[,hash_ids]      kvpage's own; other columns are ignored
    TIMESTAMP,ContextTokens,GeneratedTokens               Azure/AzurePublicDataset
    {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}     Mooncake

`hash_ids` name the prompt's blocks of `hash_block_size` tokens, each id covering everything before
it too (Qin et al., Mooncake, FAST 2025): equal ids, equal prefixes.
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import IO, Any

import attrs

from kvpage.errors import TraceError
from kvpage.traffic import TraceRequest

MOONCAKE_BLOCK = 512
"""Tokens per hash id in Mooncake's published traces."""

_GZIP_MAGIC = b"\x1f\x8b"


class TraceFile:
    """A trace on disk. Iterating reads it from its beginning; memory does not grow with it.

    Args:
        path: CSV or JSON lines, plain or gzip'ed.
        hash_block_size: tokens that one hash id stands for.

    Raises:
        TraceError: while iterating: the file cannot be read, or a line makes no sense. The
            sentence names file and line.
    """

    def __init__(self, path: Path, *, hash_block_size: int = MOONCAKE_BLOCK) -> None:
        self.path = path
        self.hash_block_size = hash_block_size
        self._raw: IO[bytes] | None = None

    @property
    def name(self) -> str:
        """The file's name without its extensions."""
        return self.path.name.split(".")[0]

    @property
    def share_read(self) -> float:
        """How much of the file the running iteration has read, from 0 to 1."""
        if self._raw is None or self._raw.closed:
            return 0.0
        return min(1.0, self._raw.tell() / max(1, self.path.stat().st_size))

    def __iter__(self) -> Iterator[TraceRequest]:
        count = 0
        try:
            for request in self._requests():
                count += 1
                yield request
        except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
            raise TraceError(f"{self.path} cannot be read: {_reason(error)}") from error
        if not count:
            raise TraceError(f"{self.path} has no requests")

    def _requests(self) -> Iterator[TraceRequest]:
        with self.path.open("rb") as self._raw:
            packed = self._raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            self._raw.seek(0)
            binary: Iterable[bytes] = gzip.GzipFile(fileobj=self._raw) if packed else self._raw
            lines = (line.decode() for line in binary)
            first = next(lines, "")
            read = _read_mooncake if first.lstrip().startswith("{") else _read_csv
            yield from self._checked(read(chain([first], lines)))

    def _checked(self, rows: Iterable["_Row"]) -> Iterator[TraceRequest]:
        """The rows as requests, each checked alone and against the one before."""
        previous = 0.0
        for line, layout, fields in rows:
            try:
                request = layout.request(fields)
                _check_order(previous, request.arrival_s)
                _check_hashes(request, self.hash_block_size)
            except _BadLine as bad:
                raise TraceError(f"{self.path}, line {line}: {bad}") from bad.__cause__
            previous = request.arrival_s
            yield request


class _BadLine(Exception):  # noqa: N818  (becomes a TraceError as soon as file and line are known)
    """What is wrong with a line."""


@attrs.frozen
class _Layout:
    """Where a format keeps what.

    Attributes:
        arrival: name of the field of the arrival.
        prompt: name of the field of the prompt's tokens.
        output: name of the field of the output's tokens.
        seconds: reads the arrival.
    """

    arrival: str
    prompt: str
    output: str
    seconds: Callable[[Any], float] = float

    def request(self, fields: Mapping[str, Any]) -> TraceRequest:
        """One line as a request.

        Raises:
            _BadLine: a field is missing or makes no sense.
        """
        for name in (self.arrival, self.prompt, self.output):
            if name not in fields:
                raise _BadLine(f"no field {name!r} among: {', '.join(fields) or 'none'}")
        return TraceRequest(
            self._arrival_s(fields[self.arrival]),
            _length(self.prompt, fields[self.prompt]),
            _length(self.output, fields[self.output]),
            _ids(fields.get("hash_ids", ())),
        )

    def _arrival_s(self, value: Any) -> float:
        try:
            seconds = self.seconds(value)
        except (TypeError, ValueError) as error:
            raise _BadLine(f"{self.arrival} is not a time: {error}") from error
        if not 0 <= seconds < math.inf:
            raise _BadLine(f"{self.arrival} must be a time of at least 0 s, got {seconds:g}")
        return seconds


_Row = tuple[int, _Layout, Mapping[str, Any]]
"""A line's number (from 1), its layout, and its fields as they were written."""


def _length(name: str, value: Any) -> int:
    """A number of tokens, given as text or as a JSON number."""
    try:
        tokens = int(value) if isinstance(value, (str, int)) else 0
    except ValueError:
        tokens = 0
    if tokens < 1 or isinstance(value, bool):
        raise _BadLine(f"{name} must be a whole number of at least 1, got {value!r}")
    return tokens


def _ids(value: Any) -> tuple[int, ...]:
    """Hash ids, given as text with spaces or as a JSON list."""
    try:
        return tuple(map(int, value.split() if isinstance(value, str) else value))
    except (TypeError, ValueError) as error:
        raise _BadLine(f"hash_ids must be whole numbers: {error}") from error


def _check_order(previous: float, arrival_s: float) -> None:
    if arrival_s < previous:
        raise _BadLine(f"arrives at {arrival_s:g} s, before the request above it ({previous:g} s)")


def _check_hashes(request: TraceRequest, size: int) -> None:
    """A partial block at the prompt's end may have an id or none."""
    named, whole = len(request.hash_ids), request.prompt_tokens // size
    blocks = -(-request.prompt_tokens // size)
    if named and not whole <= named <= blocks:
        raise _BadLine(
            f"{named} hash_ids for a prompt of {request.prompt_tokens} tokens, which has {blocks} "
            f"blocks of {size} tokens; is hash_block_size right?"
        )


def _read_csv(lines: Iterable[str]) -> Iterator[_Row]:
    """The columns of kvpage or of Azure. Fields that a short line lacks are missing in its row."""
    reader = csv.reader(lines)
    header = [column.strip() for column in next(reader, [])]
    layout = _Layout("arrival_s", "prompt_tokens", "output_tokens")
    if "TIMESTAMP" in header:
        layout = _Layout("TIMESTAMP", "ContextTokens", "GeneratedTokens", _SinceFirst())
    for values in reader:
        if values:
            yield reader.line_num, layout, dict(zip(header, values, strict=False))


def _read_mooncake(lines: Iterable[str]) -> Iterator[_Row]:
    """One JSON object a line, times in milliseconds."""
    layout = _Layout("timestamp", "input_length", "output_length", lambda ms: float(ms) / 1000)
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line) if line.strip() else None
        except ValueError:
            fields = {}
        if fields is not None:
            yield number, layout, fields if isinstance(fields, dict) else {}


class _SinceFirst:
    """Seconds from the first time stamp that it was asked for."""

    def __init__(self) -> None:
        self._first: datetime | None = None

    def __call__(self, stamp: str) -> float:
        """Seconds of the ISO 8601 time `stamp` after the first one."""
        moment = datetime.fromisoformat(stamp)
        self._first = self._first or moment
        return (moment - self._first).total_seconds()


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
