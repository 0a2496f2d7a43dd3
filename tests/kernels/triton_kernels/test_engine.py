"""The engine end to end on the Triton kernels."""

import anyio
import numpy as np
import pytest
import torch

from kvpage import AsyncEngine, SamplingParams
from kvpage.allocators.fixed import FixedAllocator
from kvpage.batch import RunningBatch
from kvpage.block_manager import BlockManager
from kvpage.blocks import PoolGeometry, SequenceId
from kvpage.kernels.graphs import Run
from kvpage.model import share_model
from kvpage.runner import GraphOptions, ModelRunner
from kvpage.scheduler import Scheduler
from kvpage.sequence import NO_ADAPTER, Sequence
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


class EagerRecorder:
    """Records by keeping the computation itself, and counts replays."""

    replays = 0

    def warm_up(self, run: Run) -> None:
        """Run once."""
        run()

    def record(self, run: Run) -> Run:
        """Run again at each replay."""

        def replay() -> torch.Tensor:
            self.replays += 1
            return run()

        return replay


@pytest.mark.parametrize(("adapter", "replays"), [(NO_ADAPTER, 3), (0, 0)])
def test_a_runner_with_graphs_decodes_as_one_without(
    device: str, adapter: int, replays: int
) -> None:
    """Two sequences through static buffers of a larger batch: the same tokens, step by step.

    A step that has an adapter in it is not replayed: a graph knows none.
    """
    geometry = PoolGeometry(num_blocks=16, block_size=8, max_model_len=32)
    recorder = EagerRecorder()
    options = GraphOptions(max_sequences=3, make_recorder=lambda: recorder)
    model = share_model(tiny_model("llama").to(device))
    outputs = []
    for graphs in (None, options):
        runner = ModelRunner(model, geometry, "triton", graphs=graphs)
        runner.warm_up()
        batch = RunningBatch(3, geometry.max_model_len)
        blocks = BlockManager(geometry, FixedAllocator(geometry), max_num_seqs=3)
        scheduler = Scheduler(blocks, batch, max_batch_tokens=64)
        sequences = [
            Sequence(
                SequenceId(number),
                np.array(prompt, np.int32),
                len(prompt),
                len(prompt) + 4,
                SamplingParams(temperature=0),
                adapter=adapter if number == 0 else NO_ADAPTER,
            )
            for number, prompt in enumerate(PROMPTS[:2])
        ]
        for sequence in sequences:
            scheduler.add(sequence)
        while (plan := scheduler.schedule().plan) is not None:
            scheduler.update(plan, runner.execute(plan))
        outputs.append([sequence.tokens.tolist() for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert recorder.replays == replays  # the first of four tokens comes with the prompt
