"""Keys of pool blocks from the hash ids of a trace, so that traces share prefixes as tokens do."""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpage.blocks import SequenceId
from kvpage.prefix import BlockKey

_PROMPT, _OUTPUT = 0, 1


class TraceKeys:
    """Names the blocks of one request of a trace. A `kvpage.prefix.PrefixKeys`.

    A hash id covers its own trace block and all before it, so the id of the trace block in which a
    pool block ends, and where in it, name the pool block's whole content::

        trace blocks   |    id 7     |    id 9     | id 4 |         prompt ends in id 4
        pool blocks    | 7,2 | 9,1 | 9,3 | 4,1 | own ...            (id, end inside it)

    A trace block that the prompt ends in is another content than the same block filled, so its
    length is part of the key. What the model would generate is the request's own.

    Args:
        seq: the request.
        hash_ids: one id for each leading block of its prompt.
        prompt_tokens: length of the prompt.
        hash_block_size: tokens that one id stands for.
        block_size: tokens per pool block.
    """

    def __init__(
        self,
        seq: SequenceId,
        hash_ids: Sequence[int],
        *,
        prompt_tokens: int,
        hash_block_size: int,
        block_size: int,
    ) -> None:
        self._seq = seq
        self._hash_ids = hash_ids
        self._named_tokens = min(prompt_tokens, len(hash_ids) * hash_block_size)
        self._hash_block_size = hash_block_size
        self._block_size = block_size
        self._keys: list[BlockKey] = []

    def first(self, num_blocks: int, tokens: npt.NDArray[np.int32]) -> list[BlockKey]:
        """See `PrefixKeys.first`; the tokens of a simulation are all the same and not looked at."""
        for index in range(len(self._keys), num_blocks):
            parent = self._keys[-1].digest if self._keys else b""
            self._keys.append(BlockKey(self._digest(index), parent, b""))
        return self._keys[:num_blocks]

    def _digest(self, index: int) -> bytes:
        end = (index + 1) * self._block_size
        if end > self._named_tokens:
            return struct.pack("<bqq", _OUTPUT, self._seq, index)
        trace_block, last = divmod(end - 1, self._hash_block_size)
        first = trace_block * self._hash_block_size
        covered = min(self._hash_block_size, self._named_tokens - first)
        return struct.pack("<bqqq", _PROMPT, self._hash_ids[trace_block], last, covered)
