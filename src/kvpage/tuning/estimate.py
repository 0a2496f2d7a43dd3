"""Throughput in closed form: enough to leave most candidates out without simulating them."""

from collections.abc import Iterable

import attrs

from kvpage.plugins import AllocatorSpec
from kvpage.scheduler import WATERMARK
from kvpage.traffic import TraceRequest
from kvpage.tuning.candidates import Candidate
from kvpage.tuning.cost import MachineCost


@attrs.frozen
class Lengths:
    """What the closed form must know of a trace.

    A request of p prompt and o output tokens is in the batch for about o steps, and then holds
    p + o / 2 tokens on average; so the mean over the batch weighs requests by their output.

    Attributes:
        requests: how many.
        prompt_tokens: of all of them.
        output_tokens: of all of them.
        live_tokens: mean tokens of a running request.
        pairs: queries and keys of all prompts.
        longest: tokens of the longest request.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    live_tokens: float
    pairs: float
    longest: int

    @classmethod
    def of(cls, requests: Iterable[TraceRequest]) -> "Lengths":
        """Summed up; there must be one at least."""
        lengths = [(r.prompt_tokens, r.output_tokens) for r in requests]
        outputs = sum(output for _, output in lengths)
        return cls(
            requests=len(lengths),
            prompt_tokens=sum(prompt for prompt, _ in lengths),
            output_tokens=outputs,
            live_tokens=sum(o * (p + o / 2) for p, o in lengths) / outputs,
            pairs=sum(p * (p + 1) / 2 for p, _ in lengths),
            longest=max(p + o for p, o in lengths),
        )


@attrs.frozen
class Estimate:
    """What the closed form says of a candidate.

    Attributes:
        running: sequences in the batch.
        tokens_s: output tokens a second.
    """

    running: float
    tokens_s: float


def concurrency(
    candidate: Candidate, lengths: Lengths, *, bytes_per_token: int, max_model_len: int
) -> float:
    """Sequences that run at once: what a pool has room for, and no more than are allowed.

    A paged sequence wastes half a block on average, `(block_size - 1) / 2` tokens; a contiguous one
    takes room for the longest that the model allows, or that its request may become.
    """
    slots = candidate.num_slots(bytes_per_token)
    spec = AllocatorSpec.parse(candidate.allocator)
    if spec.name == "contiguous" and spec.options.get("reserve", "model") == "model":
        block_size = candidate.block_size
        row_tokens = -(-max_model_len // block_size) * block_size
        room: float = slots // row_tokens
    else:
        waste_tokens = (candidate.block_size - 1) / 2
        room = (1 - WATERMARK) * slots / (lengths.live_tokens + waste_tokens)
    return max(1.0, min(room, candidate.max_num_seqs, lengths.requests))


def estimate(
    candidate: Candidate, lengths: Lengths, cost: MachineCost, *, max_model_len: int
) -> Estimate:
    """The steady state of a queue that is never empty.

    In it, every output token comes with the prompt tokens of so many new requests; a step of at
    most `max_batch_tokens` shares its budget between them.
    """
    running = concurrency(
        candidate, lengths, bytes_per_token=cost.bytes_per_token, max_model_len=max_model_len
    )
    prompts_per_output = lengths.prompt_tokens / lengths.output_tokens
    rows = min(running, candidate.max_batch_tokens / (1 + prompts_per_output))
    seconds = cost.at(candidate.block_size).seconds(
        rows=rows,
        chunk_tokens=rows * prompts_per_output,
        kv_tokens=rows * lengths.live_tokens,
        pairs=rows * lengths.pairs / lengths.output_tokens,
    )
    return Estimate(running, rows / seconds)
