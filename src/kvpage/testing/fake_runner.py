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

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.blocks import PoolGeometry
from kvpage.plan import StepPlan, StepResult
from kvpage.sampling import Logprobs

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
    window: int = 0,
) -> list[int]:
    """What a request must generate whatever happens around it: no cache, no batch, no blocks."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(np.array(tokens[-window:], np.int64)))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


def fingerprints(tokens: Tokens, *, first: int = 0) -> npt.NDArray[np.uint64]:
    """The fingerprint of every prefix of `int64[n]` tokens at positions from `first` on."""
    positions = np.arange(first, first + len(tokens), dtype=np.uint64)
    mixed = (tokens.astype(np.uint64) << np.uint64(32)) ^ positions
    # Two rounds of multiply and shift, so that swapped tokens do not sum up to the same.
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(multiplier)
    return np.cumsum(mixed, dtype=np.uint64)


class FakeRunner:
    """Executes plans over token ids and raises `CorruptCache` at the first wrong read.

    It is sure of each token: every log-probability is 0.

    Equal requests give equal outputs under every strategy, batch and preemption; `undisturbed`
    says which.

    Args:
        geometry: the pool.
        next_token: chooses the next token from the tokens that a sequence reads back.
        known_tokens: `int32[max_num_seqs, max_model_len]`, what each row should read (such as
            `RunningBatch.tokens`). Without it, a sequence that reads the whole of another one
            shows only in its output.
        window: a token sees itself and the `window - 1` before it, and the next token is chosen
            from these; 0: all.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        *,
        next_token: NextToken = arbitrary_token,
        known_tokens: npt.NDArray[np.int32] | None = None,
        window: int = 0,
    ) -> None:
        self.closed = False
        self._block_size = geometry.block_size
        self._next_token = next_token
        self._known_tokens = known_tokens
        self._window = window
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
        reads = [self._read(plan, index) for index in range(len(plan.rows))]
        for read in reads:
            self._check(read)
        tokens_of = {read.row: read.tokens for read in reads}
        sampled = [
            self._next_token(tokens_of[row][-self._window :]) for row in plan.sample_rows.tolist()
        ]
        asked = plan.sampling.logprobs.tolist()
        scores = plan.prompt_scores
        scored = [] if scores is None else [*zip(scores.token_ids, scores.num_top, strict=True)]
        return StepResult(
            np.array(sampled, np.int64),
            logprobs=[
                _certain(token, top) if top >= 0 else None
                for token, top in zip(sampled, asked, strict=True)
            ],
            prompt_logprobs=[_certain(int(token), int(top)) for token, top in scored],
        )

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

    def _read(self, plan: StepPlan, index: int) -> "_Read":
        """Let a sequence read what it sees, and write the fingerprints of its new tokens."""
        row, kv_len = int(plan.rows[index]), int(plan.kv_lens[index])
        first_new = kv_len - int(plan.query_lens[index])
        first = max(0, first_new - self._window + 1) if self._window else 0
        slots = _slots(plan.block_tables[row], first, kv_len, self._block_size)
        tokens = self._tokens[slots]
        seen = fingerprints(tokens, first=first)
        if 0 < first < first_new:
            # What is behind the window is known by its sum alone, which the first token seen has.
            seen += self._fingerprints[slots[:1]] - seen[:1]
        end = int(plan.query_lens[: index + 1].sum())
        new_tokens = plan.token_ids[end - (kv_len - first_new) : end]
        new = first_new - first
        self._fingerprints[slots[new:]] = seen[new:]
        return _Read(row, first, slots, tokens, seen, new, new_tokens)

    def _check(self, read: "_Read") -> None:
        """Compare a sequence's read with what was written for it."""
        wrong = self._fingerprints[read.slots] != read.fingerprints
        wrong[read.num_old :] |= read.tokens[read.num_old :] != read.new_tokens
        if self._known_tokens is not None:
            end = read.first + len(read.tokens)
            wrong |= self._known_tokens[read.row, read.first : end] != read.tokens
        if wrong.any():
            found = int(wrong.argmax())
            raise CorruptCache(
                f"row {read.row} reads token {read.tokens[found]} at position "
                f"{read.first + found} (block {read.slots[found] // self._block_size}), which is "
                f"not its own"
            )


def _certain(token: int, num_top: int) -> Logprobs:
    """Of a token that could be no other."""
    return Logprobs(0.0, ((token, 0.0),) if num_top else ())


@attrs.frozen(eq=False)
class _Read:
    """What one sequence of a plan reads through its block table, after the step has written.

    Attributes:
        row: its row of the table.
        first: the first position that it sees.
        slots: `int64[n]`, of all tokens that it sees.
        tokens: `int64[n]`, found there.
        fingerprints: `uint64[n]`, of what was found.
        num_old: how many of them were written before this step.
        new_tokens: the tokens that this step was to write.
    """

    row: int
    first: int
    slots: Tokens
    tokens: Tokens
    fingerprints: npt.NDArray[np.uint64]
    num_old: int
    new_tokens: Tokens


def _slots(table: npt.NDArray[np.int32], first: int, end: int, block_size: int) -> Tokens:
    """The slots of positions `first` to `end` of a row of the block table."""
    positions = np.arange(first, end, dtype=np.int64)
    blocks = table[positions // block_size].astype(np.int64)
    if (blocks < 0).any():
        held = int((blocks >= 0).sum())
        raise CorruptCache(f"a row of {end - first} tokens has blocks for the first {held} only")
    return blocks * block_size + positions % block_size
