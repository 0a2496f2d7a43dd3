"""Engines over fake runners, where a comparison would open them over a model."""

from typing import Any

import attrs

from kvpage import AsyncEngine, PoolGeometry
from kvpage.request import EngineModel
from kvpage.testing import FakeRunner
from tests.engine.runners import VOCAB_SIZE

BYTES_PER_TOKEN = 1000


@attrs.define(eq=False)
class FakeSource:
    """An `EngineSource` without a model.

    Attributes:
        opened: the label of each candidate that an engine was opened for, in order.
    """

    name: str = "fake"
    vocab_size: int = VOCAB_SIZE
    max_len: int = 1024
    bytes_per_token: int = BYTES_PER_TOKEN
    device: str = "cpu"
    opened: list[str] = attrs.field(factory=list)

    def open(self, **settings: Any) -> AsyncEngine:
        num_blocks = int(settings.pop("kv_memory").removesuffix(" blocks"))
        block_size, max_model_len = settings.pop("block_size"), settings.pop("max_model_len")
        self.opened.append(f"{settings['allocator']}/{block_size}")
        geometry = PoolGeometry(num_blocks, block_size, max_model_len)
        model = EngineModel("fake", VOCAB_SIZE)
        return AsyncEngine.from_runner(FakeRunner(geometry), geometry, model, **settings)
