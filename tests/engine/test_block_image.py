"""The pool as a viewer sees it, between two steps."""

import anyio
import numpy as np
import pytest

from kvpage import AsyncEngine, BlockImage, BlockMap, EngineClosed, SamplingParams
from tests.engine.runners import GEOMETRY, GatedRunner
from tests.engine.scenes import BACKENDS, asked, fake_engine

PROMPT = list(range(10))


async def seen(engine: AsyncEngine, runner: GatedRunner) -> tuple[BlockImage, BlockMap]:
    """Both views after the step that is being held."""
    found: list[BlockImage] = []

    async def look() -> None:
        found.append(await engine.block_image())

    await runner.gate.held()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        await asked(engine)
        runner.gate.allow(1)
    return found[0], found[0].block_map()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_image_is_the_block_map_in_arrays(backend: str) -> None:
    """The same sequences, blocks and tokens; copies, which later steps leave alone."""

    async def main() -> None:
        runner = GatedRunner(free_steps=0)
        async with (
            fake_engine(runner) as engine,
            engine.generate(PROMPT, SamplingParams(max_tokens=20), request_id="a"),
        ):
            image, block_map = await seen(engine, runner)
            [sequence], [plain] = image.sequences, block_map.sequences
            assert (sequence.request_id, sequence.number, sequence.first_block) == ("a", 0, 0)
            assert sequence.num_tokens == plain.num_tokens == len(PROMPT)
            assert tuple(sequence.blocks.tolist()) == plain.blocks
            assert len(plain.blocks) == GEOMETRY.blocks_for(len(PROMPT))
            assert image.statistics.pool.used_blocks == len(plain.blocks)
            kept = sequence.blocks.copy()
            runner.gate.open()
            await anyio.lowlevel.checkpoint()
        assert np.array_equal(sequence.blocks, kept)

    anyio.run(main, backend=backend)


async def test_what_is_kept_for_reuse_is_flagged() -> None:
    """In both views."""
    async with fake_engine() as engine:
        await engine.complete(PROMPT, SamplingParams(max_tokens=2))
        image, block_map = await engine.block_image(), await engine.block_map()
        cached = image.statistics.pool.cached_blocks
        assert sum(image.cached_flags) == len(block_map.cached) == cached > 0
        assert all(image.cached_flags[block] for block in block_map.cached)
        assert (image.sequences, image.preempted) == ((), ())


async def test_a_closed_engine_has_none() -> None:
    """A typed error."""
    engine = fake_engine()
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await engine.block_image()
