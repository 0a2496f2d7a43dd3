"""A request that loses its blocks goes on as if nothing had happened, wherever that is."""

from functools import partial
from typing import Any

import anyio
import pytest

from kvpage import AsyncEngine, Grant, OutOfBlocks, PoolGeometry, SamplingParams, SequenceId
from kvpage.allocators.fixed import FixedAllocator
from tests.engine.scenes import complete_all
from tests.sampling.test_generation import REQUESTS, ByteTokenizer, essence, model, undisturbed

MAX_TOKENS = 20
URGENT = SequenceId(0)
"""The first request of an engine, which keeps its blocks."""


class Stingy(FixedAllocator):
    """Refuses every sequence but the urgent one its `at`-th new token, until it has come again.

    Args:
        geometry: the pool.
        at: counted from the prompt's end.
    """

    def __init__(self, geometry: PoolGeometry, *, at: int) -> None:
        super().__init__(geometry)
        self._at = at
        self._prompt_tokens: dict[SequenceId, int] = {}
        self._admissions: dict[SequenceId, int] = {}

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        grant = super().admit(seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens)
        self._prompt_tokens.setdefault(seq, num_tokens)
        self._admissions[seq] = self._admissions.get(seq, 0) + 1
        return grant

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        due = num_tokens - self._prompt_tokens[seq] >= self._at
        if due and seq != URGENT and self._admissions[seq] == 1:
            raise OutOfBlocks(1, 0)
        return super().extend(seq, num_tokens)


async def preempted_at(index: int) -> tuple[list[Any], list[int]]:
    """What the requests come to, and how often each was preempted.

    That is once, or more often: who is refused takes the blocks of a later one.
    """
    async with AsyncEngine(
        model=model(),
        tokenizer=ByteTokenizer(),
        allocator=partial(Stingy, at=index),
        block_size=1,
        kv_memory="1024 tokens",
        prefix_cache=False,
    ) as served:
        urgent = SamplingParams(max_tokens=200)
        _, *completions = await complete_all(
            served,
            [
                partial(served.complete, [1], urgent, priority=-1),
                *(partial(served.complete, *request) for request in REQUESTS),
            ],
        )
    return [essence(one) for one in completions], [one.usage.preemptions for one in completions]


def check_preempted_at(index: int) -> None:
    found, preemptions = anyio.run(preempted_at, index)
    assert found == undisturbed()
    assert min(preemptions) >= 1


@pytest.mark.parametrize("index", [1, 2, 7, MAX_TOKENS - 1])
def test_preemption_at_a_token_index_changes_nothing(index: int) -> None:
    """Greedy and seeded, with penalties, log-probabilities, stop strings and processors."""
    check_preempted_at(index)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(1, MAX_TOKENS))
def test_preemption_at_every_token_index_changes_nothing(index: int) -> None:
    """Each of them."""
    check_preempted_at(index)
