"""What the next step computes: continuous batching over one token budget.

Every running sequence has known tokens and, of these, computed ones. A decode step computes the
single missing one, a prompt chunk computes several; a sequence whose tokens are all computed is
sampled and knows one token more. Preemption by recompute is the same thing again: computed falls
to zero, known stays (Yu et al., Orca, OSDI 2022; Agrawal et al., Sarathi-Serve, OSDI 2024). With
preemption by swap both stay, since K and V wait in host memory (Kwon et al., SOSP 2023, section
4.5).
"""

from bisect import insort
from collections.abc import Collection, Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.batch import RunningBatch
from kvpage.block_manager import BlockManager
from kvpage.blocks import BlockId, PoolGeometry, PoolStatistics, SequenceId
from kvpage.errors import AllocatorFault, OutgrewPool, OutOfBlocks, RequestFailed
from kvpage.plan import PromptScores, StepPlan, StepResult
from kvpage.prefix import BlockKey
from kvpage.sampling import Logprobs
from kvpage.sequence import NO_ADAPTER, FinishReason, Sequence, SequenceState
from kvpage.swap import SwapSpace

WATERMARK = 0.01
"""Share of the pool that an admission leaves free while others run, so that these can grow."""


@attrs.frozen(eq=False)
class Schedule:
    """The scheduler's decision.

    Attributes:
        plan: what to compute; None when there is nothing, or when something failed: the requests of
            those sequences may have others, which end first.
        admitted: sequences that entered the batch, for the first time or again.
        failures: sequences that are over, each with what it ended by.
        preempted: sequences that lost their blocks.
    """

    plan: StepPlan | None
    admitted: tuple[Sequence, ...]
    failures: tuple[tuple[Sequence, RequestFailed], ...]
    preempted: tuple[Sequence, ...]


@attrs.frozen(eq=False)
class StepOutcome:
    """What a step meant for the sequences that were sampled in it.

    Attributes:
        sequences: the sampled sequences.
        token_ids: one new token for each.
        finish_reasons: `"stop"`, `"length"` or None for each.
        logprobs: for each, where its request asked; empty where none did.
        failures: sequences that are over since no token could be chosen for them.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    finish_reasons: list[FinishReason | None]
    logprobs: Collection[Logprobs | None] = ()
    failures: tuple[tuple[Sequence, RequestFailed], ...] = ()

    def without(self, failures: Mapping[int, RequestFailed]) -> "StepOutcome":
        """The same, but the sequences at these places have failed."""
        kept = [place for place in range(len(self.sequences)) if place not in failures]
        logprobs = list(self.logprobs)
        return StepOutcome(
            [self.sequences[place] for place in kept],
            [self.token_ids[place] for place in kept],
            [self.finish_reasons[place] for place in kept],
            [logprobs[place] for place in kept] if logprobs else (),
            tuple((self.sequences[place], error) for place, error in failures.items()),
        )


class Scheduler:
    """Queues of sequences over a block manager. First come, first served, within priorities.

    Attributes:
        num_preemptions: how often a running sequence lost its blocks, in all.
        num_swapped: how many of these times its K and V were kept in host memory.
        recomputed_tokens: tokens whose K and V were computed, lost, and had to be computed again.
        prompt_tokens: prompt tokens of all sequences at their first admission.
        cached_prompt_tokens: how many of these the prefix cache gave.
        blocked: did the head of the queue find no room in the last step?
        swap: the swap space; read-only for everyone else.
    """

    def __init__(
        self,
        blocks: BlockManager,
        batch: RunningBatch,
        *,
        max_batch_tokens: int,
        swap: SwapSpace | None = None,
    ) -> None:
        """Start empty.

        Args:
            blocks: the ledger; its rows are the batch's rows.
            batch: the running batch.
            max_batch_tokens: tokens that one step computes at most.
            swap: keeps K and V of preempted sequences; None, or no room there, computes them again.
        """
        self.num_preemptions = 0
        self.num_swapped = 0
        self.recomputed_tokens = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.blocked = False
        self._blocks = blocks
        self._batch = batch
        self._max_batch_tokens = max_batch_tokens
        self.swap = swap or SwapSpace(0)
        self._span = span_tokens(blocks.geometry, blocks.window, max_batch_tokens)
        self._watermark_blocks = int(np.ceil(WATERMARK * blocks.geometry.num_blocks))
        self._waiting: list[Sequence] = []  # sorted, the most urgent first
        self._running: list[Sequence] = []  # sorted, the most urgent first
        self._rows: npt.NDArray[np.int64] = np.empty(0, np.int64)  # of _running, in its order
        self._admitted: list[Sequence] = []
        self._failures: list[tuple[Sequence, RequestFailed]] = []
        self._preempted: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        insort(self._waiting, sequence, key=_urgency)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence wherever it is; its blocks are free at once. Again is a no-op."""
        self.swap.drop(sequence.id)
        if sequence.state is SequenceState.WAITING:
            if sequence in self._waiting:  # or it was never added
                self._waiting.remove(sequence)
            sequence.state = SequenceState.FINISHED
        elif sequence.state is SequenceState.RUNNING:
            self._leave_batch(sequence, SequenceState.FINISHED)

    def cancel_all(self) -> None:
        """End every sequence."""
        for sequence in [*self._running, *self._waiting]:
            self.cancel(sequence)

    def schedule(self) -> Schedule:
        """Decide the next step: room for decodes, then chunks of prompts, then admissions.

        Preempts the least urgent sequences where room for a more urgent one is missing.
        """
        preempted = self.num_preemptions
        if self._blocks.window:
            self._slide()
        self._grow()
        if self.num_preemptions == preempted:  # who was preempted must not come back at once
            self._admit_waiting()
        plan = self._plan() if self._running and not self._failures else None
        schedule = Schedule(
            plan, tuple(self._admitted), tuple(self._failures), tuple(self._preempted)
        )
        self._admitted, self._failures, self._preempted = [], [], []
        return schedule

    def update(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """Enter what a step produced; sequences that ended leave the batch."""
        batch = self._batch
        batch.num_computed[plan.rows] += plan.query_lens
        if self._blocks.prefix_cache:
            self._publish(plan)
        if plan.prompt_scores is not None:
            self._note_prompt_logprobs(plan.prompt_scores, result.prompt_logprobs)
        stopped, full = batch.append(plan.sample_rows, result.token_ids)
        sequences = [batch.sequences[row] for row in plan.sample_rows.tolist()]
        reasons: list[FinishReason | None] = [None] * len(sequences)
        complete, left_grammar = plan.sampling.accept(result.token_ids)
        failures = {**left_grammar, **result.failures}
        stopped |= complete
        stopped[list(failures)] = True
        for i in np.flatnonzero(stopped | full).tolist():
            reasons[i] = "stop" if stopped[i] else "length"
            self._leave_batch(sequences[i], SequenceState.FINISHED)
        outcome = StepOutcome(sequences, result.token_ids.tolist(), reasons, result.logprobs)
        return outcome.without(failures) if failures else outcome

    def abandon(self, plan: StepPlan) -> list[Sequence]:
        """End every sequence of a step that failed; returns them.

        Its copies may not have been made: what they were to fill is computed again.
        """
        sequences = [self._batch.sequences[row] for row in plan.rows.tolist()]
        not_copied = np.concatenate([plan.copies[:, 1], plan.swap_ins[:, 1]])
        self.swap.lose(plan.swap_outs)
        self._blocks.forget(BlockId(block) for block in not_copied.tolist())
        for sequence in sequences:
            self.cancel(sequence)
        damaged = np.isin(self._blocks.tables[self._rows], not_copied).any(axis=1)
        for sequence in [self._running[i] for i in np.flatnonzero(damaged).tolist()]:
            self._recompute(sequence)
        return sequences

    def pool_statistics(self) -> PoolStatistics:
        """Blocks by state."""
        return self._blocks.statistics()

    def block_tables(self) -> list[tuple[Sequence, int, npt.NDArray[np.int32], int]]:
        """Of each running sequence: where its table begins, its blocks, its tokens with K and V."""
        blocks = self._blocks
        first_blocks = blocks.first_blocks.tolist()
        num_computed = self._batch.num_computed.tolist()
        return [
            (
                sequence,
                first_blocks[sequence.row],
                blocks.table_of(sequence.id),
                num_computed[sequence.row],
            )
            for sequence in self._running
        ]

    @property
    def cached_flags(self) -> bytes:
        """For each block of the pool 1 if it is kept for reuse by equal prefixes, else 0."""
        return self._blocks.cached_flags

    @property
    def waiting_preempted(self) -> tuple[SequenceId, ...]:
        """Sequences that have lost their blocks and wait for room."""
        return tuple(sequence.id for sequence in self._waiting if sequence.num_preemptions)

    @property
    def live_tokens(self) -> int:
        """Tokens whose K and V are in used blocks; a shared block counts once."""
        unused = self._blocks.capacity_tokens[self._rows] - self._batch.num_computed[self._rows]
        used = self._blocks.statistics().used_blocks * self._blocks.geometry.block_size
        return int(used - unused.sum())

    def _note_prompt_logprobs(self, scores: PromptScores, logprobs: Collection[Logprobs]) -> None:
        for row, of_token in zip(scores.rows.tolist(), logprobs, strict=True):
            sequence = self._batch.sequences[row]
            sequence.prompt_logprobs.append(of_token)
            self._batch.scored_tokens[row] = sequence.scored_tokens

    # -- room ----------------------------------------------------------------------------------

    def _slide(self) -> None:
        """Give back what sliding windows have left behind."""
        rows, blocks = self._rows, self._blocks
        computed = self._batch.num_computed[rows]
        first_seen = np.maximum(computed - blocks.window + 1, 0)
        behind = first_seen // blocks.geometry.block_size > blocks.first_blocks[rows]
        for i in np.flatnonzero(behind).tolist():
            blocks.slide(self._running[i].id, int(computed[i]))

    def _room(
        self, num_tokens: npt.NDArray[np.int64], num_computed: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """For how many tokens sequences need room now: all that are known.

        Under a sliding window, no more of a prompt than the window and what one step computes: what
        is behind is given back before the next chunk. This much at once and from the start, for the
        reason that `docs/decisions/003-room-for-the-whole-prompt.md` gives.
        """
        if not self._blocks.window:
            return num_tokens
        block_size = self._blocks.geometry.block_size
        first = np.maximum(num_computed - self._blocks.window + 1, 0) // block_size * block_size
        room: npt.NDArray[np.int64] = np.maximum(first + self._span, num_computed + 1)
        return np.minimum(num_tokens, room)

    def _grow(self) -> None:
        """Find room for what the running sequences compute next, the most urgent first."""
        rows, batch = self._rows, self._batch
        room = self._room(batch.num_tokens[rows], batch.num_computed[rows])
        short = room > self._blocks.capacity_tokens[rows]
        for sequence in [self._running[i] for i in np.flatnonzero(short).tolist()]:
            if sequence.state is SequenceState.RUNNING:  # not preempted for an earlier one
                self._grow_one(sequence)

    def _grow_one(self, sequence: Sequence) -> None:
        """Trim, then preempt, until `sequence` has room; it may be the one to go."""
        batch = self._batch
        while sequence.state is SequenceState.RUNNING:
            room = self._room(batch.num_tokens, batch.num_computed)
            num_tokens = int(room[sequence.row])
            try:
                self._blocks.extend(sequence.id, num_tokens)
                return
            except OutOfBlocks as signal:
                if self._blocks.trim(room):
                    continue
                if self._running == [sequence]:
                    self._fail(sequence, _outgrew(num_tokens, signal, self._blocks))
                else:
                    self._preempt(self._running[-1])
            except AllocatorFault as fault:
                self._fail(sequence, fault)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; its K and V go to host memory if they are to and fit there."""
        computed = int(self._batch.num_computed[sequence.row])
        if self.swap.num_blocks and computed and self._swap_out(sequence, computed):
            self.num_swapped += 1
            self._requeue(sequence)
        else:
            self._recompute(sequence)

    def _swap_out(self, sequence: Sequence, computed: int) -> bool:
        blocks = self._blocks.contents_of(sequence.id, computed)
        first_block = int(self._blocks.first_blocks[sequence.row])
        return self.swap.put(sequence.id, blocks, first_block=first_block, num_tokens=computed)

    def _recompute(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; its K and V are lost."""
        self.swap.drop(sequence.id)
        self.recomputed_tokens += int(self._batch.num_computed[sequence.row])
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._preempted.append(sequence)
        self._leave_batch(sequence, SequenceState.WAITING)
        self.add(sequence)

    def _fail(self, sequence: Sequence, error: RequestFailed) -> None:
        self.cancel(sequence)
        self._failures.append((sequence, error))

    def _leave_batch(self, sequence: Sequence, state: SequenceState) -> None:
        self.swap.forget(self._blocks.blocks_of(sequence.id))
        self._blocks.release(sequence.id)
        self._batch.remove(sequence, state)
        self._running.remove(sequence)
        self._running_changed()

    def _running_changed(self) -> None:
        self._rows = np.array([sequence.row for sequence in self._running], np.int64)

    # -- admission -----------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        """Start queued sequences in order while rows, budget and room last."""
        self.blocked = False
        batch = self._batch
        pending = int((batch.num_tokens[self._rows] - batch.num_computed[self._rows]).sum())
        while self._waiting and batch.next_row is not None and pending < self._max_batch_tokens:
            sequence = self._waiting[0]
            try:
                computed = self._admit(sequence)
            except OutOfBlocks as signal:
                if self._running:
                    self.blocked = True
                    return
                self._fail(sequence, _outgrew(len(sequence.tokens), signal, self._blocks))
            except AllocatorFault as fault:
                self._fail(sequence, fault)
            else:
                pending += len(sequence.tokens) - computed

    def _admit(self, sequence: Sequence) -> int:
        """Move the head of the queue into the batch; returns how many tokens are computed."""
        row = self._batch.next_row
        assert row is not None
        computed = self._place(sequence, row)
        self._count_prefix(sequence, computed)
        self._waiting.pop(0)
        self._batch.add(sequence, computed)
        insort(self._running, sequence, key=_urgency)
        self._running_changed()
        self._admitted.append(sequence)
        return computed

    def _place(self, sequence: Sequence, row: int) -> int:
        """Give the head of the queue blocks, shared ones where it can; returns tokens computed."""
        parent, kept = sequence.fork_of, self.swap.get(sequence.id)
        if kept is None and parent is not None and self._can_fork(parent, sequence):
            return self._fork(parent, sequence, row)
        blocks = self._blocks
        shared = blocks.match(self._prefix(sequence), len(sequence.tokens))
        shared_tokens = len(shared) * blocks.geometry.block_size
        swapped = 0 if kept is None else kept.num_tokens
        computed = max(swapped, shared_tokens)
        num_tokens = int(self._room(np.array([len(sequence.tokens)]), np.array([computed]))[0])
        self._keep_watermark(blocks.num_taken(num_tokens, shared, swapped))
        blocks.admit(
            sequence.id,
            row,
            num_tokens,
            max_tokens=sequence.max_total_tokens,
            shared=shared,
            num_computed=swapped,
        )
        if kept is not None:
            self._swap_in(sequence, row, shared_tokens)
        return computed

    def _fork(self, parent: Sequence, sequence: Sequence, row: int) -> int:
        """Start a sequence with the blocks of its parent; returns tokens computed."""
        num_tokens, geometry = len(sequence.tokens), self._blocks.geometry
        num_shared = (num_tokens - 1) // geometry.block_size
        self._keep_watermark(geometry.blocks_for(num_tokens) - num_shared)
        return self._blocks.fork(
            parent.id, sequence.id, row, num_tokens, max_tokens=sequence.max_total_tokens
        )

    def _swap_in(self, sequence: Sequence, row: int, shared: int) -> None:
        """Fill what comes after the `shared` tokens from host memory."""
        first_held = int(self._blocks.first_blocks[row])
        first_block = max(first_held, shared // self._blocks.geometry.block_size)
        blocks = self._blocks.blocks_of(sequence.id)[first_block - first_held :]
        self.swap.restore(sequence.id, first_block, blocks)

    def _keep_watermark(self, num_blocks: int) -> None:
        """Refuse an admission that takes `num_blocks` which those who run may need."""
        needed, available = num_blocks + self._watermark_blocks, self._blocks.available_blocks
        if self._running and needed > available:
            raise OutOfBlocks(needed, available)

    def _can_fork(self, parent: Sequence, sequence: Sequence) -> bool:
        """Does `parent` hold K and V of the prompt, and has `sequence` not gone its own way yet?

        Not while they are on their way from the host: that comes after the copy for a fork.
        """
        first = self._blocks.first_needed(sequence.prompt_tokens - 1)
        return (
            self._blocks.sharing
            and parent.state is SequenceState.RUNNING
            and not self.swap.is_returning(self._blocks.blocks_of(parent.id))
            and len(sequence.tokens) == sequence.prompt_tokens
            and self._batch.num_computed[parent.row] >= sequence.prompt_tokens - 1
            and bool(self._blocks.first_blocks[parent.row] <= first)
        )

    def _prefix(self, sequence: Sequence) -> list[BlockKey]:
        """Keys of the full blocks of a waiting sequence that may be in the cache."""
        if sequence.prefix_keys is None or not self._blocks.prefix_cache:
            return []
        # The last token is always computed, since its logits are needed; so are those of tokens
        # that give log-probabilities of the prompt.
        needless = len(sequence.tokens) - 1
        if sequence.scored_tokens < sequence.prompt_tokens - 1:
            needless = sequence.scored_tokens
        num_blocks = needless // self._blocks.geometry.block_size
        return sequence.prefix_keys.first(num_blocks, sequence.tokens)

    def _count_prefix(self, sequence: Sequence, computed: int) -> None:
        if sequence.num_preemptions == 0:
            sequence.cached_tokens = computed
            self.prompt_tokens += len(sequence.tokens)
            self.cached_prompt_tokens += computed

    def _publish(self, plan: StepPlan) -> None:
        """Offer the blocks that this step filled for reuse."""
        block_size = self._blocks.geometry.block_size
        before = (plan.kv_lens - plan.query_lens) // block_size
        after = plan.kv_lens // block_size
        for i in np.flatnonzero(after > before).tolist():
            row, first, end = int(plan.rows[i]), int(before[i]), int(after[i])
            sequence = self._batch.sequences[row]
            if sequence is not None and sequence.prefix_keys is not None:
                keys = sequence.prefix_keys.first(end, self._batch.tokens[row])
                self._blocks.publish(sequence.id, keys[first:end], first)

    # -- the plan ------------------------------------------------------------------------------

    def _plan(self) -> StepPlan:
        """Lay out the step: whose tokens, which positions, which slots."""
        batch = self._batch
        rows, query_lens = self._spend_budget()
        computed = batch.num_computed[rows]
        kv_lens = computed + query_lens
        of_token, positions = _expand(rows, query_lens, computed)
        block_size = self._blocks.geometry.block_size
        blocks = self._blocks.tables[of_token, positions // block_size].astype(np.int64)
        samples = kv_lens == batch.num_tokens[rows]
        sample_rows = rows[samples]
        sampling = batch.sampling.take(sample_rows)
        swap_outs, swap_ins = self.swap.take()
        adapters = batch.adapters[rows]
        return StepPlan(
            rows=rows.astype(np.int32),
            query_lens=query_lens.astype(np.int32),
            kv_lens=kv_lens.astype(np.int32),
            token_ids=batch.tokens[of_token, positions].astype(np.int64),
            positions=positions,
            slots=blocks * block_size + positions % block_size,
            block_tables=self._blocks.tables,
            copies=self._blocks.take_copies(),
            sample_tokens=(np.cumsum(query_lens) - 1)[samples],
            sample_rows=sample_rows,
            sample_indices=batch.num_tokens[sample_rows] - batch.prompt_tokens[sample_rows],
            sampling=sampling,
            history=batch.history(sample_rows, sampling),
            prompt_scores=self._prompt_scores(rows, query_lens, computed),
            swap_outs=swap_outs,
            swap_ins=swap_ins,
            adapters=adapters if (adapters != NO_ADAPTER).any() else None,
        )

    def _prompt_scores(
        self,
        rows: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int64],
        computed: npt.NDArray[np.int64],
    ) -> PromptScores | None:
        """Which tokens of the step give log-probabilities of their prompt's next token."""
        batch = self._batch
        first = np.maximum(batch.scored_tokens[rows], computed)
        counts = np.minimum(computed + query_lens, batch.prompt_tokens[rows] - 1) - first
        wanted = np.flatnonzero(counts > 0)
        if not len(wanted):
            return None
        chosen, counts = rows[wanted], counts[wanted]
        starts = (np.cumsum(query_lens) - query_lens - computed)[wanted]
        of_token, positions = _expand(chosen, counts, first[wanted])
        sequences = [batch.sequences[row] for row in chosen.tolist()]
        return PromptScores(
            tokens=np.repeat(starts, counts) + positions,
            rows=of_token,
            token_ids=batch.tokens[of_token, positions + 1].astype(np.int64),
            num_top=np.repeat([s.params.prompt_logprobs for s in sequences], counts),
        )

    def _spend_budget(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rows of this step and their query lengths: decodes first, then chunks, in urgency."""
        rows = self._rows
        known = np.minimum(self._batch.num_tokens[rows], self._blocks.capacity_tokens[rows])
        pending = known - self._batch.num_computed[rows]
        decodes = self._rows[pending == 1][: self._max_batch_tokens]
        budget = self._max_batch_tokens - len(decodes)
        if len(decodes) == len(self._rows) or budget == 0:
            return decodes, np.ones(len(decodes), np.int64)
        prefills, missing = self._rows[pending > 1], pending[pending > 1]
        before = np.cumsum(missing) - missing
        chunks = np.minimum(missing, budget - before)
        served = chunks > 0
        return (
            np.concatenate([decodes, prefills[served]]),
            np.concatenate([np.ones(len(decodes), np.int64), chunks[served]]),
        )


def span_tokens(geometry: PoolGeometry, window: int, max_batch_tokens: int) -> int:
    """Room that a prompt under a sliding window needs to be computed without a stop.

    The window, what one step computes, and what is held before it of the first block; at most the
    whole pool.
    """
    return min(geometry.num_slots, window + max_batch_tokens + geometry.block_size)


def _urgency(sequence: Sequence) -> tuple[int, int]:
    return sequence.urgency


def _outgrew(num_tokens: int, signal: OutOfBlocks, blocks: BlockManager) -> OutgrewPool:
    return OutgrewPool(
        f"{num_tokens} tokens need {signal.needed} more blocks, but the pool of "
        f"{blocks.geometry.num_blocks} blocks has only {signal.available} to give"
    )


def _expand(
    rows: npt.NDArray[np.int64], query_lens: npt.NDArray[np.int64], first: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and position of every token of a step: both `int64[T]`."""
    if len(rows) and query_lens.max() == 1:
        return rows, first
    starts = np.cumsum(query_lens) - query_lens
    offsets = np.repeat(first - starts, query_lens)
    return np.repeat(rows, query_lens), offsets + np.arange(len(offsets))
