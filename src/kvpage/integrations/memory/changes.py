"""What the memory page is told: a whole snapshot first, then what has changed.

No text, no token and no request id is in it. A sequence goes by its number in the engine, as `"7"`,
or `"7.1"` for the second choice of request 7. Blocks are packed: a pool of 100,000 blocks, however
scattered, is told within a few milliseconds.
"""

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.blocks import SequenceId
from kvpage.engine import AsyncEngine
from kvpage.sampling import MAX_CHOICES
from kvpage.snapshot import runs
from kvpage.stats import BlockImage, EngineStatistics, SequenceImage

Document = dict[str, Any]


def about(engine: AsyncEngine) -> Document:
    """What never changes."""
    return {
        "model": engine.model.name,
        "allocator": str(engine.config.allocator),
        "num_blocks": engine.geometry.num_blocks,
        "block_size": engine.geometry.block_size,
        "max_model_len": engine.geometry.max_model_len,
    }


def snapshot(image: BlockImage) -> Document:
    """Everything."""
    return {
        "figures": _figures(image.statistics),
        "sequences": [_whole(sequence) for sequence in image.sequences],
        "preempted": [label(number) for number in image.preempted],
        "cached": packed(np.flatnonzero(_flags(image))),
    }


def changes(before: BlockImage, after: BlockImage) -> Document:
    """What makes a snapshot of `after` out of one of `before`; empty if nothing has changed.

    `sequences` are new, or lie elsewhere; `grown` have further blocks; `tokens` counts those that
    have K and V.
    """
    old = {sequence.number: sequence for sequence in before.sequences}
    new = {sequence.number: sequence for sequence in after.sequences}
    kept = [(old[number], sequence) for number, sequence in new.items() if number in old]
    grown = [pair for pair in kept if _continues(*pair)]
    moved = [sequence for earlier, sequence in kept if not _continues(earlier, sequence)]
    started = [sequence for number, sequence in new.items() if number not in old]
    document = {
        "figures": _changed(_figures(before.statistics), _figures(after.statistics)),
        "sequences": [_whole(sequence) for sequence in [*started, *moved]],
        "grown": list(_growth(grown)),
        "tokens": [
            [label(sequence.number), sequence.num_tokens]
            for earlier, sequence in grown
            if earlier.num_tokens != sequence.num_tokens
        ],
        "ended": [label(number) for number in old if number not in new],
        **_cache_changes(before, after),
    }
    if before.preempted != after.preempted:
        document["preempted"] = [label(number) for number in after.preempted]
    return {name: value for name, value in document.items() if value or name == "preempted"}


def label(number: SequenceId) -> str:
    """How the page calls a sequence."""
    request, choice = divmod(number, MAX_CHOICES)
    return f"{request}.{choice}" if choice else str(request)


def packed(blocks: npt.NDArray[Any]) -> str:
    """Runs of adjacent blocks, as pairs (first, how many) of little-endian int32, in Base64."""
    return base64.b64encode(runs(blocks).astype("<i4").tobytes()).decode()


def _continues(earlier: SequenceImage, later: SequenceImage) -> bool:
    """Are the blocks the same, but for some more at the end?"""
    if earlier.first_block != later.first_block:
        return False
    return later.blocks.tobytes().startswith(earlier.blocks.tobytes())


def _growth(pairs: Iterable[tuple[SequenceImage, SequenceImage]]) -> Iterable[list[Any]]:
    for earlier, later in pairs:
        if len(later.blocks) > len(earlier.blocks):
            yield [label(later.number), packed(later.blocks[len(earlier.blocks) :])]


def _whole(sequence: SequenceImage) -> Document:
    return {
        "name": label(sequence.number),
        "first_block": sequence.first_block,
        "blocks": packed(sequence.blocks),
        "num_tokens": sequence.num_tokens,
    }


def _cache_changes(before: BlockImage, after: BlockImage) -> dict[str, str]:
    if before.cached_flags == after.cached_flags:
        return {}
    was, is_now = _flags(before), _flags(after)
    return {
        "cached": packed(np.flatnonzero(is_now & ~was)),
        "uncached": packed(np.flatnonzero(was & ~is_now)),
    }


def _flags(image: BlockImage) -> npt.NDArray[np.bool_]:
    return np.frombuffer(image.cached_flags, np.bool_)


def _figures(statistics: EngineStatistics) -> Mapping[str, float]:
    pool = statistics.pool
    figures = attrs.asdict(statistics, recurse=False, filter=_is_number)
    return {
        **figures,
        "free_blocks": pool.free_blocks,
        "used_blocks": pool.used_blocks,
        "cached_blocks": pool.cached_blocks,
        "external_waste": round(statistics.external_waste, 4),
    }


def _is_number(_attribute: "attrs.Attribute[Any]", value: Any) -> bool:
    return isinstance(value, int)


def _changed(before: Mapping[str, float], after: Mapping[str, float]) -> Document:
    return {name: value for name, value in after.items() if before[name] != value}
