"""The engine on a GPU, end to end: prefill and decode throughput, with and without CUDA graphs.

    python benchmarks/gpu_engine.py
    python benchmarks/gpu_engine.py --model meta-llama/Llama-3.2-1B

Without `--model`, the model has the shape of Llama 3.2 1B and random weights, so that nothing is
downloaded; that changes the text, not the work. Every engine gets the same requests at once:
greedy, no end of text, all lengths fixed in advance. Beside ours stands transformers' own
continuous batching, on the same model object.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import attrs
import numpy as np
import torch
import transformers

from kvpage import AsyncEngine, SamplingParams

LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SETTINGS = {
    "kv_memory": "8GiB",
    "max_num_seqs": 256,
    "max_batch_tokens": 8192,
    # The warm-up sends the same prompts: they shall be computed again.
    "prefix_cache": False,
}
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 30000


@attrs.frozen
class Load:
    """Requests that arrive at once.

    Attributes:
        name: of the table's line.
        prompts: token ids of each.
        output_tokens: that each generates.
    """

    name: str
    prompts: Sequence[list[int]]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))


def load_of(name: str, requests: int, prompt_tokens: int, output_tokens: int) -> Load:
    """Random prompts of about this length, the same each time."""
    random = np.random.default_rng(0)
    lengths = random.integers(prompt_tokens // 2, prompt_tokens * 3 // 2, requests)
    prompts = [random.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, n).tolist() for n in lengths]
    return Load(name, prompts, output_tokens)


LOADS = (
    load_of("prefill, 64 prompts", 64, 1024, 1),
    load_of("decode, 1 request", 1, 128, 256),
    load_of("decode, 16 requests", 16, 128, 256),
    load_of("decode, 128 requests", 128, 128, 256),
    load_of("mixed, 256 requests", 256, 512, 128),
)


def model_of(name: str | None, device: str) -> Any:
    """A model on the device, in bfloat16."""
    if name is None:
        with torch.device(device):
            config = transformers.LlamaConfig(**LLAMA_1B)
            return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    return model.to(device)


async def with_kvpage(model: Any, load: Load, **settings: Any) -> float:
    """Seconds for a load, after one that warms up."""
    params = SamplingParams(temperature=0, max_tokens=load.output_tokens, ignore_eos=True)

    async def all_of(engine: AsyncEngine) -> None:
        async with anyio.create_task_group() as tasks:
            for prompt in load.prompts:
                tasks.start_soon(engine.complete, prompt, params)

    async with AsyncEngine(model=model, **settings) as engine:
        await all_of(engine)
        begin = time.perf_counter()
        await all_of(engine)
        return time.perf_counter() - begin


def with_transformers(model: Any, load: Load) -> float:
    """Seconds for a load in transformers' continuous batching, after one that warms up."""
    settings = transformers.GenerationConfig(
        max_new_tokens=load.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    manager = model.init_continuous_batching(generation_config=settings)
    manager.start()
    try:
        drain(manager, load)
        begin = time.perf_counter()
        drain(manager, load)
        return time.perf_counter() - begin
    finally:
        manager.stop(block=True)


def drain(manager: Any, load: Load) -> None:
    """Submit all requests, and wait for the last."""
    for prompt in load.prompts:
        manager.add_request(prompt, max_new_tokens=load.output_tokens)
    finished = 0
    while finished < len(load.prompts):
        result = manager.get_result(timeout=5)
        finished += result is not None and result.is_finished()


def print_line(load: Load, engines: Sequence[Callable[[], float]]) -> None:
    """Prompt and output tokens a second for each engine, given what measures its seconds."""
    cells = []
    for run in engines:
        seconds = run()
        output_tokens = len(load.prompts) * load.output_tokens
        cells.append(f"{load.prompt_tokens / seconds:.0f} + {output_tokens / seconds:.0f}")
    print(f"| {load.name} | {' | '.join(cells)} |", flush=True)


def report(model: Any, loads: Sequence[Load]) -> None:
    """Print the table: prompt tokens + output tokens a second."""

    def ours(load: Load, *, cuda_graphs: bool) -> float:
        async def run() -> float:
            return await with_kvpage(model, load, cuda_graphs=cuda_graphs, **SETTINGS)

        return anyio.run(run)

    print("| load | kvpage | kvpage without graphs | transformers |\n|---|---|---|---|")
    for load in loads:
        with_graphs = partial(ours, load, cuda_graphs=True)
        without_graphs = partial(ours, load, cuda_graphs=False)
        print_line(load, [with_graphs, without_graphs, partial(with_transformers, model, load)])


def main() -> None:
    """Measure, if there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a hub id or folder; by default random weights")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU is at hand: nothing was measured.")
        return
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    report(model_of(given.model, "cuda"), LOADS)


if __name__ == "__main__":
    main()
