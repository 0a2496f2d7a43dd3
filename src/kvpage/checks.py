"""Checks that cost too much for every day, and find a bug in the step that makes it.

An engine with `checks="everything"` runs a `CheckedScheduler`. Its output is the same; a step takes
longer by a walk over all blocks and, on the device, a write to each block that became free.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpage.batch import RunningBatch
from kvpage.block_manager import BlockManager
from kvpage.plan import StepPlan, StepResult
from kvpage.scheduler import Schedule, Scheduler, StepOutcome
from kvpage.swap import SwapSpace

Poison = Callable[[npt.NDArray[np.int64]], None]
"""Overwrites the K and V of blocks `int64[n]`, so that nobody can read them unnoticed."""


class CheckedScheduler(Scheduler):
    """A scheduler that recounts the ledger at every step, and poisons what is free.

    Args:
        blocks: as for `Scheduler`.
        batch: as for `Scheduler`.
        max_batch_tokens: as for `Scheduler`.
        swap: as for `Scheduler`.
        poison: called between two steps with blocks that became free since it was last called, for
            a step may still copy from blocks that were freed when it was scheduled; None: nobody
            is.

    Both methods raise `LedgerError` when the ledger contradicts itself.
    """

    def __init__(
        self,
        blocks: BlockManager,
        batch: RunningBatch,
        *,
        max_batch_tokens: int,
        swap: SwapSpace | None = None,
        poison: Poison | None,
    ) -> None:
        super().__init__(blocks, batch, max_batch_tokens=max_batch_tokens, swap=swap)
        self._checked_blocks = blocks
        self._poison = poison
        self._poisoned = np.zeros(blocks.geometry.num_blocks, np.bool_)
        self._copied = True  # nothing is left to be copied out of blocks that are free

    def schedule(self) -> Schedule:
        """See `Scheduler.schedule`."""
        if self._copied:
            self._poison_freed()
        schedule = super().schedule()
        self._copied = schedule.plan is not None
        self._checked_blocks.verify()
        self._poisoned &= self._checked_blocks.is_free
        return schedule

    def update(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """See `Scheduler.update`."""
        outcome = super().update(plan, result)
        self._checked_blocks.verify()
        return outcome

    def _poison_freed(self) -> None:
        is_free = self._checked_blocks.is_free
        freed = np.flatnonzero(is_free & ~self._poisoned)
        if self._poison is not None and len(freed):
            self._poison(freed)
        self._poisoned = is_free
