"""What this machine could reach at best on a workload: its bandwidth and its matmul rate.

The limit is a roofline (Williams, Waterman, Patterson 2009) in float32 over the shortest schedule:
all prompts at once, then one step per output token for every request that still runs. A step's
linear layers take the longer of reading all weights once and of multiplying all rows; attention
reads the keys and values of every running request once. Nothing else takes time. Prompt attention
is counted as multiplications. What prompts begin with alike is computed once.
"""

from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from workloads import Request


@dataclass(frozen=True)
class Machine:
    """Measured rates.

    Attributes:
        bytes_per_s: reading memory from all cores.
        flops_per_s: float32 matrix products from all cores, multiply and add counted apart.
    """

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Shape:
    """What a model costs.

    Attributes:
        layer_weights: weights of all linear layers but the head.
        head_weights: weights of the head.
        kv_floats_per_token: keys and values of one token in all layers.
        attention_flops_per_pair: for each pair of a query and a key, in all layers.
    """

    layer_weights: int
    head_weights: int
    kv_floats_per_token: int
    attention_flops_per_pair: int

    @classmethod
    def of(cls, config: object) -> "Shape":
        """From a Llama-like configuration of transformers."""
        layers, hidden, width = (
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
        )
        dim = hidden // config.num_attention_heads
        kv = config.num_key_value_heads * dim
        return cls(
            layers * (hidden * (2 * hidden + 2 * kv) + 3 * hidden * width),
            hidden * config.vocab_size,
            layers * 2 * kv,
            layers * 4 * hidden,
        )


def measure_machine(repeats: int = 12) -> Machine:
    """The best of several measurements of each rate."""
    block = torch.ones(256 << 20, dtype=torch.uint8).view(torch.float32)
    a, b = torch.rand(2048, 2048), torch.rand(2048, 2048)
    reads = min(_seconds(block.sum) for _ in range(repeats))
    products = min(_seconds(lambda: a @ b) for _ in range(repeats))
    return Machine(block.nbytes / reads, 2 * 2048**3 / products)


def seconds(machine: Machine, shape: Shape, requests: list[Request]) -> float:
    """The shortest time for `requests`; see the module."""
    prompts = np.array([len(request.prompt) for request in requests])
    outputs = np.array([request.num_tokens for request in requests])
    num_tokens, pairs = _prompt_work(requests)
    total = _linear(machine, shape.layer_weights, num_tokens)
    total += _linear(machine, shape.head_weights, len(requests))
    total += shape.attention_flops_per_pair * pairs / machine.flops_per_s
    for step in range(1, int(outputs.max())):
        running = outputs > step
        rows, context = int(running.sum()), int((prompts[running] + step).sum())
        for weights in (shape.layer_weights, shape.head_weights):
            total += _linear(machine, weights, rows)
        total += 4 * shape.kv_floats_per_token * context / machine.bytes_per_s
    return total


def _prompt_work(requests: list[Request]) -> tuple[int, int]:
    """Tokens of prompts, and pairs of a query and a key, without what was computed before."""
    seen: set[int] = set()
    pairs = 0
    for request in requests:
        prefix = 0
        for position, token in enumerate(request.prompt):
            prefix = hash((prefix, token))
            if prefix not in seen:
                seen.add(prefix)
                pairs += position + 1
    return len(seen), pairs


def _linear(machine: Machine, weights: int, rows: int) -> float:
    read = 4 * weights / machine.bytes_per_s
    return max(read, 2 * weights * rows / machine.flops_per_s)


def _seconds(work: object) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started
