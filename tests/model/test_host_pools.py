"""K and V on the host: every layer, every number of a block, there and back."""

import numpy as np
import torch

from kvpage.host_pools import HostPools
from kvpage.kernels import attention_backend
from kvpage.model import KVPools
from kvpage.probe import LayerShape

SHAPES = (LayerShape(2, 16, 8, 2), LayerShape(1, 24, 24, 4))
BLOCK_SIZE = 4


def pools_of(num_blocks: int) -> KVPools:
    """Pools of two layers, each number different from all others of its pool."""
    pools = KVPools(
        SHAPES,
        num_blocks * BLOCK_SIZE,
        attention_backend("reference"),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for kv in pools.layers:
        for pool in kv:
            pool.copy_(torch.arange(pool.numel(), dtype=pool.dtype).view(pool.shape))
    return pools


def test_blocks_come_back_into_other_blocks() -> None:
    """Scattered blocks, to neighbours and others on the host, and back in another order."""
    pools = pools_of(9)
    before = [[pool.clone().view(9, -1) for pool in kv] for kv in pools.layers]
    host = HostPools(pools, 6, BLOCK_SIZE)

    host.swap_out(np.array([[7, 0], [2, 1], [5, 4], [3, 3]]))
    for kv in pools.layers:
        for pool in kv:
            pool.fill_(float("nan"))
    host.swap_in(np.array([[3, 8], [4, 0], [0, 2], [1, 4]]))

    for kv, kv_before in zip(pools.layers, before, strict=True):
        for pool, was in zip(kv, kv_before, strict=True):
            found = pool.view(9, -1)
            assert torch.equal(found[[8, 0, 2, 4]], was[[3, 5, 7, 2]])
            assert found[[1, 3, 5, 6, 7]].isnan().all()
