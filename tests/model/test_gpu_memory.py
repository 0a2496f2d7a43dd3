"""The largest step, which decides how much memory a GPU has left for K and V."""

import pytest
import torch

from kvpage.gpu_memory import run_largest_step
from kvpage.model import share_model
from tests.model.tiny import tiny_model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_largest_step_computes_all_tokens_and_samples_all_sequences(family: str) -> None:
    """As many logits are kept as sequences may be sampled."""
    model = tiny_model(family)
    kept: list[torch.Size] = []
    paged = share_model(model)
    head = paged.module.get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, output: kept.append(output.shape))
    run_largest_step(paged, max_batch_tokens=40, max_num_seqs=7)
    assert kept == [(1, 7, model.config.vocab_size)]
