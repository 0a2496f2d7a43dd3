"""The workloads of the comparison: prompts of random tokens, and how many tokens each asks for.

Lengths are drawn once; the tokens differ from run to run, so that an engine's prefix cache finds
what requests of one run share and nothing of an earlier run.
"""

from dataclasses import dataclass

import numpy as np

VOCABULARY = (5, 49_000)
"""Token ids are drawn from this range: no special token of SmolLM2 is in it."""


@dataclass(frozen=True)
class Request:
    """One request: greedy, without an end of text.

    Attributes:
        prompt: token ids.
        num_tokens: how many tokens are to be generated, exactly.
    """

    prompt: list[int]
    num_tokens: int


def w64(run: int) -> list[Request]:
    """64 requests at once, lognormal lengths: 11,438 prompt tokens and 7,718 output tokens."""
    random = np.random.default_rng(0)
    prompts = np.clip(random.lognormal(np.log(180) - 0.32, 0.8, 64), 4, 768).astype(int)
    outputs = np.clip(random.lognormal(np.log(120) - 0.32, 0.8, 64), 4, 384).astype(int)
    tokens = np.random.default_rng(run + 1)
    return [
        Request(_draw(tokens, prompt), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def w1(run: int) -> list[Request]:
    """One request: 128 tokens of prompt, 256 of output."""
    return [Request(_draw(np.random.default_rng(run + 1), 128), 256)]


def chat(run: int) -> list[Request]:
    """32 requests at once that share 512 tokens of instructions: 64 of their own, 64 of output."""
    tokens = np.random.default_rng(run + 1)
    instructions = _draw(tokens, 512)
    return [Request(instructions + _draw(tokens, 64), 64) for _ in range(32)]


def long(run: int) -> list[Request]:
    """4 requests at once with 4,096 tokens of prompt and 64 of output."""
    tokens = np.random.default_rng(run + 1)
    return [Request(_draw(tokens, 4096), 64) for _ in range(4)]


WORKLOADS = {"w64": w64, "w1": w1, "chat": chat, "long": long}


def _draw(random: np.random.Generator, num_tokens: int) -> list[int]:
    drawn: list[int] = random.integers(*VOCABULARY, num_tokens).tolist()
    return drawn
