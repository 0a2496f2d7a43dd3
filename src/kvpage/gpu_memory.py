"""How much of a GPU's memory is left for K and V."""

import numpy as np
import torch

from kvpage.config import GPU_KV_SHARE
from kvpage.kernels import AttentionOptions
from kvpage.model import PagedModel
from kvpage.sampling import SamplingRows, sample


def gpu_kv_bytes(model: PagedModel, *, max_batch_tokens: int, max_num_seqs: int) -> int:
    """KV memory on a GPU unless asked otherwise: 90 % of what is free after the largest step."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    run_largest_step(model, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs)
    needed = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    free, _total = torch.cuda.mem_get_info(model.device)
    return int(GPU_KV_SHARE * max(0, free - needed))


def run_largest_step(model: PagedModel, *, max_batch_tokens: int, max_num_seqs: int) -> None:
    """Compute as many tokens as a step may have, and sample as many sequences, without pools."""
    tokens = torch.zeros(max_batch_tokens, dtype=torch.int64, device=model.device)
    kept = torch.arange(min(max_num_seqs, max_batch_tokens), device=model.device)
    logits = model.logits(
        tokens, torch.arange(max_batch_tokens, device=model.device), _NoKV(), kept
    )
    rows = SamplingRows.empty(len(kept))
    rows.temperature[:] = 1.0
    rows.top_p[:] = 0.9
    sample(logits, rows, np.zeros(len(kept), np.int64))


class _NoKV:
    """Attention that keeps nothing: each token sees itself alone."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
