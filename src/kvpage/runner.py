"""Executes step plans on a model: copy, compute, sample."""

import torch

from kvpage.blocks import PoolGeometry
from kvpage.kernels import BackendName, attention_backend
from kvpage.kernels.work import AttentionBatch
from kvpage.model import KVPools, PagedModel
from kvpage.plan import StepPlan, StepResult
from kvpage.sampling import sample, token_logprobs


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
            torch.from_numpy(plan.sample_tokens).to(device),
        )
        tokens = sample(logits, plan.sampling, plan.sample_indices, plan.history)
        logprobs = token_logprobs(logits, plan.sampling, tokens)
        return StepResult(tokens.cpu().numpy(), logprobs)

    def close(self) -> None:
        """Drop pools and model; on a GPU their memory goes back to the device."""
        device = self._model.device
        del self._pools, self._model
        if device.type == "cuda":
            torch.cuda.empty_cache()
