"""Executes step plans on a model: copy, compute, sample."""

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks import PoolGeometry
from kvpage.kernels import BackendName, attention_backend
from kvpage.kernels.work import AttentionBatch
from kvpage.model import KVPools, PagedModel
from kvpage.plan import StepPlan, StepResult
from kvpage.sampling import (
    SamplingRows,
    failures,
    logprobs_of,
    process,
    sample,
    token_logprobs,
)

WARM_UP_TOKENS = 8
"""Enough for a chunk to take the kernels' way for chunks."""


class ModelRunner:
    """Runs a `PagedModel` over pools of its own. Used from one thread.

    Args:
        model: the model.
        geometry: blocks to make room for.
        backend: which attention kernels.
    """

    def __init__(self, model: PagedModel, geometry: PoolGeometry, backend: BackendName) -> None:
        self._model = model
        self._block_size = geometry.block_size
        self._pools = KVPools(
            model.layers,
            geometry.num_slots,
            attention_backend(backend),
            dtype=model.dtype,
            device=model.device,
        )

    def warm_up(self) -> None:
        """Compile what is compiled at the first use: a decode step and a chunk, on the first block.

        Call it before the first step; what it writes is written again before it is read.
        """
        for num_tokens in {1, min(WARM_UP_TOKENS, self._block_size)}:
            self.execute(_first_tokens(num_tokens))

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Runner.execute`."""
        device = self._model.device
        if len(plan.copies):
            self._pools.copy_blocks(torch.from_numpy(plan.copies).to(device), self._block_size)
        batch = AttentionBatch(
            plan.block_tables, plan.rows, plan.query_lens, plan.kv_lens, self._block_size
        )
        logits = self._model.logits(
            torch.from_numpy(plan.token_ids).to(device),
            torch.from_numpy(plan.positions).to(device),
            self._pools.step(batch, torch.from_numpy(plan.slots).to(device)),
            torch.from_numpy(_kept_tokens(plan)).to(device),
        )
        return _result(logits, plan)

    def close(self) -> None:
        """Drop pools and model; on a GPU their memory goes back to the device."""
        device = self._model.device
        del self._pools, self._model
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _kept_tokens(plan: StepPlan) -> npt.NDArray[np.int64]:
    """Which tokens of the step give logits: those to sample from, then those of prompts."""
    if plan.prompt_scores is None:
        return plan.sample_tokens
    return np.concatenate([plan.sample_tokens, plan.prompt_scores.tokens])


def _result(logits: torch.Tensor, plan: StepPlan) -> StepResult:
    """Sample and score: `logits` `[n, vocabulary]` are of the step's `_kept_tokens`."""
    scores, num_samples = plan.prompt_scores, len(plan.sample_tokens)
    to_sample, of_prompts = logits[:num_samples], logits[num_samples:]
    processed, raised = process(to_sample, plan.sampling, plan.history)
    tokens = sample(processed, plan.sampling, plan.sample_indices, plan.history)
    token_ids = tokens.cpu().numpy()
    return StepResult(
        token_ids,
        logprobs=token_logprobs(to_sample, plan.sampling, token_ids),
        prompt_logprobs=logprobs_of(of_prompts, scores.token_ids, scores.num_top) if scores else (),
        failures=failures(token_ids, raised),
    )


def _first_tokens(num_tokens: int) -> StepPlan:
    """A step over the first tokens of a sequence that holds block 0."""
    one = np.ones(1, np.int32)
    positions = np.arange(num_tokens)
    return StepPlan(
        rows=np.zeros(1, np.int32),
        query_lens=one * num_tokens,
        kv_lens=one * num_tokens,
        token_ids=np.zeros(num_tokens, np.int64),
        positions=positions,
        slots=positions,
        block_tables=np.zeros((1, 1), np.int32),
        copies=np.empty((0, 2), np.int64),
        sample_tokens=np.array([num_tokens - 1]),
        sample_rows=np.zeros(1, np.int64),
        sample_indices=np.zeros(1, np.int64),
        sampling=SamplingRows.empty(1),
    )
