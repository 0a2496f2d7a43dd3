"""Engines over one loaded model."""

import pytest

from kvpage import AsyncEngine, SamplingParams
from kvpage.model import share_model
from kvpage.pretrained import Pretrained
from tests.model.tiny import greedy, prompts, tiny_model


@pytest.mark.usefixtures("one_torch_thread")
async def test_engines_in_turn_share_what_was_loaded_once() -> None:
    """Each serves as transformers would, the second after the first gave its memory back."""
    model = tiny_model("llama")
    loaded = Pretrained("tiny", share_model(model), None)
    (prompt,) = prompts([11])
    outputs = []
    for allocator in ("fixed", "contiguous"):
        settings = {"allocator": allocator, "kv_memory": "64 tokens", "max_model_len": 32}
        async with AsyncEngine.from_loaded(loaded, **settings) as engine:
            answer = await engine.complete(prompt, SamplingParams(max_tokens=5, temperature=0))
            outputs.append(list(answer.token_ids))
    assert outputs == [greedy(model, prompt, 5)] * 2
