"""kvpage. The model folder is its own cached conversion; `KVPAGE_WEIGHTS` is set by `run.py`."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workloads import Request

import kvpage


@contextmanager
def engine(model: str) -> Iterator[Callable[[list[Request]], int]]:
    """A running engine; call what it gives with requests, and get the number of tokens."""
    weights = os.environ.get("KVPAGE_WEIGHTS")
    options = {"weights": weights} if weights else {}
    with asyncio.Runner() as runner:
        engine = runner.run(
            _open(
                kvpage.AsyncEngine.from_pretrained(
                    model, max_num_seqs=64, kv_memory="32768 tokens", max_model_len=8192, **options
                )
            )
        )

        async def complete(request: Request) -> int:
            params = kvpage.SamplingParams(
                temperature=0, max_tokens=request.num_tokens, ignore_eos=True
            )
            return len((await engine.complete(request.prompt, params)).token_ids)

        async def complete_all(requests: list[Request]) -> int:
            return sum(await asyncio.gather(*map(complete, requests)))

        try:
            yield lambda requests: runner.run(complete_all(requests))
        finally:
            runner.run(engine.aclose())


async def _open(opening: kvpage.engine.OpeningEngine) -> kvpage.AsyncEngine:
    return await opening
