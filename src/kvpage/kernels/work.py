"""Host side of paged attention: what a step asks of the kernel."""

import attrs
import numpy as np
import numpy.typing as npt


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
