"""The requests that an engine has served, as a trace: lengths and arrivals, never contents."""

import csv
import os
from collections import deque
from collections.abc import Iterator

import attrs

from kvpage.errors import TraceError

CAPACITY = 10_000
"""Finished requests that an engine remembers; about 2 MB."""


@attrs.frozen
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: when it arrives, in seconds since the trace began.
        prompt_tokens: at least 1.
        output_tokens: at least 1.
        hash_ids: names of the prompt's blocks; empty where nothing is known of its content.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()

    @property
    def total_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.output_tokens


@attrs.frozen
class Traffic:
    """The latest finished requests of an engine.

    Iterate it, or hand it to `kvpage.tune`. Requests that were left or failed are not in it. A
    request of several choices is there once for each of them.

    Attributes:
        requests: in order of arrival; `arrival_s` counts from the start of the engine, and nothing
            is said of shared prefixes.
        seen: requests that finished in all; the older ones are forgotten.
    """

    requests: tuple[TraceRequest, ...] = attrs.field(repr=False)
    seen: int

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Save it as `kvpage simulate`, `compare` and `tune` read it.

        Raises:
            TraceError: the file cannot be written, or there is nothing to write.
        """
        if not self.requests:
            raise TraceError(f"no request has finished yet: there is no traffic to write to {path}")
        try:
            with open(path, "w", newline="") as out:
                writer = csv.writer(out, lineterminator="\n")
                writer.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
                writer.writerows(
                    (f"{r.arrival_s:.6f}", r.prompt_tokens, r.output_tokens) for r in self.requests
                )
        except OSError as error:
            raise TraceError(f"{path} cannot be written: {error.strerror}") from error


class TrafficRecorder:
    """Remembers the last finished requests. Written by one thread, read by any.

    Args:
        started_at: where arrivals count from, on the clock of `time.perf_counter`.
        capacity: requests to remember.
    """

    def __init__(self, *, started_at: float, capacity: int = CAPACITY) -> None:
        self._started_at = started_at
        self._seen = 0
        self._finished: deque[tuple[float, int, int]] = deque(maxlen=capacity)

    def add(self, submitted_at: float, prompt_tokens: int, output_tokens: int) -> None:
        """Enter a request that has finished; `submitted_at` is on the clock of `started_at`."""
        self._seen += 1
        self._finished.append((submitted_at - self._started_at, prompt_tokens, output_tokens))

    def snapshot(self) -> Traffic:
        """What is remembered now."""
        # A copy in one call: iterating would fail when the engine thread appends meanwhile.
        finished = sorted(self._finished.copy())
        return Traffic(tuple(TraceRequest(*request) for request in finished), self._seen)
