"""Several outputs of one prompt: `n` above 1."""

from typing import Any

import anyio
import pytest

from kvpage import AsyncEngine, Completion, RequestFailed, SamplingParams, Token
from kvpage.testing import undisturbed
from tests.engine.scenes import fake_engine, scene
from tests.model.tiny import prompts, tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
STRATEGIES = ("fixed", "dynamic", "contiguous:reserve=request")


@pytest.mark.parametrize("allocator", STRATEGIES)
@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_every_choice_is_generated_as_if_alone(allocator: str, prefix_cache: bool) -> None:
    """Each token says which choice it belongs to, and each choice has an end of its own."""
    params = SamplingParams(n=3, max_tokens=7)
    async with fake_engine(allocator=allocator, prefix_cache=prefix_cache) as engine:
        tokens = [token async for token in engine.generate(PROMPT, params)]
        await engine.idle()
        assert engine.stats().pool.used_blocks == 0
        assert engine.stats().requests_finished == 1
    for choice in range(3):
        own = [token for token in tokens if token.choice == choice]
        assert [token.id for token in own] == undisturbed(PROMPT, 7)
        assert [token.index for token in own] == list(range(7))
        assert [token.finish_reason for token in own] == [None] * 6 + ["length"]


async def test_the_prompt_is_computed_once() -> None:
    """The other choices take all but its last token from the first."""
    async with fake_engine(prefix_cache=False) as engine:
        completion = await engine.complete(PROMPT, SamplingParams(n=4, max_tokens=5))
        cached = [choice.usage.cached_tokens for choice in completion.choices]
    assert cached == [0, *[len(PROMPT) - 1] * 3]


async def test_a_single_token_each() -> None:
    """The first choice ends before the others begin."""
    async with fake_engine() as engine:
        completion = await engine.complete(PROMPT, SamplingParams(n=3, max_tokens=1))
    assert [choice.token_ids for choice in completion.choices] == [
        tuple(undisturbed(PROMPT, 1))
    ] * 3


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
async def test_leaving_ends_all_choices(steps: int) -> None:
    """Before the first token, when the others begin, and while all run."""
    params = SamplingParams(n=3, max_tokens=20)
    async with scene(free_steps=steps) as at:
        async with at.engine.generate(PROMPT, params, request_id="one") as stream:
            seen: list[Token] = []
            while len(seen) < steps:
                seen.append(await anext(stream))
        at.let_go()
        await at.engine.idle()
        assert at.engine.stats().pool.used_blocks == 0
        assert at.engine.stats().requests_cancelled == 1
        again = await at.engine.complete(PROMPT, params, request_id="one")
        assert len(again.choices) == 3


async def test_a_failing_choice_ends_its_request_and_no_other() -> None:
    """A processor that raises for the second choice's tokens."""

    def picky(token_ids: object, logits: object) -> object:
        picky.calls += 1  # type: ignore[attr-defined]
        if picky.calls == 4:  # type: ignore[attr-defined]
            raise LookupError("enough")
        return logits

    picky.calls = 0  # type: ignore[attr-defined]
    params = SamplingParams(n=2, max_tokens=8, temperature=0, logits_processors=[picky])
    async with AsyncEngine(model=tiny_model("llama"), kv_memory="512 tokens") as engine:

        async def other() -> None:
            completion = await engine.complete(PROMPT, SamplingParams(temperature=0, max_tokens=20))
            assert len(completion.token_ids) == 20

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            with pytest.raises(RequestFailed, match="enough"):
                await engine.complete(PROMPT, params)
        await engine.idle()
        assert engine.stats().pool.used_blocks == 0
        assert engine.stats().requests_failed == 1


async def sampled(n: int, **settings: Any) -> Completion:
    params = SamplingParams(n=n, max_tokens=12, seed=7, temperature=1.5)
    settings = {"kv_memory": "1024 tokens", **settings}
    async with AsyncEngine(model=tiny_model("llama"), block_size=8, **settings) as engine:
        return await engine.complete(prompts([21])[0], params)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
async def test_choices_differ_and_a_seed_repeats_them(preempt: str) -> None:
    """The first choice is what the seed gives alone; preemption changes none of them."""
    roomy = await sampled(4)
    alone = await sampled(1)
    tight = await sampled(4, kv_memory="56 tokens", max_model_len=40, preempt=preempt)
    chosen = [choice.token_ids for choice in roomy.choices]
    assert len(set(chosen)) == 4
    assert chosen[0] == alone.token_ids
    assert [choice.token_ids for choice in tight.choices] == chosen
    assert sum(choice.usage.preemptions for choice in tight.choices) > 0
