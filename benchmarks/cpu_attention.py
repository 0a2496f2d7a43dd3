"""How fast paged attention on the CPU is, as a share of what this machine can do.

    python benchmarks/cpu_attention.py

Decode is compared with the rate at which torch sums an array far larger than the caches, prefill
with torch's matrix product, both measured in turn with the kernel: best of each. Blocks of 16
tokens lie in random order; every layer has pools of its own, so that decode reads from memory.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import attrs
import numpy as np
import torch

from kvpage.kernels import cpu
from kvpage.kernels.work import AttentionBatch

BLOCK_SIZE = 16
MEBIBYTE = 2**20


@attrs.frozen
class Case:
    """One step: so many sequences, each with so many queries at the end of its keys."""

    sequences: int
    queries: int
    keys: int
    heads: tuple[int, int] = (9, 3)
    head_dim: int = 64
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return (
            f"{self.sequences:3} x {self.queries:4} queries, {self.keys:6} keys, "
            f"heads {self.heads[0]:2}:{self.heads[1]}, d{self.head_dim:<3} "
            f"{str(self.dtype).removeprefix('torch.'):8}"
        )

    @property
    def kv_bytes(self) -> int:
        """What a decode step has to read, per layer."""
        tokens = self.sequences * self.keys
        return 2 * tokens * self.heads[1] * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Two products, over the keys that each query sees."""
        first = self.keys - self.queries + 1
        pairs = self.sequences * self.queries * (first + self.keys) // 2
        return 4 * pairs * self.heads[0] * self.head_dim

    def layers(self, min_bytes: int) -> list[Callable[[], torch.Tensor]]:
        """Calls for so many layers that their pools hold so many bytes."""
        width = -(-self.keys // BLOCK_SIZE)
        blocks = np.random.default_rng(0).permutation(self.sequences * width)
        batch = AttentionBatch(
            blocks.reshape(self.sequences, width).astype(np.int32),
            np.arange(self.sequences, dtype=np.int32),
            np.full(self.sequences, self.queries, np.int32),
            np.full(self.sequences, self.keys, np.int32),
            BLOCK_SIZE,
        )
        q = torch.randn(self.heads[0], self.sequences * self.queries, self.head_dim).transpose(0, 1)
        shape = (blocks.size * BLOCK_SIZE, self.heads[1], self.head_dim)

        def layer() -> Callable[[], torch.Tensor]:
            k, v = (torch.randn(shape).to(self.dtype) for _ in range(2))
            return lambda: cpu.paged_attention(q, k, v, batch, scale=0.125)

        return [layer() for _ in range(max(1, -(-min_bytes // self.kv_bytes)))]


DECODE = [
    Case(1, 1, 300),
    Case(20, 1, 300),
    Case(64, 1, 300),
    Case(8, 1, 4096),
    Case(1, 1, 32768),
    Case(64, 1, 300, heads=(12, 12)),
    Case(8, 1, 1024, heads=(32, 8), head_dim=128),
    Case(64, 1, 300, dtype=torch.bfloat16),
]
PREFILL = [
    Case(1, 178, 178),
    Case(1, 512, 512),
    Case(1, 512, 4096),
    Case(4, 8, 1024),
    Case(4, 128, 2048, heads=(32, 8), head_dim=128),
    Case(1, 512, 4096, dtype=torch.bfloat16),
]


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def best_in_turn(rounds: int, *calls: Callable[[], object]) -> list[float]:
    times = [[seconds(call) for call in calls] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


def in_row(calls: list[Callable[[], torch.Tensor]]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def decode(rounds: int) -> None:
    big = torch.ones(64 * MEBIBYTE)
    for case in DECODE:
        layers = case.layers(64 * MEBIBYTE)
        read, taken = best_in_turn(rounds, big.sum, in_row(layers))
        limit = big.nbytes / read / 1e9
        rate = case.kv_bytes * len(layers) / taken / 1e9
        micros = taken / len(layers) * 1e6
        print(f"{case}  {micros:8.0f} us  {rate:6.1f} GB/s  {rate / limit:4.0%} of {limit:.0f}")


def prefill(rounds: int) -> None:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    for case in PREFILL:
        layers = case.layers(1)
        product, taken = best_in_turn(rounds, lambda: a @ b, in_row(layers))
        limit = 2 * 1024**3 / product / 1e9
        rate = case.flops * len(layers) / taken / 1e9
        micros = taken / len(layers) * 1e6
        print(f"{case}  {micros:8.0f} us  {rate:6.0f} GF/s  {rate / limit:4.0%} of {limit:.0f}")


def overhead(rounds: int) -> None:
    """A call on one key does next to nothing but be called."""
    step = Case(1, 1, 1).layers(1)[0]
    print(f"a call beside its kernel: {best_in_turn(rounds * 50, step)[0] * 1e6:.1f} us")


def compilation() -> None:
    """In fresh processes, the first one with an empty cache."""
    program = (
        "import time, torch; t = time.process_time(); from kvpage.kernels import cpu, cpu_kernel, "
        "cpu_plan; cpu_kernel.kernel(torch.float32); cpu_plan.planner(); "
        "print(f'{time.process_time() - t:.2f} s of one core')"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in ("empty", "filled"):
            printed = subprocess.check_output(
                [sys.executable, "-c", program],
                env={**os.environ, "NUMBA_CACHE_DIR": folder},
                text=True,
            )
            print(f"importing numba and getting the kernel, cache {name}: {printed.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.threads} threads, load {os.getloadavg()[0]:.1f} at the start")
    decode(arguments.rounds)
    prefill(arguments.rounds)
    overhead(arguments.rounds)
    compilation()


if __name__ == "__main__":
    main()
