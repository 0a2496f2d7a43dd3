"""Tiny random-weight models of real families, built here, no download."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

VOCABULARY = 128
MAX_LEN = 256

_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _SHAPE.items() if name not in names}


FAMILIES: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE),
    "mistral": lambda: transformers.MistralConfig(**_SHAPE, sliding_window=8),
    "gemma2": lambda: transformers.Gemma2Config(
        **_SHAPE, sliding_window=8, query_pre_attn_scalar=16, attn_logit_softcapping=2.0
    ),
    "phi3": lambda: transformers.Phi3Config(**_without("head_dim")),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=MAX_LEN,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_without("num_key_value_heads", "head_dim")),
}


def tiny_model(family: str) -> Any:
    """A model of `family`, the same random weights each time, with transformers' own attention."""
    torch.manual_seed(0)
    # The eager implementation is the plainest oracle, and the only one with softcap on a CPU.
    model = transformers.AutoModelForCausalLM.from_config(
        FAMILIES[family](), attn_implementation="eager"
    )
    return model.eval()


def prompts(lengths: list[int]) -> list[list[int]]:
    """Random prompts of these lengths, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers itself generates for one prompt."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
