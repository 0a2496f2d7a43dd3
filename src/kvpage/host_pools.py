"""Host memory for the K and V of preempted sequences, and the copies there and back.

For each layer a pool on the host that is laid out like the one on the device::

    device   k_pool [num_blocks * block_size, Hkv, D]
    host     k_host [num_host_blocks, block_size * Hkv * D]

Blocks of one sequence are scattered on the device, and mostly neighbours on the host. So a layer's
blocks are gathered on the device by one indexed copy, and travel in as many pieces as they have
runs of neighbours on the host, which is page-locked beside a GPU: nothing waits for them, since
whatever reads either side later is queued behind on the same stream.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kvpage.model import KVPools
from kvpage.swap import BlockPairs


class HostPools:
    """The blocks of swap space, in host memory.

    All of the memory is reserved at once. On a CPU the operating system commits it as it is
    written; page-locked memory is committed here.

    Args:
        pools: where blocks come from and go to.
        num_blocks: host blocks to make room for.
        block_size: tokens per block.
    """

    def __init__(self, pools: KVPools, num_blocks: int, block_size: int) -> None:
        on_device = [pool.view(len(pool) // block_size, -1) for kv in pools.layers for pool in kv]
        # Pairs [blocks, numbers of a block]: the pool on the device, the pool on the host.
        self._pairs = [
            (
                pool,
                torch.empty(num_blocks, pool.shape[1], dtype=pool.dtype, pin_memory=pool.is_cuda),
            )
            for pool in on_device
        ]

    @torch.inference_mode()
    def swap_out(self, swap_outs: BlockPairs) -> None:
        """Copy blocks to the host: pairs (block, host block)."""
        for device, host in self._pairs:
            gathered = device[_indices(swap_outs[:, 0], device)]
            for first, end, host_block in _runs(swap_outs[:, 1]):
                host[host_block : host_block + end - first].copy_(
                    gathered[first:end], non_blocking=True
                )

    @torch.inference_mode()
    def swap_in(self, swap_ins: BlockPairs) -> None:
        """Copy blocks back from the host: pairs (host block, block)."""
        for device, host in self._pairs:
            gathered = torch.empty(
                len(swap_ins), device.shape[1], dtype=device.dtype, device=device.device
            )
            for first, end, host_block in _runs(swap_ins[:, 0]):
                gathered[first:end].copy_(
                    host[host_block : host_block + end - first], non_blocking=True
                )
            device[_indices(swap_ins[:, 1], device)] = gathered


def _indices(blocks: npt.NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(blocks)).to(like.device)


def _runs(blocks: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbours: where each begins and ends in `blocks`, and its first block."""
    starts = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    for first, end in zip(starts, [*starts[1:], len(blocks)], strict=True):
        yield int(first), int(end), int(blocks[first])
