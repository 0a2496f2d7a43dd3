"""How long a step takes on a machine, from a few measured ones.

A step computes R decoding tokens and P prompt tokens. What does not depend on the context (linear
layers, sampling, operators) is read off two measured curves: decoding R rows, and a chunk of P
tokens. A mixed step reads the weights once, so its chunk costs what R + P tokens cost more than R.
Attention is linear in the tokens that decoding rows attend to, at a rate measured for each block
size, and in the (query, key) pairs of chunks::

    decode(R) + chunk(R + P) - chunk(R) + per_kv_token * kv_tokens + per_pair * pairs
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

import attrs
import numpy as np

from kvpage.plan import StepPlan


def _sorted(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted(points))


@attrs.frozen
class Curve:
    """Seconds by tokens: straight lines through measured points, and on beyond the last one.

    Attributes:
        points: `(tokens, seconds)`, sorted, tokens above zero.
    """

    points: tuple[tuple[float, float], ...] = attrs.field(converter=_sorted)

    def at(self, tokens: float) -> float:
        """Seconds of so many tokens; 0 of none."""
        if tokens <= 0:
            return 0.0
        if len(self.points) == 1 or tokens <= self.points[0][0]:
            return self.points[0][1]
        places = [point[0] for point in self.points]
        right = min(max(1, bisect_left(places, tokens)), len(places) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1], self.points[right]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


@attrs.frozen
class StepCost:
    """Seconds of a step in blocks of one size; a `StepClock` for the simulator.

    Attributes:
        decode: by decoding rows, attention left out.
        chunk: by prompt tokens, attention left out.
        per_kv_token_s: for each token that a decoding row attends to.
        per_pair_s: for each query and key of a chunk.
        per_copied_token_s: for each token whose K and V a strategy moves.
        block_size: tokens per block.
    """

    decode: Curve
    chunk: Curve
    per_kv_token_s: float
    per_pair_s: float
    per_copied_token_s: float
    block_size: int

    def of(self, plan: StepPlan) -> float:
        """Seconds that `plan` takes."""
        query_lens = plan.query_lens.astype(np.int64)
        decoding = query_lens == 1
        chunks, kv_lens = query_lens[~decoding], plan.kv_lens.astype(np.int64)
        return self.seconds(
            rows=int(decoding.sum()),
            chunk_tokens=int(chunks.sum()),
            kv_tokens=int(kv_lens[decoding].sum()),
            pairs=float((chunks * (kv_lens[~decoding] - (chunks - 1) / 2)).sum()),
            copied_tokens=len(plan.copies) * self.block_size,
        )

    def seconds(
        self,
        *,
        rows: float,
        chunk_tokens: float,
        kv_tokens: float,
        pairs: float,
        copied_tokens: float = 0.0,
    ) -> float:
        """The sum at the head of this module."""
        dense = self.decode.at(rows)
        if chunk_tokens > 0:
            dense += max(0.0, self.chunk.at(rows + chunk_tokens) - self.chunk.at(rows))
        return (
            dense
            + self.per_kv_token_s * kv_tokens
            + self.per_pair_s * pairs
            + self.per_copied_token_s * copied_tokens
        )


@attrs.frozen
class MachineCost:
    """What a model's steps cost on this machine, in blocks of any of the measured sizes.

    Attributes:
        decode: see `StepCost`.
        chunk: see `StepCost`.
        per_kv_token_s: by block size.
        per_pair_s: see `StepCost`.
        per_copied_token_s: see `StepCost`.
        bytes_per_token: K and V of one token in all layers.
    """

    decode: Curve
    chunk: Curve
    per_kv_token_s: Mapping[int, float]
    per_pair_s: float
    per_copied_token_s: float
    bytes_per_token: int

    def at(self, block_size: int) -> StepCost:
        """In blocks of `block_size`, or of the next size that was measured."""
        nearest = min(self.per_kv_token_s, key=lambda size: abs(np.log2(size / block_size)))
        return StepCost(
            self.decode,
            self.chunk,
            self.per_kv_token_s[nearest],
            self.per_pair_s,
            self.per_copied_token_s,
            block_size,
        )

    @classmethod
    def linear(
        cls,
        *,
        base_s: float,
        per_token_s: float,
        per_kv_token_s: float,
        bytes_per_token: int,
        block_sizes: Iterable[int] = (16,),
    ) -> "MachineCost":
        """From data sheet numbers, as `StepTime` has them: the same at every block size."""
        line = Curve(((1, base_s + per_token_s), (2, base_s + 2 * per_token_s)))
        return cls(
            decode=line,
            chunk=line,
            per_kv_token_s=dict.fromkeys(block_sizes, per_kv_token_s),
            per_pair_s=0.0,
            per_copied_token_s=per_kv_token_s,
            bytes_per_token=bytes_per_token,
        )
