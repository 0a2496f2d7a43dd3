"""What an engine says of itself."""

from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.blocks import BlockId, PoolGeometry, PoolStatistics, SequenceId

HealthState = Literal["starting", "running", "draining", "broken", "closed"]


@attrs.frozen
class EngineHealth:
    """Is the engine alive, and does it get on?

    Attributes:
        state: `"starting"`: its model is being loaded; `"running"`; `"draining"`: it takes no more
            requests and has not ended; `"broken"`: it ended by an exception, or could not be
            loaded; `"closed"`.
        open_requests: requests that were submitted and have not ended, those that wait for a place
            in the queue included.
        since_progress_s: seconds since the last step ended, or since work came if none has ended
            since; 0.0 while there is no work.
        cause: what it broke by.
    """

    state: HealthState
    open_requests: int = 0
    since_progress_s: float = 0.0
    cause: BaseException | None = None


@attrs.frozen(kw_only=True)
class SwapStatistics:
    """Swap space in host memory; all zero where preempted sequences are computed again.

    Attributes:
        num_blocks: host blocks, each as large as one of the pool.
        used_blocks: host blocks that hold K and V of preempted sequences.
        swapped_out_blocks: blocks copied to the host so far.
        swapped_in_blocks: blocks copied back so far.
    """

    num_blocks: int = 0
    used_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


@attrs.frozen(kw_only=True)
class EngineStatistics:
    """A snapshot taken between two steps. Counters never go down.

    Attributes:
        pool: blocks by state.
        num_running: sequences in the batch.
        num_waiting: sequences in the queue.
        live_tokens: tokens whose K and V are in used blocks.
        head_blocked: did the head of the queue find no room in the last step?
        steps: steps executed.
        prompt_tokens: prompt tokens of all admitted requests.
        cached_prompt_tokens: how many of these the prefix cache gave.
        output_tokens: tokens generated.
        preemptions: how often a running sequence lost its blocks.
        swapped_preemptions: how many of these times its K and V were kept in host memory.
        swap_full: how often they would have been, had there been room.
        swap: host memory for that, at this moment.
        recomputed_tokens: tokens whose K and V were lost by preemption.
        requests_finished: requests that ended by a stop token or by length.
        requests_cancelled: requests that their reader left.
        requests_failed: requests that ended by an error.
    """

    pool: PoolStatistics
    num_running: int = 0
    num_waiting: int = 0
    live_tokens: int = 0
    head_blocked: bool = False
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    swapped_preemptions: int = 0
    swap_full: int = 0
    swap: SwapStatistics = SwapStatistics()
    recomputed_tokens: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0

    @property
    def utilisation(self) -> float:
        """Slots that hold a live token, as a share of all slots."""
        return self.live_tokens / (self.pool.num_blocks * self.pool.block_size)

    @property
    def internal_waste(self) -> float:
        """Allocated slots that hold no token, as a share of allocated slots."""
        allocated = self.pool.used_blocks * self.pool.block_size
        return 1 - self.live_tokens / allocated if allocated else 0.0

    @property
    def external_waste(self) -> float:
        """Free slots that cannot serve the head of the queue, as a share of all slots."""
        return self.pool.free_blocks / self.pool.num_blocks if self.head_blocked else 0.0


@attrs.frozen
class SequenceBlocks:
    """The block table of one running request.

    Attributes:
        request_id: whose it is.
        blocks: physical blocks in table order, those behind a sliding window left out.
        num_tokens: tokens that have K and V in them; they fill the blocks from the first on.
    """

    request_id: str
    blocks: tuple[BlockId, ...]
    num_tokens: int


@attrs.frozen
class BlockMap:
    """Who holds which block, between two steps.

    Attributes:
        geometry: the pool.
        sequences: the running requests, the most urgent first. A block may be in several.
        cached: blocks that nobody holds, kept for reuse by requests of the same prefix.
    """

    geometry: PoolGeometry
    sequences: tuple[SequenceBlocks, ...]
    cached: tuple[BlockId, ...]


@attrs.frozen(eq=False)
class SequenceImage:
    """The block table of one running sequence, in an array.

    Attributes:
        request_id: whose it is.
        number: of the sequence; never used again by this engine.
        first_block: index in the table of the first of `blocks`; a sliding window has left those
            before behind.
        blocks: `int32[n]`, physical blocks in table order.
        num_tokens: tokens of the sequence that have K and V, those left behind included.
    """

    request_id: str
    number: SequenceId
    first_block: int
    blocks: npt.NDArray[np.int32]
    num_tokens: int


@attrs.frozen(eq=False, kw_only=True)
class BlockImage:
    """A `BlockMap` in arrays, and what was counted at the same moment.

    Attributes:
        geometry: the pool.
        statistics: counters and gauges.
        sequences: the running sequences, the most urgent first.
        preempted: sequences that lost their blocks and wait for room.
        cached_flags: for each block of the pool 1 if nobody holds it and it is kept for reuse, else
            0.
    """

    geometry: PoolGeometry
    statistics: EngineStatistics
    sequences: tuple[SequenceImage, ...]
    preempted: tuple[SequenceId, ...]
    cached_flags: bytes

    def block_map(self) -> BlockMap:
        """The same in plain numbers. Cost: linear in blocks that are held or cached."""
        return BlockMap(
            self.geometry,
            tuple(self._plain(sequence) for sequence in self.sequences),
            _ids(np.flatnonzero(np.frombuffer(self.cached_flags, np.uint8))),
        )

    def _plain(self, sequence: SequenceImage) -> SequenceBlocks:
        behind = sequence.first_block * self.geometry.block_size
        held = sequence.num_tokens - behind
        return SequenceBlocks(sequence.request_id, _ids(sequence.blocks), held)


def _ids(blocks: npt.NDArray[Any]) -> tuple[BlockId, ...]:
    return tuple(blocks.tolist())
