"""The prefix cache: who shares, who must not, and when."""

from functools import partial

import pytest

from kvpage import SamplingParams, StepFailed
from kvpage.allocators.fixed import FixedAllocator
from kvpage.block_manager import BlockManager
from kvpage.blocks import PoolGeometry, SequenceId
from kvpage.plan import StepPlan
from kvpage.prefix import BlockKey
from kvpage.testing import undisturbed
from tests.engine.runners import GatedRunner
from tests.engine.scenes import complete_all, fake_engine, scene

PROMPT = list(range(12))
PARAMS = SamplingParams(max_tokens=2)


def test_a_collision_of_hashes_shares_nothing() -> None:
    """Two different blocks under one digest: the tokens are compared."""
    geometry = PoolGeometry(num_blocks=8, block_size=4, max_model_len=32)
    blocks = BlockManager(geometry, FixedAllocator(geometry), max_num_seqs=3, prefix_cache=True)
    digest = b"the same for all"
    first, other = BlockKey(digest, b"", b"some tokens"), BlockKey(digest, b"", b"other tokens")
    later = BlockKey(digest, b"another parent", b"some tokens")
    blocks.admit(SequenceId(0), 0, 5, max_tokens=32)
    blocks.publish(SequenceId(0), [first], 0)

    assert blocks.match([other], 5) == blocks.match([later], 5) == []
    assert blocks.match([first], 5) == [*blocks.blocks_of(SequenceId(0))[:1]]
    blocks.admit(SequenceId(1), 1, 5, max_tokens=32)
    blocks.publish(SequenceId(1), [other], 0)  # the digest is taken: nothing is published
    blocks.verify()


async def test_salts_separate_tenants() -> None:
    """Equal prompts share blocks under one salt, none under different ones."""
    async with fake_engine() as engine:
        cached = []
        for salt in ("", "a", "", "a", "b"):
            async with engine.generate(PROMPT, PARAMS, salt=salt) as stream:
                tokens = [token async for token in stream]
            assert [token.id for token in tokens] == undisturbed(PROMPT, 2)
            assert tokens[-1].usage is not None
            cached.append(tokens[-1].usage.cached_tokens)
    assert cached == [0, 0, 8, 8, 0]


async def test_nothing_is_shared_before_the_step_that_wrote_it_has_ended() -> None:
    """Equal prompts that come in one step are each computed; those that come later are not."""
    async with scene(free_steps=0) as at:
        streams = [await at.engine.generate(PROMPT, PARAMS).__aenter__()]
        await at.runner.gate.held()
        streams += [await at.engine.generate(PROMPT, PARAMS).__aenter__() for _ in range(2)]
        at.runner.gate.allow()
        await at.runner.gate.held()  # the second step admitted two that found the first's blocks
        at.let_go()
        usages = [[token async for token in stream][-1].usage for stream in streams]
    assert [usage.cached_tokens for usage in usages if usage] == [0, 8, 8]


async def test_equal_prompts_of_one_step_are_each_computed() -> None:
    """Neither has written anything that the other could share."""
    async with scene(free_steps=0) as at:
        blocker = await at.engine.generate([99], SamplingParams(max_tokens=1)).__aenter__()
        await at.runner.gate.held()
        streams = [await at.engine.generate(PROMPT, PARAMS).__aenter__() for _ in range(2)]
        at.let_go()
        usages = [[token async for token in stream][-1].usage for stream in streams]
        await blocker.aclose()
    assert [usage.cached_tokens for usage in usages if usage] == [0, 0]


async def test_a_step_that_failed_has_published_nothing() -> None:
    """The same prompt again is computed from its beginning."""
    failures = [ArithmeticError("once")]

    def fail_once(_plan: StepPlan) -> None:
        if failures:
            raise failures.pop()

    async with fake_engine(GatedRunner(watch=fail_once)) as engine:
        with pytest.raises(StepFailed, match="once"):
            await engine.complete(PROMPT, PARAMS)
        completion = await engine.complete(PROMPT, PARAMS)
    assert completion.usage.cached_tokens == 0
    assert list(completion.token_ids) == undisturbed(PROMPT, 2)


async def test_cold_warm_and_preempted_runs_give_the_same() -> None:
    """Whichever part of a sequence comes from the cache."""
    geometry = PoolGeometry(num_blocks=10, block_size=4, max_model_len=40)
    async with fake_engine(geometry=geometry) as engine:
        for _ in range(2):
            call = partial(engine.complete, PROMPT, SamplingParams(max_tokens=24))
            found = await complete_all(engine, [call] * 3)
            assert [list(one.token_ids) for one in found] == [undisturbed(PROMPT, 24)] * 3
        assert engine.stats().preemptions > 0
        assert engine.stats().cached_prompt_tokens > 0
