"""Sizes of models that trip kernels and loaders: greedy output equals transformers' `generate`."""

from typing import Any

import anyio
import attrs
import pytest
import torch
import transformers

from kvpage import AsyncEngine, SamplingParams
from tests.model.tiny import greedy, prompts

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPTS = prompts([3, 8, 17])
MAX_TOKENS = 8


@attrs.frozen
class Shape:
    """What a model of this case is like; all others are the plainest Llama."""

    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    vocab_size: int = 128
    tied: bool = False

    def model(self) -> Any:
        """Random weights, the same each time."""
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=16 * self.heads[0],
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=self.heads[0],
            num_key_value_heads=self.heads[1],
            head_dim=self.head_dim,
            max_position_embeddings=256,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        return model.eval()


SHAPES = {
    "GQA 9:3": Shape(heads=(9, 3)),
    "GQA 7:1": Shape(heads=(7, 1)),
    "GQA 5:1": Shape(heads=(5, 1)),
    "heads of 80": Shape(head_dim=80),
    "heads of 96": Shape(head_dim=96),
    "heads of 112": Shape(head_dim=112),
    "a vocabulary of 131": Shape(vocab_size=131),
    "a vocabulary of 193, tied": Shape(vocab_size=193, tied=True),
    "GQA 9:3, heads of 80, tied": Shape(heads=(9, 3), head_dim=80, vocab_size=131, tied=True),
}


@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("name", SHAPES)
async def test_a_model_of_an_odd_shape_equals_generate(name: str, block_size: int) -> None:
    """Heads in groups of any size, head dimensions and vocabularies that are no powers of two."""
    model = SHAPES[name].model()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    found: dict[int, list[int]] = {}
    async with AsyncEngine(model=model, block_size=block_size, kv_memory="512 tokens") as engine:

        async def one(index: int) -> None:
            found[index] = list((await engine.complete(PROMPTS[index], params)).token_ids)

        async with anyio.create_task_group() as tasks:
            for index in range(len(PROMPTS)):
                tasks.start_soon(one, index)
    expected = [greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert [found[index] for index in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 64])
async def test_the_block_size_is_the_one_that_was_asked_for(block_size: int) -> None:
    """No backend makes another of it."""
    model = Shape().model()
    async with AsyncEngine(model=model, block_size=block_size, kv_memory="256 tokens") as engine:
        assert engine.config.block_size == block_size
        assert engine.geometry.block_size == block_size
        assert engine.stats().pool.block_size == block_size
