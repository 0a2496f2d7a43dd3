"""transformers' own continuous batching."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from workloads import Request


@contextmanager
def engine(model: str) -> Iterator[Callable[[list[Request]], int]]:
    """A running manager; see `kvpage_engine.engine`."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    settings = GenerationConfig(
        max_new_tokens=512, do_sample=False, eos_token_id=-1, pad_token_id=2
    )
    # By itself it takes nearly all memory of the machine, which the other engines need too.
    limits = ContinuousBatchingConfig(page_size=256, num_blocks=32768 // 256, max_batch_tokens=512)
    manager = loaded.init_continuous_batching(
        generation_config=settings, continuous_batching_config=limits
    )
    manager.start()
    runs = 0

    def generate(requests: list[Request]) -> int:
        nonlocal runs
        runs += 1
        for index, request in enumerate(requests):
            manager.add_request(
                request.prompt,
                request_id=f"{runs}-{index}",
                max_new_tokens=request.num_tokens,
            )
        num_open, num_tokens = len(requests), 0
        while num_open:
            result = manager.get_result(timeout=5)
            if result is not None and result.is_finished():
                num_open -= 1
                num_tokens += len(result.generated_tokens)
        return num_tokens

    try:
        yield generate
    finally:
        manager.stop(block=True)
