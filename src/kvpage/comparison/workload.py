"""The requests of a comparison: lengths from a trace or a named workload, scaled to the model."""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import attrs
import numpy as np

from kvpage.errors import ConfigError, TraceError
from kvpage.simulator import MOONCAKE_BLOCK, WORKLOADS, DrawnTrace, TraceFile, TraceRequest

MEAN_PER_LONGEST = 4
"""`max_model_len` is so many times the mean request, unless a scale is asked for."""


@attrs.frozen
class Workload:
    """Requests as they are sent.

    Attributes:
        name: of the trace or of the workload.
        requests: in order of arrival, scaled.
        scale: what every length was multiplied by.
        left_out: requests that were longer than `max_model_len` even so.
        hash_block_size: tokens that one hash id of a request stands for, scaled.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    scale: float = 1.0
    left_out: int = 0
    hash_block_size: int = MOONCAKE_BLOCK

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(request.output_tokens for request in self.requests)

    def first(self, count: int) -> "Workload":
        """The first so many requests."""
        return attrs.evolve(self, requests=self.requests[:count])

    def scaled(self, scale: float | None, longest: int) -> "Workload":
        """The same requests with every length multiplied, and without those too long.

        Args:
            scale: None takes what makes the mean request a quarter of `longest`, at most 1.
            longest: `max_model_len`, in tokens.

        Raises:
            TraceError: all are too long.
        """
        mean = (self.prompt_tokens + self.output_tokens) / len(self.requests)
        factor = min(1.0, longest / MEAN_PER_LONGEST / mean) if scale is None else scale
        scaled = [_scaled(request, factor) for request in self.requests]
        kept = tuple(request for request in scaled if request.total_tokens <= longest)
        if not kept:
            raise TraceError(
                f"all {len(scaled)} requests of {self.name} are longer than {longest} tokens, "
                f"scaled by {factor:.3g}: raise max_model_len or lower scale"
            )
        return attrs.evolve(
            self,
            requests=kept,
            scale=factor,
            left_out=len(scaled) - len(kept),
            hash_block_size=max(1, round(self.hash_block_size * factor)),
        )

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random token ids for each request; equal hash ids give equal tokens."""
        return [
            self._prompt(number, request, vocab_size, seed)
            for number, request in enumerate(self.requests)
        ]

    def delays(self, rate: float | None) -> list[float]:
        """Seconds from the first request to each, at `rate` requests a second; None is at once."""
        if rate is None:
            return [0.0] * len(self.requests)
        first, last = self.requests[0].arrival_s, self.requests[-1].arrival_s
        if last == first:
            return [number / rate for number in range(len(self.requests))]
        stretch = (len(self.requests) - 1) / rate / (last - first)
        return [(request.arrival_s - first) * stretch for request in self.requests]

    def _prompt(self, number: int, request: TraceRequest, vocab_size: int, seed: int) -> list[int]:
        sources = [
            ((seed, 1, hash_id % 2**64), self.hash_block_size) for hash_id in request.hash_ids
        ]
        sources.append(((seed, 0, number), request.prompt_tokens))
        parts = [np.random.default_rng(key).integers(vocab_size, size=n) for key, n in sources]
        tokens: list[int] = np.concatenate(parts)[: request.prompt_tokens].tolist()
        return tokens


def read_workload(
    source: str | Path | Sequence[TraceRequest],
    count: int,
    seed: int,
    *,
    hash_block_size: int = MOONCAKE_BLOCK,
) -> Workload:
    """The first `count` requests of `source`, not scaled. Reads no further than these.

    Args:
        source: the name of a workload, the path of a trace, or requests.
        count: how many, at most.
        seed: of what is drawn.
        hash_block_size: tokens that one hash id of a trace or of requests stands for.

    Raises:
        ConfigError: no workload of this name.
        TraceError: the trace cannot be read, or a request makes no sense.
    """
    if isinstance(source, str) and source in WORKLOADS:
        drawn = DrawnTrace(source, num_requests=count, seed=seed)
        return Workload(source, _first(drawn, count, source), hash_block_size=drawn.hash_block_size)
    if isinstance(source, str | Path):
        _check_exists(source)
        trace = TraceFile(Path(source), hash_block_size=hash_block_size)
        requests = _first(trace, count, trace.name)
        return Workload(trace.name, requests, hash_block_size=hash_block_size)
    requests = _first(source, count, "the workload")
    return Workload("requests", requests, hash_block_size=hash_block_size)


def _check_exists(source: str | Path) -> None:
    if isinstance(source, str) and not Path(source).exists():
        raise ConfigError(
            f"there is no trace at {source!r}, and no workload of that name; "
            f"workloads are: {', '.join(WORKLOADS)}"
        )


def _first(requests: Iterable[TraceRequest], count: int, name: str) -> tuple[TraceRequest, ...]:
    taken = tuple(islice(requests, count))
    if not taken:
        raise TraceError(f"{name} has no requests")
    for number, request in enumerate(taken, start=1):
        _check(request, f"request {number} of {name}")
    return taken


def _check(request: TraceRequest, name: str) -> None:
    """A file's requests have passed this; a caller's own have not."""
    for length in (request.prompt_tokens, request.output_tokens):
        if type(length) is not int or length < 1:
            raise TraceError(f"{name} has a length of {length!r}: at least 1 is due")
    if not 0 <= request.arrival_s < math.inf:
        raise TraceError(f"{name} arrives at {request.arrival_s!r}: a time of at least 0 s is due")


def _scaled(request: TraceRequest, factor: float) -> TraceRequest:
    return attrs.evolve(
        request,
        prompt_tokens=max(1, round(request.prompt_tokens * factor)),
        output_tokens=max(1, round(request.output_tokens * factor)),
    )
