"""LoRA adapters beside a model's linear layers, each request with one of them or none.

An adapter adds `scaling * B (A x)` to what some of the linear layers make of `x` (Hu et al., LoRA,
2021). The layer itself is computed once for all tokens of a step, and the products with A and B for
the tokens of each adapter that is in the step: requests with different adapters share a batch, and
a request without one gets what it gets from a model without adapters.

peft reads the adapters (the extra `lora`), into a copy of the model without weights; so what its
configurations can say about places, ranks and scalings means here what it means there.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from os import fspath
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvpage.config import Adapters
from kvpage.errors import ConfigError
from kvpage.sequence import NO_ADAPTER

_UNSUPPORTED = {
    "use_dora": "DoRA, which scales the layer's own weights",
    "modules_to_save": "modules of its own in place of the model's",
    "trainable_token_indices": "embeddings of its own",
    "lora_bias": "a bias of its own",
    "layer_replication": "layers that are repeated",
    "target_parameters": "parameters that are not linear layers",
    "alora_invocation_tokens": "invocation tokens (aLoRA)",
}
"""Settings of peft's `LoraConfig` that make an adapter more than plain LoRA."""


@attrs.frozen(eq=False)
class LowRank:
    """What one adapter adds to one layer.

    Attributes:
        a: `[rank, in_features]`.
        b: `[out_features, rank]`.
        scaling: of the product.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def add(self, inputs: torch.Tensor, outputs: torch.Tensor, places: torch.Tensor | None) -> None:
        """Add to rows of `outputs` `[T, out_features]`, in place.

        Args:
            inputs: `[T, in_features]`.
            outputs: changed.
            places: `int64[m]`, which rows; None means all.
        """
        if places is None:
            outputs.add_(inputs @ self.a.T @ self.b.T, alpha=self.scaling)
        else:
            update = inputs.index_select(0, places) @ self.a.T @ self.b.T
            outputs.index_add_(0, places, update, alpha=self.scaling)


@attrs.frozen(eq=False)
class AdaptedTokens:
    """Which tokens of a forward pass have which adapter.

    Attributes:
        num_tokens: of the pass.
        places: for each adapter in it, by number, its tokens `int64[m]`; None means all.
    """

    num_tokens: int
    places: Mapping[int, torch.Tensor | None]

    @classmethod
    def of(
        cls,
        adapters: npt.NDArray[np.int32],
        query_lens: npt.NDArray[np.int32],
        device: torch.device,
    ) -> "AdaptedTokens":
        """Group the tokens of a step.

        Args:
            adapters: `int32[S]`, the adapter of each sequence, or `NO_ADAPTER`.
            query_lens: `int32[S]`, tokens of each.
            device: where the pass is computed.
        """
        of_tokens = np.repeat(adapters, query_lens)
        places: dict[int, torch.Tensor | None] = {}
        for adapter in np.unique(adapters[adapters != NO_ADAPTER]).tolist():
            mine = np.flatnonzero(of_tokens == adapter)
            every = len(mine) == len(of_tokens)
            places[adapter] = None if every else torch.from_numpy(mine).to(device)
        return cls(len(of_tokens), places)


_TOKENS: ContextVar[AdaptedTokens | None] = ContextVar("kvpage_adapted_tokens", default=None)


@contextmanager
def adapting(tokens: AdaptedTokens | None) -> Iterator[None]:
    """One forward pass runs within: these of its tokens have adapters."""
    reset = _TOKENS.set(tokens)
    try:
        yield
    finally:
        _TOKENS.reset(reset)


class AdaptedLinear(torch.nn.Module):
    """A linear layer, and what adapters add to it for the tokens that have them.

    Deliberately no `torch.nn.Linear` and without its `weight`: who looks for linear layers to fuse
    them finds `base` only, which is one like any other.

    Args:
        base: the layer.
        updates: by number of the adapter.
    """

    def __init__(self, base: torch.nn.Module, updates: Mapping[int, LowRank]) -> None:
        super().__init__()
        self.base = base
        self._updates = updates

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`.

        Raises:
            RuntimeError: the layer does not see the tokens of the pass, one row for each.
        """
        outputs: torch.Tensor = self.base(inputs)
        tokens = _TOKENS.get()
        if tokens is None:
            return outputs
        rows = outputs.view(-1, outputs.shape[-1])
        if len(rows) != tokens.num_tokens:
            raise RuntimeError(
                f"an adapted layer got {len(rows)} rows in a pass of {tokens.num_tokens} tokens"
            )
        for adapter, places in tokens.places.items():
            if adapter in self._updates:
                self._updates[adapter].add(inputs.reshape(len(rows), -1), rows, places)
        return outputs

    def extra_repr(self) -> str:
        """Which adapters, by number."""
        return f"adapters={sorted(self._updates)}"


def attach_adapters(module: Any, adapters: Adapters) -> None:
    """Put adapters beside the linear layers of a model. Reads files; call it from a thread.

    Args:
        module: a model of transformers; changed, but not its tensors.
        adapters: a folder or hub id for each name; they are numbered in this order.

    Raises:
        ConfigError: peft is not installed, or one of them cannot be read, does not fit the model,
            or is not plain LoRA. Nothing was changed.
    """
    updates: dict[str, dict[int, LowRank]] = {}
    for number, (name, source) in enumerate(adapters.items()):
        for place, update in _read(module, name, fspath(source)).items():
            updates.setdefault(place, {})[number] = update
    for place, of_place in updates.items():
        parent, _, child = place.rpartition(".")
        adapted = AdaptedLinear(module.get_submodule(place), of_place)
        setattr(module.get_submodule(parent), child, adapted)


def _read(module: Any, name: str, source: str) -> dict[str, LowRank]:
    """What an adapter adds, by the names of the layers it adds to."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError("adapters need peft: pip install 'kvpage[lora]'") from error
    with _reading(name, source):
        config = peft.PeftConfig.from_pretrained(source)
    _check_plain(name, config)
    with _reading(name, source):
        skeleton = peft.inject_adapter_in_model(config, _skeleton(module))
    layers = _adapted(name, module, skeleton)
    with _reading(name, source):
        weights = peft.load_peft_weights(source, device="cpu")
        loaded = peft.set_peft_model_state_dict(skeleton, weights)
    missing = [key for key in loaded.missing_keys if ".lora_" in key]
    for strange, what in ((loaded.unexpected_keys, "does not use"), (missing, "lacks")):
        if strange:
            raise ConfigError(f"adapter {name!r} does not fit: the model {what} {strange[0]!r}")
    return {
        place: _low_rank(layer, module.get_submodule(place).weight)
        for place, layer in layers.items()
    }


@contextmanager
def _reading(name: str, source: str) -> Iterator[None]:
    """What goes wrong while peft reads an adapter, in one sentence."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise ConfigError(f"adapter {name!r} cannot be read from {source!r}: {reason}") from error


def _check_plain(name: str, config: Any) -> None:
    """Refuse what does more than add a product of low rank."""
    if config.peft_type != "LORA":
        raise ConfigError(f"adapter {name!r} is of the kind {config.peft_type.value}, not LORA")
    if config.bias != "none":
        raise ConfigError(f"adapter {name!r} is not plain LoRA: it changes biases")
    for setting, what in _UNSUPPORTED.items():
        if getattr(config, setting, None):
            raise ConfigError(f"adapter {name!r} is not plain LoRA: it has {what} ({setting})")


def _skeleton(module: Any) -> Any:
    """A copy of a model whose tensors have shapes and no memory, for peft to change."""

    def hollow(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

    tensors: dict[int, torch.Tensor] = {id(each): hollow(each) for each in module.buffers()}
    for each in module.parameters():
        tensors[id(each)] = torch.nn.Parameter(hollow(each), requires_grad=False)
    return copy.deepcopy(module, tensors)


def _adapted(name: str, module: Any, skeleton: Any) -> dict[str, Any]:
    """The layers that peft has adapted in the skeleton, by name.

    Raises:
        ConfigError: one of them is not an inner linear layer, or does more than add.
    """
    from peft.tuners import lora

    found = {
        place: layer
        for place, layer in skeleton.named_modules()
        if isinstance(layer, lora.LoraLayer)
    }
    for place, layer in found.items():
        base = module.get_submodule(place)
        # The output layer sees only the tokens whose logits are wanted.
        outer = base is module.get_output_embeddings()
        if type(layer) is not lora.Linear or layer.lora_variant or outer:
            raise ConfigError(
                f"adapter {name!r} is not plain LoRA of inner linear layers: it adapts {place!r}, "
                f"a {type(base).__name__}"
            )
    return found


def _low_rank(layer: Any, weight: torch.Tensor) -> LowRank:
    """The adapter of one of peft's layers, in the precision and place of the model's weight."""
    [name] = layer.scaling
    a, b = (part[name].weight.detach().to(weight) for part in (layer.lora_A, layer.lora_B))
    return LowRank(a, b, layer.scaling[name])
