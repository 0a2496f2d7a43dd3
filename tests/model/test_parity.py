"""Greedy output equals transformers' own `generate`, token for token, in float32."""

from functools import cache, partial
from itertools import product
from typing import Any

import pytest

from kvpage import AsyncEngine, EngineStatistics, SamplingParams
from kvpage.model import share_model
from tests.engine.scenes import complete_all
from tests.model.tiny import FAMILIES, greedy, prompts, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK_SIZES = (1, 8, 16, 24, 64)
BUDGETS = (1, 7, 16, 512)
MAX_TOKENS = 12
# Around multiples of the block sizes, and across the sliding window of 8.
PROMPTS = prompts([1, 7, 8, 9, 15, 16, 17, 40])

EVERY_SETTING = list(product(BLOCK_SIZES, BUDGETS))
SOME_SETTINGS = [(1, 512), (8, 7), (16, 1), (24, 16), (64, 512)]


@cache
def model_of(family: str) -> Any:
    return tiny_model(family)


@cache
def expected(family: str) -> list[list[int]]:
    return [greedy(model_of(family), prompt, MAX_TOKENS) for prompt in PROMPTS]


async def generate(
    engine: AsyncEngine, chosen: list[list[int]], max_tokens: int = MAX_TOKENS
) -> list[list[int]]:
    """All prompts at once through one engine."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    completions = await complete_all(
        engine, [partial(engine.complete, prompt, params) for prompt in chosen]
    )
    return [list(completion.token_ids) for completion in completions]


async def run(family: str, **settings: Any) -> tuple[list[list[int]], EngineStatistics]:
    async with AsyncEngine(model=model_of(family), **settings) as engine:
        outputs = await generate(engine, PROMPTS)
        return outputs, engine.stats()


@pytest.mark.parametrize(("block_size", "budget"), EVERY_SETTING)
async def test_llama_equals_generate_for_every_block_size_and_budget(
    block_size: int, budget: int
) -> None:
    """Eight prompts at once, chunked or not, whatever the block size."""
    outputs, _ = await run(
        "llama", block_size=block_size, max_batch_tokens=budget, kv_memory="4096 tokens"
    )
    assert outputs == expected("llama")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_size", "budget"), SOME_SETTINGS)
async def test_every_family_equals_generate(family: str, block_size: int, budget: int) -> None:
    """GQA, sliding windows, softcap, learned positions, with and without keyword pass-through."""
    outputs, _ = await run(
        family, block_size=block_size, max_batch_tokens=budget, kv_memory="4096 tokens"
    )
    assert outputs == expected(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_size", "budget"), EVERY_SETTING)
async def test_every_family_equals_generate_in_every_setting(
    family: str, block_size: int, budget: int
) -> None:
    """The whole product."""
    outputs, _ = await run(
        family, block_size=block_size, max_batch_tokens=budget, kv_memory="4096 tokens"
    )
    assert outputs == expected(family)


@pytest.mark.parametrize("family", FAMILIES)
async def test_one_prompt_alone_equals_generate(family: str) -> None:
    """Nothing depends on company."""
    async with AsyncEngine(model=model_of(family), kv_memory="512 tokens") as engine:
        outputs = [(await generate(engine, [prompt]))[0] for prompt in PROMPTS]
    assert outputs == expected(family)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_size", "budget"), [(1, 512), (8, 16), (16, 7)])
async def test_constant_preemption_changes_nothing(
    family: str, block_size: int, budget: int, preempt: str
) -> None:
    """A pool that holds little more than the longest sequence takes blocks away all the time."""
    longest = max(len(prompt) for prompt in PROMPTS) + MAX_TOKENS
    if share_model(model_of(family)).window:  # sequences give back what is behind it
        longest = longest // 2 + block_size
    outputs, stats = await run(
        family,
        block_size=block_size,
        max_batch_tokens=budget,
        kv_memory=f"{longest + block_size} tokens",
        prefix_cache=False,
        preempt=preempt,
    )
    assert outputs == expected(family)
    assert stats.preemptions > 0
    if preempt == "swap":
        assert stats.recomputed_tokens == 0
        assert stats.swap.swapped_in_blocks == stats.swap.swapped_out_blocks > 0


async def test_equal_prompts_share_blocks_and_give_equal_output() -> None:
    """Cold, and warm from the prefix cache: the same tokens, fewer of them computed."""
    prompt = prompts([48])[0]
    alone = greedy(model_of("llama"), prompt, MAX_TOKENS)
    async with AsyncEngine(model=model_of("llama"), block_size=16, max_model_len=128) as engine:
        cold = await generate(engine, [prompt])
        warm = await generate(engine, [prompt, prompt])
        await engine.idle()
        assert engine.stats().cached_prompt_tokens == 2 * 32  # the last token is always computed
    assert [*cold, *warm] == [alone] * 3


async def test_the_callers_model_is_not_changed() -> None:
    """Same configuration, same attention, same output after an engine has used its weights."""
    model = tiny_model("llama")
    before = greedy(model, PROMPTS[3], 5)
    implementation = model.config._attn_implementation
    async with AsyncEngine(model=model, kv_memory="512 tokens") as engine:
        await generate(engine, PROMPTS[:2])
        assert greedy(model, PROMPTS[3], 5) == before
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("attention", ["numba", "reference"])
async def test_k_and_v_in_bfloat16_take_half_the_memory(attention: str) -> None:
    """The setting is visible, a token takes half, and rounding moves few tokens."""
    outputs, _ = await run("llama", attention=attention)
    async with AsyncEngine(
        model=model_of("llama"), attention=attention, kv_dtype="bfloat16", kv_memory="64 KiB"
    ) as engine:
        in_half = await generate(engine, PROMPTS)
        assert engine.config.kv_dtype == "bfloat16"
        # 2 layers, K and V of 2 heads of 16 numbers, 2 bytes each.
        assert engine.geometry.num_slots == 64 * 1024 // (2 * 2 * 2 * 16 * 2)
    same = [a == b for one, other in zip(outputs, in_half, strict=True)
            for a, b in zip(one, other, strict=True)]  # fmt: skip
    assert sum(same) > 0.7 * len(same)
