"""Whatever happens around a request, it generates what it would generate alone.

Random histories of submissions, cancellations and failing steps over tiny pools: every strategy,
prefix cache on and off, every chunk budget, preempted sequences computed again or swapped. The fake
runner raises at the first wrong read; the ledger is recounted after every step; outputs are
compared with `undisturbed` ones.
"""

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)
from tests.allocators.machines import run_machine

from kvpage.batch import RunningBatch
from kvpage.block_manager import BlockManager
from kvpage.blocks import PoolGeometry, SequenceId
from kvpage.errors import OutgrewPool, StepFailed
from kvpage.plan import StepPlan
from kvpage.prefix import ChainedKeys
from kvpage.scheduler import Scheduler
from kvpage.sequence import Sequence, SequenceState
from kvpage.swap import SwapSpace
from kvpage.testing import FakeRunner, undisturbed
from kvpage.testing.conformance import AllocatorUnderTest

BUDGETS = (16, 7, 1, 512)
"""Tokens that a step computes at most."""

LONGEST = 96
"""Tokens of the longest sequence."""

MAX_STEPS = 20_000
"""Far more steps than any of these histories needs: beyond it, nothing moves any more."""


class Service:
    """Scheduler, ledger and fake runner under one loop: an engine without threads or model."""

    def __init__(
        self,
        factory: AllocatorUnderTest,
        geometry: PoolGeometry,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        prefix_cache: bool,
        swap_blocks: int = 0,
        window: int = 0,
    ) -> None:
        self.geometry = geometry
        self.outputs: dict[SequenceId, list[int]] = {}
        self.failures: dict[SequenceId, Exception] = {}
        self.requests: dict[SequenceId, Sequence] = {}
        self.max_batch_tokens = max_batch_tokens
        self.computed_tokens = 0
        self.sound = True  # did the last step end well?
        self.blocks = BlockManager(
            geometry,
            factory(geometry),
            max_num_seqs=max_num_seqs,
            prefix_cache=prefix_cache,
            window=window,
        )
        batch = RunningBatch(max_num_seqs, geometry.max_model_len)
        self.scheduler = Scheduler(
            self.blocks, batch, max_batch_tokens=max_batch_tokens, swap=SwapSpace(swap_blocks)
        )
        self._runner = FakeRunner(geometry, known_tokens=batch.tokens, window=window)
        self._ids = map(SequenceId, count())

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return self.scheduler.num_running + self.scheduler.num_waiting

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        stop: tuple[int, ...] = (),
        priority: int = 0,
        fork_of: SequenceId | None = None,
    ) -> SequenceId:
        """Queue a request."""
        sequence = Sequence(
            next(self._ids),
            np.array(prompt, np.int32),
            len(prompt),
            len(prompt) + max_tokens,
            stop_token_ids=stop,
            priority=priority,
            fork_of=None if fork_of is None else self.requests[fork_of],
            prefix_keys=ChainedKeys(self.geometry.block_size, secret=b"key"),
        )
        self.scheduler.add(sequence)
        self.requests[sequence.id] = sequence
        self.outputs[sequence.id] = []
        return sequence.id

    def step(self, fails: Callable[[StepPlan], bool] = lambda _: False) -> None:
        """Schedule, execute, update; the ledger must be right after each.

        Where `fails` says so of a plan, the runner raises before it does anything.
        """
        self.sound = False
        schedule = self.scheduler.schedule()
        self.blocks.verify()
        for sequence, error in schedule.failures:
            self.failures[sequence.id] = error
        if schedule.plan is not None and fails(schedule.plan):
            for sequence in self.scheduler.abandon(schedule.plan):
                self.failures[sequence.id] = StepFailed("a step failed")
        elif schedule.plan is not None:
            self._execute(schedule.plan)
        self.blocks.verify()
        self.sound = True

    def _execute(self, plan: StepPlan) -> None:
        assert len(plan.token_ids) <= self.max_batch_tokens
        self.computed_tokens += len(plan.token_ids)
        outcome = self.scheduler.update(plan, self._runner.execute(plan))
        for sequence, token in zip(outcome.sequences, outcome.token_ids, strict=True):
            self.outputs[sequence.id].append(token)

    def run_to_the_end(self) -> None:
        """Step until nothing is live; nothing is held then."""
        for _ in range(MAX_STEPS):
            if not self.live:
                assert self.blocks.statistics().used_blocks == 0
                assert self.scheduler.swap.used_blocks == 0
                return
            self.step()
        raise AssertionError(f"{self.live} requests never end")


class History(RuleBasedStateMachine):
    """Submissions, cancellations and steps in any order, then a run to the end."""

    def __init__(self, factory: AllocatorUnderTest) -> None:
        super().__init__()
        self._factory = factory
        self._prompts: dict[SequenceId, list[int]] = {}
        self._cancelled: set[SequenceId] = set()
        self._service: Service

    @initialize(
        pool_tokens=st.integers(LONGEST // 2, 2 * LONGEST) | st.integers(8, LONGEST),
        block_size=st.sampled_from((3, 1, 8)),
        max_num_seqs=st.sampled_from((4, 3, 6, 2, 1)),
        max_batch_tokens=st.sampled_from(BUDGETS),
        prefix_cache=st.sampled_from((True, False)),
        swap_blocks=st.sampled_from((0, 200, 8)),
        window=st.sampled_from((0, 0, 8, 1, 30)),
    )
    def build(
        self,
        pool_tokens: int,
        block_size: int,
        max_num_seqs: int,
        max_batch_tokens: int,
        prefix_cache: bool,
        swap_blocks: int,
        window: int,
    ) -> None:
        """A pool that a few requests fill."""
        self._service = Service(
            self._factory,
            PoolGeometry(pool_tokens // block_size, block_size, LONGEST),
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            prefix_cache=prefix_cache,
            swap_blocks=swap_blocks,
            window=window,
        )
        self._window = window

    @rule(
        # Prompts of few different beginnings, so that prefixes are found in the cache.
        start=st.sampled_from((0, 1)),
        prompt_tokens=st.integers(1, LONGEST // 2),
        max_tokens=st.sampled_from((LONGEST // 2, 20, 8, 1)),
        stop=st.sampled_from(((), tuple(range(0, 251, 10)))),
        priority=st.sampled_from((0, 0, 0, 1)),
        times=st.sampled_from((2, 1, 4)),
        forks=st.booleans(),
    )
    def submit(
        self,
        start: int,
        prompt_tokens: int,
        max_tokens: int,
        stop: tuple[int, ...],
        priority: int,
        times: int,
        forks: bool,
    ) -> None:
        """Queue some equal requests, the others as forks of the first or by themselves."""
        prompt = list(range(start, start + prompt_tokens))
        first: SequenceId | None = None
        for _ in range(times):
            seq = self._service.submit(
                prompt, max_tokens, stop=stop, priority=priority, fork_of=first
            )
            self._prompts[seq] = prompt
            first = first if first is not None or not forks else seq

    @precondition(lambda self: self._service.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancel any request: queued, in its prompt, decoding, or over already."""
        seq = data.draw(st.sampled_from(sorted(self._service.requests)))
        sequence = self._service.requests[seq]
        if sequence.state is not SequenceState.FINISHED:
            self._cancelled.add(seq)
        self._service.scheduler.cancel(sequence)
        self._service.blocks.verify()

    @precondition(lambda self: self._service.live)
    @rule(times=st.just(40) | st.integers(1, 8))
    def step(self, times: int) -> None:
        """Let some steps pass."""
        for _ in range(times):
            self._service.step()

    @precondition(lambda self: self._service.live)
    @rule()
    def fail_step(self) -> None:
        """A step raises: its sequences are over, and the others go on."""
        self._service.step(fails=lambda _: True)

    def teardown(self) -> None:
        """Everything ends, nothing is held, and every output is as if it had run alone."""
        if not hasattr(self, "_service") or not self._service.sound:
            return
        self._service.run_to_the_end()
        for seq, prompt in self._prompts.items():
            self._check_output(seq, prompt)

    def _check_output(self, seq: SequenceId, prompt: list[int]) -> None:
        sequence = self._service.requests[seq]
        output = self._service.outputs[seq]
        alone = undisturbed(
            prompt,
            sequence.max_total_tokens - len(prompt),
            stop_token_ids=sequence.stop_token_ids,
            window=self._window,
        )
        error = self._service.failures.get(seq)
        if error is None and seq not in self._cancelled:
            assert output == alone
            return
        assert output == alone[: len(output)]
        if error is not None and not isinstance(error, StepFailed):
            assert isinstance(error, OutgrewPool)
            geometry = self._service.geometry
            if self._service.blocks.window:
                assert geometry.blocks_for_window(self._window) > geometry.num_blocks
            assert len(prompt) + len(output) > self._service.geometry.num_slots


def test_outputs_are_undisturbed(factory: AllocatorUnderTest) -> None:
    """A few histories of each strategy, on every run of the suite."""
    run_machine(History, factory, max_examples=15, steps=20)


@pytest.mark.slow
def test_outputs_are_undisturbed_at_length(factory: AllocatorUnderTest) -> None:
    """A thousand histories of fifty calls."""
    run_machine(History, factory, max_examples=1000, steps=50)
