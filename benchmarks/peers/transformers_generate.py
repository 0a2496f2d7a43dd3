"""transformers' `generate` as one would use it: left-padded batches of 16, each to its longest."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM
from workloads import Request

BATCH = 16


@contextmanager
def engine(model: str) -> Iterator[Callable[[list[Request]], int]]:
    """A loaded model; see `kvpage_engine.engine`."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def generate(requests: list[Request]) -> int:
        for first in range(0, len(requests), BATCH):
            _generate_batch(loaded, requests[first : first + BATCH])
        return sum(request.num_tokens for request in requests)

    yield generate


def _generate_batch(model: torch.nn.Module, batch: list[Request]) -> None:
    width = max(len(request.prompt) for request in batch)
    longest = max(request.num_tokens for request in batch)
    padding = [width - len(request.prompt) for request in batch]
    ids = [[2] * pad + request.prompt for pad, request in zip(padding, batch, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in padding]
    model.generate(
        torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        max_new_tokens=longest,
        min_new_tokens=longest,
        do_sample=False,
    )
