"""Lengths around multiples of the block size, and around what a model and a pool have room for."""

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import pytest

from kvpage import (
    AsyncEngine,
    PoolGeometry,
    RequestError,
    RequestTooLong,
    SamplingParams,
)
from kvpage.testing import undisturbed
from tests.engine.scenes import check_ledger, fake_engine

BLOCK_SIZES = (1, 3, 8, 16, 24, 64)
STRATEGIES = ("fixed", "dynamic", "contiguous:reserve=request", "contiguous:reserve=model")


def around_multiples(block_size: int) -> list[int]:
    """`k * block_size - 1`, `k * block_size` and `k * block_size + 1`, for k of 1 and 2."""
    return sorted({k * block_size + more for k in (1, 2) for more in (-1, 0, 1)} - {0})


async def check_all(engine: AsyncEngine, alone: Mapping[int, list[int]]) -> None:
    """All prompts of these lengths, to ends at these lengths, generate what each does alone."""

    async def check_one(prompt_tokens: int, max_tokens: int) -> None:
        prompt, params = list(range(prompt_tokens)), SamplingParams(max_tokens=max_tokens)
        completion = await engine.complete(prompt, params)
        assert list(completion.token_ids) == alone[prompt_tokens][:max_tokens]
        assert completion.usage.cached_tokens < prompt_tokens

    async with anyio.create_task_group() as tasks:
        for prompt_tokens, output in alone.items():
            for total in {*alone, prompt_tokens + len(output)}:
                if total > prompt_tokens:
                    tasks.start_soon(check_one, prompt_tokens, total - prompt_tokens)
    await engine.idle()
    assert engine.stats().pool.used_blocks == 0
    check_ledger(engine)


@pytest.mark.parametrize("allocator", STRATEGIES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
async def test_lengths_around_multiples_of_the_block_size(block_size: int, allocator: str) -> None:
    """Of the prompt, and of prompt and output together; cold, and warm from the prefix cache."""
    longest = 2 * block_size + 2
    geometry = PoolGeometry(-(-3 * longest // block_size), block_size, longest)
    alone = {n: undisturbed(range(n), longest - n) for n in around_multiples(block_size)}
    async with fake_engine(
        geometry=geometry, allocator=allocator, max_batch_tokens=block_size + 1
    ) as engine:
        await check_all(engine, alone)
        await check_all(engine, alone)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
async def test_a_prompt_of_whole_blocks_sent_twice_computes_its_last_block(block_size: int) -> None:
    """At least one token must be computed, since its logits are needed."""
    geometry = PoolGeometry(16, block_size, 8 * block_size)
    prompt, params = list(range(3 * block_size)), SamplingParams(max_tokens=1)
    async with fake_engine(geometry=geometry) as engine:
        cold = await engine.complete(prompt, params)
        warm = await engine.complete(prompt, params)
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 2 * block_size)
    assert warm.token_ids == cold.token_ids


LIMITS = {
    "max_model_len is 25": PoolGeometry(num_blocks=30, block_size=3, max_model_len=25),
    "the pool has room for 24": PoolGeometry(num_blocks=8, block_size=3, max_model_len=60),
}


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("max_tokens", [1, None])
@pytest.mark.parametrize("limit", LIMITS)
async def test_prompts_about_as_long_as_can_be(
    limit: str, max_tokens: int | None, more: int
) -> None:
    """The longest prompt is served; longer ones are refused at once, with both numbers."""
    geometry = LIMITS[limit]
    longest = min(geometry.max_model_len - 1, geometry.num_slots)
    prompt = list(range(longest + more))
    async with fake_engine(geometry=geometry) as engine:
        if more > 0:
            with pytest.raises(
                RequestTooLong, match=f"the prompt has {len(prompt)} tokens, and {limit}"
            ):
                await engine.complete(prompt, SamplingParams(max_tokens=max_tokens))
            assert engine.stats().steps == 0
            return
        stream = engine.generate(prompt, SamplingParams(max_tokens=max_tokens))
        first = await anext(stream)
        assert [first.id] == undisturbed(prompt, 1)
        await stream.aclose()


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_no_tokens_are_no_request(max_tokens: int) -> None:
    """There is nothing to generate, so the parameters cannot be made."""
    with pytest.raises(ValueError, match=rf"max_tokens must be .* at least 1, got {max_tokens}"):
        SamplingParams(max_tokens=max_tokens)


class Beginning:
    """A tokenizer that may begin every text with a token of its own."""

    def __init__(self, *, bos: Sequence[int]) -> None:
        self._bos = list(bos)

    def __call__(self, prompt: str) -> dict[str, list[int]]:
        return {"input_ids": [*self._bos, *map(ord, prompt)]}

    def convert_tokens_to_ids(self, token: str) -> None:
        """No token has the name of a byte."""

    def decode(self, ids: Sequence[int], **_options: Any) -> str:
        return "".join(map(chr, ids))


async def test_an_empty_prompt_is_served_if_the_tokenizer_begins_it() -> None:
    """With a BOS token there is something to continue; without one it is refused."""
    async with fake_engine(tokenizer=Beginning(bos=[7])) as engine:
        completion = await engine.complete("", SamplingParams(max_tokens=3))
        assert list(completion.token_ids) == undisturbed([7], 3)
    async with fake_engine(tokenizer=Beginning(bos=[])) as engine:
        with pytest.raises(RequestError, match="the prompt is empty: it has no tokens"):
            await engine.complete("")
