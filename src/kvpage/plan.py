"""The messages between scheduler and runner: what a step computes, and what came of it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.errors import RequestFailed
from kvpage.logits import History
from kvpage.sampling import Logprobs, SamplingRows
from kvpage.swap import NO_PAIRS


@attrs.frozen(eq=False)
class PromptScores:
    """Prompt tokens whose log-probabilities are wanted of a step.

    Attributes:
        tokens: `int64[k]`, which of the step's tokens give the logits.
        rows: `int64[k]`, the rows that these belong to.
        token_ids: `int64[k]`, the prompt token that follows each of them.
        num_top: `int64[k]`, how many of the most likely tokens to report beside it.
    """

    tokens: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    num_top: npt.NDArray[np.int64]


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
        prompt_scores: prompt tokens whose log-probabilities are wanted; None if there are none.
        swap_outs: `int64[O, 2]`, pairs (block, host block) to copy to the host before all else.
        swap_ins: `int64[I, 2]`, pairs (host block, block) to copy back after `copies`, before
            anything is written.
        adapters: `int32[S]`, see `Sequence.adapter`; None if no sequence of the step has one.
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
    prompt_scores: PromptScores | None = None
    swap_outs: npt.NDArray[np.int64] = NO_PAIRS
    swap_ins: npt.NDArray[np.int64] = NO_PAIRS
    adapters: npt.NDArray[np.int32] | None = None


@attrs.frozen(eq=False)
class StepResult:
    """What a step produced.

    Attributes:
        token_ids: `int64[n]`, one sampled token for each of the plan's `sample_rows`.
        logprobs: for each of them, where its request asked; empty where none did.
        prompt_logprobs: one for each token of the plan's `prompt_scores`.
        failures: by place in `sample_rows`, rows for which no token could be chosen, each with what
            its request fails by. What `token_ids` holds there means nothing.
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: Sequence[Logprobs | None] = ()
    prompt_logprobs: Sequence[Logprobs] = ()
    failures: Mapping[int, RequestFailed] = MappingProxyType({})


class Runner(Protocol):
    """Executes plans. Called from the engine thread only."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Swap out, copy blocks, swap in, write K and V, attend, sample.

        Swaps are asked for only where the engine's `preempt` is `"swap"`; the runner has room for
        as many host blocks as `swap_memory` says.

        Raises:
            Exception: whatever the model raises; the requests of the step fail with it.
        """
        ...

    def close(self) -> None:
        """Give memory back. The runner is not used again."""
        ...


@runtime_checkable
class Poisonable(Protocol):
    """What a runner may be besides, for engines with `checks="everything"`."""

    def poison(self, blocks: npt.NDArray[np.int64]) -> None:
        """Overwrite K and V of `blocks`, so that whoever reads them before writing is found out."""
        ...
