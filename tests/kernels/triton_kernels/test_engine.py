"""The engine end to end on the Triton kernels."""

import anyio
import pytest

from kvpage import AsyncEngine, SamplingParams
from tests.model.tiny import greedy, prompts, tiny_model

MAX_TOKENS = 6
PROMPTS = prompts([7, 8, 17])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_greedy_output_equals_generate(family: str, device: str) -> None:
    """Chunked prompts and decoding in one batch give, token for token, what transformers gives.

    Gemma 2 has layers with and without a sliding window, so two plans a step, and softcap.
    """
    model = tiny_model(family)
    expected = [greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs: dict[int, list[int]] = {}

    async with AsyncEngine(
        model=model.to(device),
        attention="triton",
        block_size=8,
        max_batch_tokens=12,
        kv_memory="256 tokens",
    ) as engine:

        async def complete(index: int) -> None:
            completion = await engine.complete(PROMPTS[index], params)
            outputs[index] = list(completion.token_ids)

        async with anyio.create_task_group() as tasks:
            for index in range(len(PROMPTS)):
                tasks.start_soon(complete, index)

    assert expected == [outputs[index] for index in range(len(PROMPTS))]
