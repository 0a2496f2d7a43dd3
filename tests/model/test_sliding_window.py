"""A model whose every layer has a sliding window: long texts in a pool of little more than it."""

from functools import cache
from typing import Any

import anyio
import pytest

from kvpage import AsyncEngine, RequestTooLong, SamplingParams
from tests.model.tiny import greedy, prompts, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

WINDOW = 8
MAX_TOKENS = 30
PROMPTS = prompts([WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 100])
BLOCK_SIZE = 4
POOL: dict[str, Any] = {"block_size": BLOCK_SIZE, "kv_memory": "48 tokens"}
"""Half as many tokens as the longest prompt."""


@cache
def mistral() -> Any:
    return tiny_model("mistral")


@cache
def expected() -> list[list[int]]:
    return [greedy(mistral(), prompt, MAX_TOKENS) for prompt in PROMPTS]


async def generate(engine: AsyncEngine, chosen: list[list[int]]) -> list[list[int]]:
    """All prompts at once."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs: list[list[int]] = [[] for _ in chosen]

    async def one(index: int) -> None:
        outputs[index] = list((await engine.complete(chosen[index], params)).token_ids)

    async with anyio.create_task_group() as tasks:
        for index in range(len(chosen)):
            tasks.start_soon(one, index)
    await engine.idle()
    return outputs


@pytest.mark.parametrize("allocator", ["fixed", "dynamic:min_block=2,max_extent=4"])
@pytest.mark.parametrize("budget", [512, 16, 3])
async def test_equals_generate_one_after_another(allocator: str, budget: int) -> None:
    """Prompts about the window, chunks longer than it, outputs far beyond it.

    What was given back is poisoned, so that no kernel reads it unnoticed.
    """
    settings = {**POOL, "prefix_cache": False, "checks": "everything"}
    settings |= {"allocator": allocator, "max_batch_tokens": budget}
    async with AsyncEngine(model=mistral(), **settings) as engine:
        assert engine.geometry.num_slots < len(PROMPTS[-1])
        outputs = [(await generate(engine, [prompt]))[0] for prompt in PROMPTS]
        assert engine.stats().pool.used_blocks == 0
    assert outputs == expected()


@pytest.mark.parametrize("attention", ["numba", "reference"])
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
async def test_equals_generate_under_preemption(preempt: str, attention: str) -> None:
    """All at once in a pool that has no room for all windows."""
    settings = {**POOL, "kv_memory": "32 tokens", "preempt": preempt, "attention": attention}
    several = [*PROMPTS[:1] * 5, *PROMPTS]
    async with AsyncEngine(model=mistral(), max_batch_tokens=11, **settings) as engine:
        outputs = await generate(engine, several)
        stats = engine.stats()
    assert outputs == [*expected()[:1] * 5, *expected()]
    assert stats.preemptions > 0
    assert (stats.recomputed_tokens == 0) == (preempt == "swap")


async def test_a_long_text_holds_the_blocks_of_its_window() -> None:
    """As many as any window lies in, however long it becomes; the block map shows these."""
    used = []
    async with AsyncEngine(model=mistral(), prefix_cache=False, **POOL) as engine:
        params = SamplingParams(temperature=0, max_tokens=100)
        async for token in engine.generate(PROMPTS[-1], params):
            if 0 < token.index < 99:
                block_map = await engine.block_map()
                [blocks] = [sequence.blocks for sequence in block_map.sequences] or [()]
                used.append(len(blocks))
        most = engine.geometry.blocks_for_window(WINDOW)
    assert max(used) == most == 3


async def test_equal_prompts_share_what_is_in_the_window() -> None:
    """Blocks that fell out of the window are cached, and found by the next request."""
    async with AsyncEngine(
        model=mistral(), block_size=BLOCK_SIZE, kv_memory="400 tokens"
    ) as engine:
        cold = await generate(engine, [PROMPTS[-1]])
        warm = await generate(engine, [PROMPTS[-1]] * 2)
        assert engine.stats().cached_prompt_tokens == 2 * 96
    assert [*cold, *warm] == [expected()[-1]] * 3


@pytest.mark.parametrize("num_tokens", [13, 16, 17, 24])
async def test_choices_share_what_is_in_the_window(num_tokens: int) -> None:
    """Greedy choices of one prompt are all what one is alone."""
    prompt = PROMPTS[-1][:num_tokens]
    params = SamplingParams(temperature=0, max_tokens=20, n=3)
    async with AsyncEngine(model=mistral(), **{**POOL, "kv_memory": "96 tokens"}) as engine:
        completion = await engine.complete(prompt, params)
    alone = greedy(mistral(), prompt, 20)
    assert [list(choice.token_ids) for choice in completion.choices] == [alone] * 3


async def test_contiguous_keeps_its_reservation() -> None:
    """A strategy that does not share gives nothing back before the end; the pool is the limit."""
    settings = {**POOL, "allocator": "contiguous"}
    async with AsyncEngine(model=mistral(), **settings) as engine:
        assert engine.config.max_model_len == 48
        params = SamplingParams(temperature=0, max_tokens=20)
        with pytest.raises(RequestTooLong, match="the prompt has 100 tokens"):
            await engine.complete(PROMPTS[-1], params)
        completion = await engine.complete(PROMPTS[2], params)
    assert list(completion.token_ids) == expected()[2][:20]


async def test_a_pool_smaller_than_the_window_limits_the_length() -> None:
    """The window must fit wherever a block begins."""
    async with AsyncEngine(model=mistral(), block_size=4, kv_memory="8 tokens") as engine:
        assert engine.config.max_model_len == 8
        params = SamplingParams(temperature=0)
        completion = await engine.complete(PROMPTS[0][:4], params)
    assert list(completion.token_ids) == greedy(mistral(), PROMPTS[0][:4], 4)
