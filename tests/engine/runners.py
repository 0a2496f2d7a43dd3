"""Fakes at the device seam: runners and tokenizers that a test can hold and let go."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import anyio.to_thread
import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks import PoolGeometry
from kvpage.plan import StepPlan, StepResult
from kvpage.sampling import failures, sample
from kvpage.testing import FakeRunner

GEOMETRY = PoolGeometry(num_blocks=64, block_size=4, max_model_len=128)
VOCAB_SIZE = 251
"""What `kvpage.testing.arbitrary_token` stays below."""

PATIENCE_S = 60.0
"""How long a test waits for another thread before it fails. Nothing takes this long."""


class Gate:
    """A place that threads come to and wait at, until a test lets them pass.

    Args:
        free_passes: how many pass without waiting; None: all, until `hold`.
    """

    def __init__(self, free_passes: int | None) -> None:
        self._changed = threading.Condition()
        self._passes = free_passes
        self._arrivals = 0
        self._departures = 0
        self._seen = 0

    def pass_through(self) -> None:
        """Come to the gate; returns once it is open."""
        with self._changed:
            self._arrivals += 1
            self._changed.notify_all()
            opened = self._changed.wait_for(lambda: self._passes != 0, PATIENCE_S)
            if not opened:
                raise TimeoutError("the test never opened the gate")
            self._departures += 1
            if self._passes is not None:
                self._passes -= 1

    def allow(self, passes: int = 1) -> None:
        """Let so many pass, one after another."""
        with self._changed:
            self._passes = (self._passes or 0) + passes
            self._changed.notify_all()

    def open(self) -> None:
        """Let everyone pass from now on."""
        with self._changed:
            self._passes = None
            self._changed.notify_all()

    async def held(self) -> None:
        """Wait until somebody new waits at the gate, without holding up the event loop."""
        await anyio.to_thread.run_sync(self._wait_held)

    def _wait_held(self) -> None:
        with self._changed:
            if not self._changed.wait_for(self._somebody_waits, PATIENCE_S):
                raise TimeoutError("nobody came to the gate")
            self._seen = self._arrivals

    def _somebody_waits(self) -> bool:
        return self._arrivals > max(self._seen, self._departures)


class GatedRunner:
    """A `FakeRunner` whose steps wait at a gate, and which a test may watch and make fail.

    Args:
        geometry: the pool.
        free_steps: how many pass without waiting; None: all.
        hold_at: which steps come to the gate; None: all.
        watch: called with each plan; what it raises, the step raises instead of computing.

    Attributes:
        gate: steps come to it before they compute.
        closed: was `close` called?
    """

    def __init__(
        self,
        geometry: PoolGeometry = GEOMETRY,
        *,
        free_steps: int | None = None,
        hold_at: Callable[[StepPlan], bool] | None = None,
        watch: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.gate = Gate(free_steps)
        self.closed = False
        self._hold_at = hold_at
        self._watch = watch
        self._fake = FakeRunner(geometry)

    def execute(self, plan: StepPlan) -> StepResult:
        if self._hold_at is None or self._hold_at(plan):
            self.gate.pass_through()
        if self._watch is not None:
            self._watch(plan)
        return self._fake.execute(plan)

    def poison(self, blocks: npt.NDArray[np.int64]) -> None:
        self._fake.poison(blocks)

    def close(self) -> None:
        self.closed = True
        self._fake.close()


class SamplingRunner:
    """Draws tokens with kvpage's own sampler from logits that depend on all tokens so far."""

    def __init__(self, geometry: PoolGeometry = GEOMETRY) -> None:
        self._reads: list[Any] = []
        self._fake = FakeRunner(geometry, next_token=self._note)

    def execute(self, plan: StepPlan) -> StepResult:
        self._reads.clear()
        self._fake.execute(plan)
        if not self._reads:
            return StepResult(np.empty(0, np.int64))
        logits = torch.stack([arbitrary_logits(tokens) for tokens in self._reads])
        sampling = plan.sampling
        token_ids = sample(logits, sampling, plan.sample_indices, plan.history).numpy()
        return StepResult(token_ids, failures=failures(token_ids, sampling, {}))

    def close(self) -> None:
        self._fake.close()

    def _note(self, tokens: Any) -> int:
        self._reads.append(tokens)
        return 0


def arbitrary_logits(tokens: Sequence[int]) -> torch.Tensor:
    """`float32[VOCAB_SIZE]`, a function of all tokens."""
    rng = np.random.default_rng([len(tokens), *(int(token) for token in tokens)])
    return torch.from_numpy(rng.normal(0, 2, VOCAB_SIZE).astype(np.float32))


class CharacterTokenizer:
    """One token per character, its code point modulo the vocabulary.

    Attributes:
        gate: every encoding comes to it first.
    """

    def __init__(self, *, free_prompts: int | None = None) -> None:
        self.gate = Gate(free_prompts)

    def __call__(self, prompt: str) -> dict[str, list[int]]:
        self.gate.pass_through()
        return {"input_ids": [ord(character) % VOCAB_SIZE for character in prompt]}

    def convert_tokens_to_ids(self, token: str) -> None:
        """No token has the name of a byte."""

    def decode(self, ids: Sequence[int], **_options: bool) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)
