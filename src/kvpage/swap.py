"""Swap space: where preempted sequences keep their K and V in host memory.

Only bookkeeping: which host block holds what, and which copies the next step has to make. A runner
makes them, in this order, so that nothing is overwritten before it was read::

    swap_outs   device -> host     all blocks as they were when the step before had ended
    copies      device -> device   copy-on-write, moves
    swap_ins    host -> device     into blocks that were granted for this step
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.blocks import BlockId, HostBlockId, SequenceId

BlockPairs = npt.NDArray[np.int64]
"""Copies `int64[C, 2]`, pairs of blocks (from, to)."""

NO_PAIRS: BlockPairs = np.empty((0, 2), np.int64)


@attrs.frozen
class Swapped:
    """What is kept of a sequence.

    Attributes:
        num_tokens: the K and V of its first so many tokens were computed.
        first_block: index in its block table of the first block that is kept.
        blocks: host blocks, one for each entry of its table from there on.
    """

    num_tokens: int
    first_block: int
    blocks: tuple[HostBlockId, ...]


class SwapSpace:
    """A bounded pool of host blocks, each as large as a block of the device's pool.

    A sequence is kept whole or not at all, and gets private copies of all blocks that it reads,
    those that it shared included: what becomes of the others who share them is then no concern of
    it. When it comes back it shares again what the prefix cache still has, and only the rest is
    copied.

    Attributes:
        num_blocks: host blocks in all.
        swapped_out_blocks: blocks copied to the host so far.
        swapped_in_blocks: blocks copied back so far.
        num_full: how often a sequence found no room.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        self.num_full = 0
        # The lowest come first: neighbours in host memory are copied at once.
        self._free = [HostBlockId(block) for block in range(num_blocks)]
        self._kept: dict[SequenceId, Swapped] = {}
        self._outs: dict[HostBlockId, BlockId] = {}
        self._ins: dict[BlockId, HostBlockId] = {}
        self._read: list[HostBlockId] = []  # by `_ins`: free once that copy is certain

    @property
    def used_blocks(self) -> int:
        """Host blocks that hold something."""
        return self.num_blocks - len(self._free)

    def get(self, seq: SequenceId) -> Swapped | None:
        """What is kept of `seq`, if anything."""
        return self._kept.get(seq)

    def is_returning(self, blocks: Iterable[BlockId]) -> bool:
        """Is any of these still to be filled from the host, by the next step?"""
        return bool(self._ins) and not self._ins.keys().isdisjoint(blocks)

    def put(
        self, seq: SequenceId, blocks: Sequence[BlockId], *, first_block: int, num_tokens: int
    ) -> bool:
        """Keep a sequence: its blocks are copied before the next step does anything else.

        Args:
            seq: a sequence that is not kept.
            blocks: where its content is now; these may be granted to others at once.
            first_block: index in its block table of the first of them.
            num_tokens: how many of its tokens have K and V.

        Returns:
            False if there is no room, or if it has not come back yet: nothing has changed.
        """
        if self.is_returning(blocks):
            return False
        if len(blocks) > len(self._free):
            self.num_full += 1
            return False
        taken = tuple(heappop(self._free) for _ in blocks)
        self._kept[seq] = Swapped(num_tokens, first_block, taken)
        self._outs.update(zip(taken, blocks, strict=True))
        return True

    def restore(self, seq: SequenceId, first_block: int, blocks: Sequence[BlockId]) -> None:
        """Copy what is kept of `seq` back before the next step computes, and keep it no longer.

        Args:
            seq: a sequence that is kept.
            first_block: index in its block table of the first block to fill.
            blocks: its new block table from there on; entries beyond what was kept stay as they
                are.
        """
        kept = self._kept.pop(seq)
        needed = kept.blocks[first_block - kept.first_block :]
        self._ins.update(zip(blocks, needed, strict=False))
        self._read.extend(kept.blocks)

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Copy nothing back into these: who was to read them ended before the next step."""
        if self._ins:
            for block in blocks:
                self._ins.pop(block, None)

    def drop(self, seq: SequenceId) -> None:
        """Forget what is kept of `seq`, if anything is."""
        kept = self._kept.pop(seq, None)
        if kept is not None:
            for block in kept.blocks:
                self._outs.pop(block, None)
            self._release(kept.blocks)

    def lose(self, swap_outs: BlockPairs) -> None:
        """These copies to the host were not made: forget the sequences that they were for."""
        lost = set(swap_outs[:, 1].tolist())
        for seq in [seq for seq, kept in self._kept.items() if not lost.isdisjoint(kept.blocks)]:
            self.drop(seq)

    def take(self) -> tuple[BlockPairs, BlockPairs]:
        """The copies of the next step: to the host, and back. Asking empties both lists."""
        if not self._outs and not self._read:
            return NO_PAIRS, NO_PAIRS
        outs = [(block, host) for host, block in self._outs.items()]
        ins = [(host, block) for block, host in self._ins.items()]
        self.swapped_out_blocks += len(outs)
        self.swapped_in_blocks += len(ins)
        self._release(self._read)
        self._outs, self._ins, self._read = {}, {}, []
        return _pairs(outs), _pairs(ins)

    def _release(self, blocks: Iterable[HostBlockId]) -> None:
        for block in blocks:
            heappush(self._free, block)


def _pairs(pairs: Sequence[tuple[int, int]]) -> BlockPairs:
    return np.array(pairs, np.int64).reshape(-1, 2)
