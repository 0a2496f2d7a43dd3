"""The messages between scheduler and runner: what a step computes, and what came of it."""

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.logits import History
from kvpage.sampling import Logprobs, SamplingRows


@attrs.frozen(eq=False)
class StepPlan:
    """One forward pass over T tokens of S sequences, packed without padding.

    Sequences that decode come first, then chunks of prompts. Sequence `i` owns `query_lens[i]`
    adjacent tokens.

    Attributes:
        rows: `int32[S]`, the table row of each sequence.
        query_lens: `int32[S]`, tokens to compute.
        kv_lens: `int32[S]`, tokens in the cache after this step.
        token_ids: `int64[T]`.
        positions: `int64[T]`.
        slots: `int64[T]`, where the K and V of each token are written.
        block_tables: `int32[R, W]`, a view of the block manager's tables; read-only.
        copies: `int64[C, 2]`, blocks (from, to) to copy before anything is written.
        sample_tokens: `int64[n]`, which of the T tokens give logits to sample from.
        sample_rows: `int64[n]`, the rows that these belong to.
        sample_indices: `int64[n]`, output tokens that each of them has so far.
        sampling: the parameters of `sample_rows`.
        history: the tokens so far of those rows whose sampling looks at them.
    """

    rows: npt.NDArray[np.int32]
    query_lens: npt.NDArray[np.int32]
    kv_lens: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int32]
    copies: npt.NDArray[np.int64]
    sample_tokens: npt.NDArray[np.int64]
    sample_rows: npt.NDArray[np.int64]
    sample_indices: npt.NDArray[np.int64]
    sampling: SamplingRows
    history: History | None = None


@attrs.frozen(eq=False)
class StepResult:
    """What a step produced.

    Attributes:
        token_ids: `int64[n]`, one sampled token for each of the plan's `sample_rows`.
        logprobs: for each of them, where its request asked; empty where none did.
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: Sequence[Logprobs | None] = ()


class Runner(Protocol):
    """Executes plans. Called from the engine thread only."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, write K and V, attend, sample.

        Raises:
            Exception: whatever the model raises; the requests of the step fail with it.
        """
        ...

    def close(self) -> None:
        """Give memory back. The runner is not used again."""
        ...
