"""What a request would need, and what would become of it, before it is submitted."""

import math

import attrs

from kvpage.blocks import PoolGeometry
from kvpage.errors import RequestTooLong
from kvpage.request import token_limit
from kvpage.sampling import SamplingParams
from kvpage.scheduler import WATERMARK, span_tokens
from kvpage.stats import EngineStatistics


@attrs.frozen(kw_only=True)
class Estimate:
    """What a request would need at most, and whether there is room for it.

    Attributes:
        prompt_tokens: length of the prompt.
        max_output_tokens: tokens of all `n` choices together, if none of them stops early.
        prompt_blocks: blocks that its admission needs; those that it would share are counted too.
        max_blocks: blocks of all choices at their longest, as if they shared none. A strategy that
            reserves ahead, as `contiguous` does, takes more.
        refusal: what `RequestTooLong` would say, or None.
        fits: it would be accepted, and a choice at its longest fits the pool. (Choices that do not
            fit together run one after another.)
        admitted_now: as the engine was after its last step, it would start in the next: nobody
            waits before it, and there are free places and blocks.
    """

    prompt_tokens: int
    max_output_tokens: int
    prompt_blocks: int
    max_blocks: int
    refusal: str | None
    fits: bool
    admitted_now: bool


def estimate(
    prompt_tokens: int,
    params: SamplingParams,
    geometry: PoolGeometry,
    *,
    window: int,
    max_batch_tokens: int,
    max_num_seqs: int,
    statistics: EngineStatistics,
) -> Estimate:
    """See `Estimate`.

    Args:
        prompt_tokens: length of the prompt.
        params: what would be asked for.
        geometry: the pool.
        window: tokens that a sequence holds while it generates, since a window slides; 0: all.
        max_batch_tokens: tokens that one step computes at most.
        max_num_seqs: sequences that run at once.
        statistics: of the engine, as they are now.
    """
    refusal = _refusal(prompt_tokens, params, geometry, window)
    output_tokens = params.max_tokens
    if output_tokens is None:
        output_tokens = max(0, geometry.max_model_len - prompt_tokens)
    prompt_blocks = geometry.blocks_for(prompt_tokens)
    blocks_of_one = geometry.blocks_for(prompt_tokens + output_tokens)
    if window:
        span = geometry.blocks_for(span_tokens(geometry, window, max_batch_tokens))
        prompt_blocks, blocks_of_one = min(prompt_blocks, span), min(blocks_of_one, span)
    fits = refusal is None and blocks_of_one <= geometry.num_blocks
    return Estimate(
        prompt_tokens=prompt_tokens,
        max_output_tokens=params.n * output_tokens,
        prompt_blocks=prompt_blocks,
        max_blocks=params.n * blocks_of_one,
        refusal=refusal,
        fits=fits,
        admitted_now=refusal is None and _has_room(prompt_blocks, max_num_seqs, statistics),
    )


def _refusal(
    prompt_tokens: int, params: SamplingParams, geometry: PoolGeometry, window: int
) -> str | None:
    try:
        token_limit(prompt_tokens, params, geometry, window)
    except RequestTooLong as error:
        return str(error)
    return None


def _has_room(prompt_blocks: int, max_num_seqs: int, statistics: EngineStatistics) -> bool:
    pool = statistics.pool
    kept_free = math.ceil(WATERMARK * pool.num_blocks) if statistics.num_running else 0
    return (
        statistics.num_waiting == 0
        and statistics.num_running < max_num_seqs
        and prompt_blocks + kept_free <= pool.free_blocks + pool.cached_blocks
    )
