"""A runner without a model: the KV of a slot is the token itself.

What a real model keeps in a slot depends on its token and on every token before it. So does a
*fingerprint*: the running sum, modulo 2**64, of a mixed number for each (position, token)::

    slot        block_table[row, p // block_size] * block_size + p % block_size
    token       tokens[slot]         the token at position p
    fingerprint fingerprints[slot]   sum of mixed(i, token i) for i = 0 .. p

A sequence that reads all its slots through its block table, and sums up what it reads, comes to the
fingerprints stored there; if a block was lent twice, moved without its copy, shared wrongly or
overwritten, it does not. Host blocks of swap space hold the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpage.blocks import PoolGeometry
from kvpage.plan import StepPlan, StepResult

Tokens = npt.NDArray[np.int64]
NextToken = Callable[[Tokens], int]
"""Chooses the token after `int64[n]` tokens. Must depend on these alone."""

EMPTY = -1
"""The token of a slot that was never written."""


class CorruptCache(AssertionError):  # noqa: N818  (reads as what was found)
    """A sequence read back something that is not its own."""


def arbitrary_token(tokens: Tokens) -> int:
    """A number below 251 that depends on every token and its position."""
    return int(fingerprints(tokens)[-1] % np.uint64(251))


def undisturbed(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    next_token: NextToken = arbitrary_token,
    stop_token_ids: Sequence[int] = (),
) -> list[int]:
    """What a request must generate whatever happens around it: no cache, no batch, no blocks."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(np.array(tokens, np.int64)))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


def fingerprints(tokens: Tokens) -> npt.NDArray[np.uint64]:
    """The fingerprint of every prefix of `int64[n]` tokens: `uint64[n]`."""
    positions = np.arange(len(tokens), dtype=np.uint64)
    mixed = (tokens.astype(np.uint64) << np.uint64(32)) ^ positions
    # Two rounds of multiply and shift, so that swapped tokens do not sum up to the same.
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(multiplier)
    return np.cumsum(mixed, dtype=np.uint64)


class FakeRunner:
    """Executes plans over token ids and raises `CorruptCache` at the first wrong read.

    Equal requests give equal outputs under every strategy, batch and preemption; `undisturbed`
    says which.

    Args:
        geometry: the pool.
        next_token: chooses the next token from the tokens that a sequence reads back.
        known_tokens: `int32[max_num_seqs, max_model_len]`, what each row should read (such as
            `RunningBatch.tokens`). Without it, a sequence that reads the whole of another one
            shows only in its output.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        *,
        next_token: NextToken = arbitrary_token,
        known_tokens: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self.closed = False
        self._block_size = geometry.block_size
        self._next_token = next_token
        self._known_tokens = known_tokens
        self._tokens = np.full(geometry.num_slots, EMPTY, np.int64)
        self._fingerprints = np.zeros(geometry.num_slots, np.uint64)
        self._host: dict[int, list[npt.NDArray[Any]]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Runner.execute`.

        Raises:
            CorruptCache: a sequence of the plan does not read back itself.
            RuntimeError: the runner is closed.
        """
        if self.closed:
            raise RuntimeError("the runner is closed")
        self._swap_out(plan.swap_outs)
        self._copy(plan.copies)
        self._swap_in(plan.swap_ins)
        self._tokens[plan.slots] = plan.token_ids
        reads = [_Read(plan, i, self._block_size, self._tokens) for i in range(len(plan.rows))]
        for read in reads:
            self._fingerprints[read.new_slots] = read.fingerprints[read.first_new :]
        for read in reads:
            self._check(read)
        tokens_of = {read.row: read.tokens for read in reads}
        sampled = [self._next_token(tokens_of[row]) for row in plan.sample_rows.tolist()]
        return StepResult(np.array(sampled, np.int64))

    def poison(self, blocks: npt.NDArray[np.int64]) -> None:
        """See `Poisonable.poison`."""
        self._tokens.reshape(-1, self._block_size)[blocks] = EMPTY
        self._fingerprints.reshape(-1, self._block_size)[blocks] = 0

    def close(self) -> None:
        """See `Runner.close`."""
        self.closed = True

    @property
    def _caches(self) -> list[npt.NDArray[Any]]:
        """All that a slot holds, by block."""
        return [c.reshape(-1, self._block_size) for c in (self._tokens, self._fingerprints)]

    def _copy(self, copies: npt.NDArray[np.int64]) -> None:
        """Copy whole blocks; every source is read before any destination is written."""
        for blocks in self._caches:
            blocks[copies[:, 1]] = blocks[copies[:, 0]]

    def _swap_out(self, swap_outs: npt.NDArray[np.int64]) -> None:
        for block, host_block in swap_outs.tolist():
            self._host[host_block] = [cache[block].copy() for cache in self._caches]

    def _swap_in(self, swap_ins: npt.NDArray[np.int64]) -> None:
        """Fill blocks with what host blocks hold; each is read once only."""
        for host_block, block in swap_ins.tolist():
            if host_block not in self._host:
                raise CorruptCache(f"host block {host_block}, which holds nothing, is swapped in")
            for cache, held in zip(self._caches, self._host.pop(host_block), strict=True):
                cache[block] = held

    def _check(self, read: "_Read") -> None:
        """Compare a sequence's read with what was written for it."""
        wrong = self._fingerprints[read.slots] != read.fingerprints
        wrong[read.first_new :] |= read.tokens[read.first_new :] != read.new_tokens
        if self._known_tokens is not None:
            wrong |= self._known_tokens[read.row, : len(read.tokens)] != read.tokens
        if wrong.any():
            position = int(wrong.argmax())
            raise CorruptCache(
                f"row {read.row} reads token {read.tokens[position]} at position {position} "
                f"(block {read.slots[position] // self._block_size}), which is not its own"
            )


class _Read:
    """What one sequence of a plan reads through its block table, after the step has written.

    Attributes:
        row: its row of the table.
        slots: `int64[n]`, of all its tokens.
        tokens: `int64[n]`, found there.
        fingerprints: `uint64[n]`, of what was found.
        first_new: the first position that this step wrote.
        new_tokens: the tokens that this step was to write.
    """

    def __init__(self, plan: StepPlan, index: int, block_size: int, cache: Tokens) -> None:
        self.row = int(plan.rows[index])
        self.slots = _slots(plan.block_tables[self.row], int(plan.kv_lens[index]), block_size)
        self.tokens = cache[self.slots]
        self.fingerprints = fingerprints(self.tokens)
        self.first_new = int(plan.kv_lens[index] - plan.query_lens[index])
        end = int(plan.query_lens[: index + 1].sum())
        self.new_tokens = plan.token_ids[end - int(plan.query_lens[index]) : end]

    @property
    def new_slots(self) -> Tokens:
        """The slots that this step was to write."""
        return self.slots[self.first_new :]


def _slots(table: npt.NDArray[np.int32], num_tokens: int, block_size: int) -> Tokens:
    """The slots of the first `num_tokens` tokens of a row of the block table."""
    positions = np.arange(num_tokens, dtype=np.int64)
    blocks = table[positions // block_size].astype(np.int64)
    if (blocks < 0).any():
        held = int((blocks >= 0).sum())
        raise CorruptCache(f"a row of {num_tokens} tokens has blocks for the first {held} only")
    return blocks * block_size + positions % block_size
