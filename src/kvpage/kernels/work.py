"""Host side of paged attention: what a step asks of the kernel."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import attrs
import numpy as np
import numpy.typing as npt

PlanT = TypeVar("PlanT")


@attrs.frozen(eq=False)
class AttentionBatch:
    """Which tokens of a step attend to which slots. One object a step, shared by all layers.

    A step packs the queries of S sequences into T tokens without padding. Sequence `i` owns
    `query_lens[i]` adjacent tokens; its queries are the last ones of its `kv_lens[i]` tokens, so
    query `j` sits at position `kv_lens[i] - query_lens[i] + j` and attends to every position up
    to its own. Position `p` lives in slot `block_table[rows[i], p // block_size] * block_size +
    p % block_size`. Entries behind a sliding window may be -1 and are never read.

    Attributes:
        block_table: `int32[R, W]`, the block ids of R rows.
        rows: `int32[S]`, the row of each sequence.
        query_lens: `int32[S]`, each at least 1, sum T.
        kv_lens: `int32[S]`, tokens in the cache once this step's K and V are written.
        block_size: tokens per block.
    """

    block_table: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    query_lens: npt.NDArray[np.int32]
    kv_lens: npt.NDArray[np.int32]
    block_size: int
    # Any: each kernel keeps a plan of a type of its own here.
    _plans: dict[Hashable, Any] = attrs.field(factory=dict, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """T, the queries of all sequences."""
        return int(self.query_lens.sum())

    def planned(self, key: Hashable, build: Callable[[], PlanT]) -> PlanT:
        """What a kernel derives from this batch: built for the first layer that asks, then kept.

        Args:
            key: everything beside the batch that the plan depends on.
            build: makes the plan; its type must follow from the key.
        """
        if key not in self._plans:
            self._plans[key] = build()
        return cast(PlanT, self._plans[key])
