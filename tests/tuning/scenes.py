"""Workloads and machines for the tests of tuning."""

import numpy as np

from kvpage.comparison import Workload
from kvpage.traffic import TraceRequest
from kvpage.tuning import SearchSpace
from kvpage.tuning.cost import MachineCost

COST = MachineCost.linear(
    base_s=0.02,
    per_token_s=0.001,
    per_kv_token_s=2e-6,
    bytes_per_token=1024,
    block_sizes=(8, 16, 32, 64),
)
"""A token has 1 KiB of K and V, so 1 MiB has room for 1,024."""

SPACE = SearchSpace(
    block_sizes=(8, 32),
    memory_shares=(0.25, 0.5, 1.0),
    max_num_seqs=(4, 16, 64),
    max_batch_tokens=(64, 256),
)


def workload(count: int, *, prompt: float = 4.0, output: float = 3.0, seed: int = 3) -> Workload:
    """Requests of lognormal lengths, one a second."""
    random = np.random.default_rng(seed)
    prompts = random.lognormal(prompt, 0.6, count).astype(int) + 1
    outputs = random.lognormal(output, 0.6, count).astype(int) + 1
    requests = (
        TraceRequest(float(second), int(p), int(o))
        for second, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    )
    return Workload("lognormal", tuple(requests))
