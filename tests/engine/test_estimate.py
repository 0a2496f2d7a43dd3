"""What a request would need, asked before it is made."""

import anyio
import attrs
import pytest

from kvpage import (
    EngineClosed,
    Estimate,
    PoolGeometry,
    RequestError,
    RequestTooLong,
    SamplingParams,
)
from tests.engine.conftest import Run
from tests.engine.runners import GEOMETRY, CharacterTokenizer, GatedRunner
from tests.engine.scenes import fake_engine, scene, until

TEN = [1] * 10
TINY = PoolGeometry(num_blocks=4, block_size=4, max_model_len=128)


def test_an_empty_engine_has_room(run: Run) -> None:
    """Ten prompt tokens and two outputs of seven, four tokens to a block."""

    async def main() -> None:
        async with fake_engine() as engine:
            found = await engine.estimate(TEN, SamplingParams(max_tokens=7, n=2))
            assert found == Estimate(
                prompt_tokens=10,
                max_output_tokens=14,
                prompt_blocks=3,
                max_blocks=2 * 5,
                refusal=None,
                fits=True,
                admitted_now=True,
            )
            await engine.idle()
            assert engine.stats().prompt_tokens == 0

    run(main)


def test_without_max_tokens_a_request_may_fill_the_context(run: Run) -> None:
    """Text is encoded to be counted."""

    async def main() -> None:
        async with fake_engine(tokenizer=CharacterTokenizer()) as engine:
            found = await engine.estimate("hello", SamplingParams())
            assert found.max_output_tokens == GEOMETRY.max_model_len - 5
            assert found.max_blocks == GEOMETRY.blocks_for(GEOMETRY.max_model_len)

    run(main)


@pytest.mark.parametrize(
    ("prompt_tokens", "params"),
    [
        (128, SamplingParams()),
        (100, SamplingParams(max_tokens=29)),
        (100, SamplingParams(max_tokens=None, min_tokens=29)),
        (200, SamplingParams(max_tokens=300)),
    ],
)
def test_a_refusal_says_what_submitting_would(
    run: Run, prompt_tokens: int, params: SamplingParams
) -> None:
    """The same sentence, as a value."""

    async def main() -> None:
        prompt = [1] * prompt_tokens
        async with fake_engine() as engine:
            found = await engine.estimate(prompt, params)
            with pytest.raises(RequestTooLong) as refusal:
                await engine.complete(prompt, params)
            assert (found.refusal, found.fits, found.admitted_now) == (
                str(refusal.value),
                False,
                False,
            )

    run(main)


def test_a_request_that_may_outgrow_the_pool_does_not_fit(run: Run) -> None:
    """It would be accepted, and may end by `OutgrewPool`."""

    async def main() -> None:
        async with fake_engine(GatedRunner(TINY), geometry=TINY) as engine:
            for max_tokens, fits in ((6, True), (7, False)):
                found = await engine.estimate(TEN, SamplingParams(max_tokens=max_tokens))
                assert (found.refusal, found.fits, found.admitted_now) == (None, fits, True)

    run(main)


def test_a_full_engine_admits_nobody_now(run: Run) -> None:
    """Neither when all places are taken, nor when somebody waits."""

    async def main() -> None:
        async with scene(free_steps=1, max_num_seqs=2) as at, anyio.create_task_group() as tasks:
            params = SamplingParams(max_tokens=60)
            tasks.start_soon(at.engine.complete, TEN, params)
            await until(lambda: at.engine.stats().num_running == 1)
            assert (await at.engine.estimate(TEN, params)).admitted_now
            tasks.start_soon(at.engine.complete, TEN, params)
            while at.engine.stats().num_running < 2:
                await at.runner.gate.held()
                at.runner.gate.allow()
            assert not (await at.engine.estimate(TEN, params)).admitted_now
            at.let_go()

    run(main)


def test_blocks_that_others_hold_are_no_room(run: Run) -> None:
    """A prompt of nearly the whole pool fits it, but not now."""

    async def main() -> None:
        geometry = attrs.evolve(GEOMETRY, num_blocks=8)
        runner = GatedRunner(geometry, free_steps=1)
        async with scene(runner, geometry=geometry) as at, anyio.create_task_group() as tasks:
            params = SamplingParams(max_tokens=2)
            prompt = [1] * 28
            assert (await at.engine.estimate(prompt, params)).admitted_now
            tasks.start_soon(at.engine.complete, TEN, params)
            await until(lambda: at.engine.stats().num_running == 1)
            found = await at.engine.estimate(prompt, params)
            assert (found.fits, found.admitted_now) == (True, False)
            at.let_go()

    run(main)


def test_what_makes_no_sense_raises(run: Run) -> None:
    """A prompt without tokens; an engine that was closed."""

    async def main() -> None:
        async with fake_engine() as engine:
            with pytest.raises(RequestError, match="empty"):
                await engine.estimate([])
        with pytest.raises(EngineClosed):
            await engine.estimate(TEN)

    run(main)
