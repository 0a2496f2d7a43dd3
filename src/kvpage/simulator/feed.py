"""From requests of a trace to sequences for the scheduler, one at a time."""

from collections.abc import Iterable, Iterator

import attrs
import numpy as np

from kvpage.blocks import PoolGeometry, SequenceId
from kvpage.sampling import SamplingParams
from kvpage.sequence import Sequence
from kvpage.simulator.settings import ReplaySettings
from kvpage.simulator.sharing import TraceKeys
from kvpage.simulator.traces import MOONCAKE_BLOCK
from kvpage.traffic import TraceRequest

GREEDY = SamplingParams(temperature=0.0)


@attrs.frozen
class Errand:
    """What a replay must know of a sequence beside it, as `Sequence.request`.

    Attributes:
        arrival_s: when it arrives.
        cancel_at_tokens: its user leaves when it has so many tokens; beyond its end, never.
    """

    arrival_s: float
    cancel_at_tokens: int


class Feed:
    """Reads requests lazily and makes sequences of them.

    Attributes:
        requests: requests made into sequences so far.
        skipped: requests left out so far, since they are longer than the pool's `max_model_len`.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        geometry: PoolGeometry,
        settings: ReplaySettings,
        *,
        hash_block_size: int = MOONCAKE_BLOCK,
    ) -> None:
        self.requests = 0
        self.skipped = 0
        self._geometry = geometry
        self._hash_block_size = hash_block_size
        self._cancel_rate = settings.cancel_rate
        self._random = np.random.default_rng(settings.seed)
        # Every prompt is a view of this; the batch copies what it is given.
        self._prompt = np.zeros(geometry.max_model_len, np.int32)
        self._fed = self._make_all(requests)
        self._head = next(self._fed, None)

    @property
    def next_arrival_s(self) -> float | None:
        """When the next sequence arrives; None if there is none."""
        return None if self._head is None else self._head[0]

    def take(self) -> Sequence | None:
        """The next sequence, an `Errand` its `request`; None if there is none."""
        if self._head is None:
            return None
        _, sequence = self._head
        self._head = next(self._fed, None)
        return sequence

    def _make_all(self, requests: Iterable[TraceRequest]) -> Iterator[tuple[float, Sequence]]:
        for request in requests:
            if request.total_tokens > self._geometry.max_model_len:
                self.skipped += 1
                continue
            self.requests += 1
            yield request.arrival_s, self._make(SequenceId(self.requests), request)

    def _make(self, seq: SequenceId, request: TraceRequest) -> Sequence:
        return Sequence(
            id=seq,
            tokens=self._prompt[: request.prompt_tokens],
            prompt_tokens=request.prompt_tokens,
            max_total_tokens=request.total_tokens,
            params=GREEDY,
            prefix_keys=self._keys(seq, request) if request.hash_ids else None,
            request=Errand(request.arrival_s, self._cancel_at(request)),
        )

    def _keys(self, seq: SequenceId, request: TraceRequest) -> TraceKeys:
        return TraceKeys(
            seq,
            request.hash_ids,
            prompt_tokens=request.prompt_tokens,
            hash_block_size=self._hash_block_size,
            block_size=self._geometry.block_size,
        )

    def _cancel_at(self, request: TraceRequest) -> int:
        """A cancelled request ends after an evenly drawn part of its output."""
        if self._random.random() >= self._cancel_rate:
            return request.total_tokens + 1
        return request.prompt_tokens + int(self._random.integers(request.output_tokens))
