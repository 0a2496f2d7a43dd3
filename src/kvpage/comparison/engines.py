"""Where a comparison has its engines from: one loaded model for all of them."""

import os
from typing import Any, Protocol

import attrs

from kvpage.engine import AsyncEngine
from kvpage.pretrained import Pretrained, load_pretrained


class EngineSource(Protocol):
    """Opens engines over one model. Its methods may take long; call them from a thread."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def max_len(self) -> int:
        """Longest sequence that the model allows, in tokens."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        ...

    @property
    def device(self) -> str:
        """Where it computes."""
        ...

    def open(self, **settings: Any) -> AsyncEngine:
        """A new engine; see `EngineConfig`."""
        ...


@attrs.frozen(eq=False)
class SharedModel:
    """An `EngineSource` over weights that are loaded once."""

    loaded: "Pretrained"

    @property
    def name(self) -> str:
        """See `EngineSource`."""
        return self.loaded.name

    @property
    def vocab_size(self) -> int:
        """See `EngineSource`."""
        return self.loaded.model.vocab_size

    @property
    def max_len(self) -> int:
        """See `EngineSource`."""
        return self.loaded.model.max_len

    @property
    def bytes_per_token(self) -> int:
        """See `EngineSource`."""
        return self.loaded.model.bytes_per_token

    @property
    def device(self) -> str:
        """See `EngineSource`."""
        return str(self.loaded.model.device)

    def open(self, **settings: Any) -> AsyncEngine:
        """See `EngineSource`."""
        return AsyncEngine.from_loaded(self.loaded, **settings)


def open_source(model: Any, **loading: Any) -> SharedModel:
    """Load a model by name or path, or take one that the caller has loaded. Blocks.

    Args:
        model: as for `AsyncEngine.from_pretrained`, or a transformers model.
        loading: `dtype`, `device` and `cache_dir` of `AsyncEngine.from_pretrained`.

    Raises:
        ConfigError: there is no such model.
        UnsupportedModelError: its attention cannot be paged.
    """
    if model is None or isinstance(model, str | os.PathLike):
        return SharedModel(load_pretrained(model, **loading))
    from kvpage.model import share_model

    name = getattr(model.config, "name_or_path", "") or type(model).__name__
    return SharedModel(Pretrained(name, share_model(model), None))
