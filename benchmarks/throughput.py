"""Output tokens a second on a CPU, beside transformers' own generation with the same weights.

    python benchmarks/throughput.py

The workload is 64 random prompts (lognormal lengths, 11,438 tokens) with 7,718 output tokens,
greedy, no end of text; `--requests 16` takes the first sixteen. The engines run in turn, A B A B;
the ratio is taken pair by pair. transformers runs as one would use it: left-padded batches of 16,
each until its longest answer is done.
"""

import asyncio
import statistics
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM

import kvpage
from kvpage.pretrained import load_pretrained

BATCH = 16


def workload(num_requests: int) -> list[tuple[list[int], int]]:
    """Prompts and the number of tokens to generate for each."""
    random = np.random.default_rng(0)
    prompts = np.clip(random.lognormal(np.log(180) - 0.32, 0.8, 64), 4, 768).astype(int)
    outputs = np.clip(random.lognormal(np.log(120) - 0.32, 0.8, 64), 4, 384).astype(int)
    drawn = [random.integers(5, 49000, n).tolist() for n in prompts]
    return list(zip(drawn, outputs.tolist(), strict=True))[:num_requests]


async def with_kvpage(engine: kvpage.AsyncEngine, requests: list[tuple[list[int], int]]) -> float:
    """Seconds for all requests, submitted at once."""

    async def complete(prompt: list[int], num_tokens: int) -> None:
        params = kvpage.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        completion = await engine.complete(prompt, params)
        assert len(completion.token_ids) == num_tokens

    started = perf_counter()
    await asyncio.gather(*(complete(prompt, num_tokens) for prompt, num_tokens in requests))
    return perf_counter() - started


def with_transformers(model: Any, requests: list[tuple[list[int], int]]) -> float:
    """Seconds for all requests in padded batches."""
    started = perf_counter()
    for first in range(0, len(requests), BATCH):
        batch = requests[first : first + BATCH]
        width = max(len(prompt) for prompt, _ in batch)
        longest = max(num_tokens for _, num_tokens in batch)
        ids = torch.tensor([[2] * (width - len(p)) + p for p, _ in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
        )
    return perf_counter() - started


def main(
    requests: Annotated[int, typer.Option(help="How many of the 64 requests.")] = 16,
    pairs: Annotated[int, typer.Option(help="Runs of each.")] = 3,
    allocator: Annotated[str, typer.Option(help="A strategy's name.")] = "fixed",
) -> None:
    """Run both in turn and print tokens a second."""
    chosen = workload(requests)
    num_tokens = sum(n for _, n in chosen)
    folder = load_pretrained().tokenizer.name_or_path
    model = AutoModelForCausalLM.from_pretrained(folder)
    ours, theirs = [], []

    async def alternate() -> None:
        settings = {"prefix_cache": False, "max_num_seqs": 64, "kv_memory": "32768 tokens"}
        async with kvpage.AsyncEngine.from_pretrained(allocator=allocator, **settings) as engine:
            await with_kvpage(engine, chosen[:2])
            for _ in range(pairs):
                ours.append(num_tokens / await with_kvpage(engine, chosen))
                theirs.append(num_tokens / with_transformers(model, chosen))

    asyncio.run(alternate())
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(f"{requests} requests, {num_tokens} output tokens, {torch.get_num_threads()} threads")
    print(f"kvpage        {statistics.median(ours):7.1f} tokens/s  {[round(x, 1) for x in ours]}")
    print(
        f"transformers  {statistics.median(theirs):7.1f} tokens/s  {[round(x, 1) for x in theirs]}"
    )
    print(f"ratio         {statistics.median(ratios):7.2f}  {[round(x, 2) for x in ratios]}")


if __name__ == "__main__":
    typer.run(main)
