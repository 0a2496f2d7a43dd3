"""The running batch: what is known of every running sequence, in arrays.

A sequence that is admitted gets a row and keeps it until it ends or is preempted, so a step works
on columns, never on sequences one by one.
"""

import numpy as np
import numpy.typing as npt

from kvpage.logits import History
from kvpage.sampling import SamplingRows
from kvpage.sequence import NO_ADAPTER, Sequence, SequenceState

NO_TOKEN = -1


class RunningBatch:
    """Rows of running sequences.

    Attributes:
        tokens: `int32[N, max_model_len]`, known tokens of each row.
        num_tokens: `int64[N]`, how many are known; 0 in a free row.
        num_computed: `int64[N]`, how many have K and V in the cache.
        prompt_tokens: `int64[N]`.
        max_total_tokens: `int64[N]`.
        scored_tokens: `int64[N]`, see `Sequence.scored_tokens`.
        adapters: `int32[N]`, see `Sequence.adapter`.
        stop_ids: `int32[N, S]`, tokens that end the row, padded with -1.
        sampling: the sampling parameters, by row.
        sequences: the sequence in each row, or None.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        # Pages of `tokens` are committed when they are first written, not here.
        self.tokens: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens: npt.NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.num_computed: npt.NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.prompt_tokens: npt.NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.max_total_tokens: npt.NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.scored_tokens: npt.NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.adapters: npt.NDArray[np.int32] = np.full(max_num_seqs, NO_ADAPTER, np.int32)
        self.stop_ids: npt.NDArray[np.int32] = np.full((max_num_seqs, 4), NO_TOKEN, np.int32)
        self.sampling = SamplingRows.empty(max_num_seqs)
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def next_row(self) -> int | None:
        """The row that the next `add` will use; None when all rows are taken."""
        return self._free_rows[-1] if self._free_rows else None

    def add(self, sequence: Sequence, num_computed: int) -> None:
        """Give `sequence` the next free row; its first `num_computed` tokens have K and V."""
        row = self._free_rows.pop()
        known = len(sequence.tokens)
        self.tokens[row, :known] = sequence.tokens
        self.num_tokens[row] = known
        self.num_computed[row] = num_computed
        self.prompt_tokens[row] = sequence.prompt_tokens
        self.max_total_tokens[row] = sequence.max_total_tokens
        self.scored_tokens[row] = sequence.scored_tokens
        self.adapters[row] = sequence.adapter
        self._put_stop_ids(row, sequence.stop_token_ids)
        self.sampling.put(row, sequence.params, sequence.seed, sequence.rules, sequence.matcher)
        self.sequences[row] = sequence
        sequence.row = row
        sequence.state = SequenceState.RUNNING

    def remove(self, sequence: Sequence, state: SequenceState) -> None:
        """Take `sequence` out of its row; what it knows goes back to `sequence.tokens`."""
        row = sequence.row
        sequence.tokens = self.tokens[row, : self.num_tokens[row]].copy()
        self.num_tokens[row] = self.num_computed[row] = 0
        self.sequences[row] = None
        self._free_rows.append(row)
        sequence.row = -1
        sequence.state = state

    def append(
        self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Add one sampled token to each of `rows`.

        Returns:
            Two masks `bool[n]`: rows that ended by a stop token, rows that reached their length.
        """
        self.tokens[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
        stopped = (self.stop_ids[rows] == token_ids[:, None]).any(axis=1)
        return stopped, self.num_tokens[rows] >= self.max_total_tokens[rows]

    def history(self, rows: npt.NDArray[np.int64], sampling: SamplingRows) -> History | None:
        """The tokens so far of those of `rows` whose sampling looks at them; None if none does."""
        wanted = np.flatnonzero(sampling.needs_history)
        if not len(wanted):
            return None
        chosen = rows[wanted]
        num_tokens = self.num_tokens[chosen]
        tokens = self.tokens[chosen, : num_tokens.max()]
        return History(wanted, tokens, self.prompt_tokens[chosen], num_tokens)

    def _put_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids
