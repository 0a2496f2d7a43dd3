"""An engine of one moment as plain values: for other processes to look at.

Nobody's text and nobody's request id is in it: who holds blocks is told by numbers that mean
nothing else.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.blocks import PoolGeometry
from kvpage.engine import AsyncEngine
from kvpage.stats import BlockMap, EngineStatistics, SequenceBlocks

Record = TypeVar("Record")


@attrs.frozen(eq=False)
class EngineSnapshot:
    """What `kvpage watch` shows of one engine.

    Attributes:
        name: the model's, or what the engine is served as.
        allocator: the strategy with its options.
        statistics: the counters.
        block_map: who holds which block; requests are named by their place, `"0"` the most urgent.
    """

    name: str
    allocator: str
    statistics: EngineStatistics
    block_map: BlockMap

    @classmethod
    async def of(cls, engine: AsyncEngine, name: str | None = None) -> Self:
        """The engine as it is between two steps.

        Raises:
            EngineClosed: the engine was closed.
        """
        block_map = await engine.block_map()
        sequences = tuple(
            attrs.evolve(sequence, request_id=str(place))
            for place, sequence in enumerate(block_map.sequences)
        )
        return cls(
            name or engine.model.name,
            str(engine.config.allocator),
            engine.stats(),
            attrs.evolve(block_map, sequences=sequences),
        )

    def document(self) -> dict[str, Any]:
        """As dicts, lists, numbers and texts; blocks as runs `[first, how many]`."""
        block_map = self.block_map
        return {
            "name": self.name,
            "allocator": self.allocator,
            "statistics": attrs.asdict(self.statistics),
            "geometry": attrs.asdict(block_map.geometry),
            "sequences": [
                {"blocks": runs(sequence.blocks).tolist(), "num_tokens": sequence.num_tokens}
                for sequence in block_map.sequences
            ],
            "cached": runs(block_map.cached).tolist(),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Read what `document` gives; fields that this version does not know are left out.

        Raises:
            ValueError: it is something else.
        """
        try:
            sequences = tuple(
                SequenceBlocks(str(place), _blocks(entry["blocks"]), int(entry["num_tokens"]))
                for place, entry in enumerate(document["sequences"])
            )
            geometry = _known(PoolGeometry, document["geometry"])
            return cls(
                str(document["name"]),
                str(document["allocator"]),
                _known(EngineStatistics, document["statistics"]),
                BlockMap(geometry, sequences, _blocks(document["cached"])),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a snapshot of an engine: {error!r}") from error


def _known(record: type[Record], values: Mapping[str, Any]) -> Record:
    """A record of those values that it has a field for, records in it included."""
    known = {}
    for field in attrs.fields(record):  # type: ignore[arg-type]
        if field.name in values:
            value = values[field.name]
            inner = isinstance(field.type, type) and attrs.has(field.type)
            known[field.name] = _known(field.type, value) if inner else value
    return record(**known)


def runs(blocks: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Adjacent blocks together, `int64[n, 2]` of first and how many: `3 4 5 9` as `3 3, 9 1`."""
    blocks = np.asarray(blocks, np.int64)
    if not blocks.size:
        return np.empty((0, 2), np.int64)
    starts = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) != 1)
    lengths = np.diff(starts, append=blocks.size)
    return np.stack([blocks[starts], lengths], axis=1)


def _blocks(runs: Iterable[Iterable[int]]) -> Any:
    return tuple(itertools.chain.from_iterable(range(first, first + n) for first, n in runs))
