"""Names for the content of blocks, so that equal prefixes can share them.

A block's key covers its own tokens and, through its parent's digest, everything before them:
chained hashing as in vLLM's automatic prefix caching, with a keyed 128-bit BLAKE2b so that nobody
can construct a collision, and with the tokens themselves kept for comparison.
"""

from hashlib import blake2b
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt


@attrs.frozen
class BlockKey:
    """Names the content of one full block: its tokens and everything before them.

    Attributes:
        digest: identifies the chain of blocks up to and including this one.
        parent: the digest of the block before; empty for the first block.
        tokens: the block's token ids as bytes, compared on a hit, so that a collision of digests
            can never hand a sequence somebody else's K and V.
    """

    digest: bytes
    parent: bytes
    tokens: bytes


class PrefixKeys(Protocol):
    """Gives the keys of one sequence's leading full blocks."""

    def first(self, num_blocks: int, tokens: npt.NDArray[np.int32]) -> list[BlockKey]:
        """Keys of blocks `0 .. num_blocks - 1` of a sequence that begins with `tokens`."""
        ...


class ChainedKeys:
    """Keys by chained hashing of token ids. Hashes every block once.

    Args:
        block_size: tokens per block.
        secret: key of the hash, one per engine, at most 64 bytes.
        salt: sequences of different salts share nothing (tenants).
        adapter: nor do those of different adapters, whose K and V differ.
    """

    def __init__(
        self, block_size: int, *, secret: bytes, salt: str = "", adapter: str | None = None
    ) -> None:
        self._block_size = block_size
        self._secret = secret
        tenant = repr((salt, adapter)).encode()
        plain = not salt and adapter is None
        self._root = b"" if plain else blake2b(tenant, digest_size=16, key=secret).digest()
        self._keys: list[BlockKey] = []

    def first(self, num_blocks: int, tokens: npt.NDArray[np.int32]) -> list[BlockKey]:
        """See `PrefixKeys.first`. Cost: one hash for each block not asked for before."""
        for index in range(len(self._keys), num_blocks):
            start = index * self._block_size
            self._keys.append(self._next(tokens[start : start + self._block_size].tobytes()))
        return self._keys[:num_blocks]

    def _next(self, tokens: bytes) -> BlockKey:
        parent = self._keys[-1].digest if self._keys else self._root
        digest = blake2b(parent + tokens, digest_size=16, key=self._secret).digest()
        return BlockKey(digest, parent, tokens)
