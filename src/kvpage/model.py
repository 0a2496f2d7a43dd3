"""A transformers model whose attention reads and writes a paged KV cache."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from kvpage.adapters import AdaptedTokens, adapting, attach_adapters
from kvpage.attention import AttentionStep, attending
from kvpage.config import NO_ADAPTERS, Adapters
from kvpage.errors import UnsupportedModelError
from kvpage.families import max_len, reasons_to_refuse, text_config
from kvpage.kernels import AttentionBackend, AttentionOptions
from kvpage.kernels.work import AttentionBatch
from kvpage.probe import Forward, LayerShape, probe
from kvpage.sampling import SamplingParams


class KVPools:
    """K and V of all layers, and the kernels that work on them.

    Attributes:
        layers: `(k_pool [num_slots, Hkv, D], v_pool [num_slots, Hkv, Dv])` of each layer.
    """

    def __init__(
        self,
        shapes: tuple[LayerShape, ...],
        num_slots: int,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Not zeroed: no kernel reads a slot before it is written.
        self.layers = tuple(
            (
                torch.empty(num_slots, s.num_kv_heads, s.key_dim, dtype=dtype, device=device),
                torch.empty(num_slots, s.num_kv_heads, s.value_dim, dtype=dtype, device=device),
            )
            for s in shapes
        )
        self._backend = backend

    def copy_blocks(self, copies: torch.Tensor, block_size: int) -> None:
        """Copy blocks in every layer: `int64[C, 2]` of (from, to)."""
        for k_pool, v_pool in self.layers:
            self._backend.copy_blocks(k_pool, v_pool, copies, block_size=block_size)

    def poison(self, blocks: torch.Tensor, block_size: int) -> None:
        """Fill blocks `int64[n]` with NaN in every layer."""
        for pool in (pool for pools in self.layers for pool in pools):
            pool.view(len(pool) // block_size, -1).index_fill_(0, blocks, torch.nan)

    def step(self, batch: AttentionBatch, slots: torch.Tensor) -> AttentionStep:
        """The attention of one step: `slots` `int64[T]` take the K and V of its tokens."""
        return _PagedStep(self.layers, self._backend, batch, slots)


@attrs.frozen(eq=False)
class _PagedStep:
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    backend: AttentionBackend
    batch: AttentionBatch
    slots: torch.Tensor

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        k_pool, v_pool = self.layers[layer]
        self.backend.write_kv(k, v, k_pool, v_pool, self.slots)
        return self.backend.paged_attention(
            q,
            k_pool,
            v_pool,
            self.batch,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
        )

    def compute_layers(
        self,
        first: int,
        run: Any,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        options: Sequence[AttentionOptions],
    ) -> torch.Tensor | None:
        if self.backend.compute_layers is None:
            return None
        pools = self.layers[first : first + len(options)]
        return self.backend.compute_layers(run, x, cos, sin, pools, self.batch, self.slots, options)


class PagedModel:
    """A causal language model of transformers that attends through `AttentionStep`.

    Attributes:
        module: the model that transformers built.
        layers: the KV shape of each layer.
        max_len: longest sequence that the model's positions allow, in tokens.
        vocab_size: number of token ids that have an embedding.
        eos_token_ids: tokens that end a text.
        default_params: how the generation configuration would choose tokens.
        adapters: names of the adapters that have been attached, in the order of their numbers.
        dtype: of weights, and of K and V.
        device: where it computes.
    """

    def __init__(self, module: Any, adapters: Sequence[str] = ()) -> None:
        """Take over `module`, a model whose attention implementation is ours.

        Args:
            module: the model, with its adapters attached.
            adapters: their names.

        Raises:
            UnsupportedModelError: its attention cannot be paged.
        """
        text = text_config(module.config)
        self.put(module)
        self.max_len = max_len(text)
        self.vocab_size = int(text.vocab_size)
        self.eos_token_ids = _eos_token_ids(module)
        self.default_params = _default_params(module)
        self.dtype: torch.dtype = module.dtype
        self.device: torch.device = module.device
        self.adapters = tuple(adapters)
        self.layers = _probed(module, self._adapted_logits)

    def put(self, module: Any) -> None:
        """Compute with `module` from now on, which gives the same logits for the same arguments."""
        self.module = module.eval()
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers, stored as the model computes them."""
        return self.bytes_per_token_as(self.dtype)

    def bytes_per_token_as(self, kv_dtype: torch.dtype) -> int:
        """K and V of one token in all layers, stored as this type."""
        numbers = sum(s.num_kv_heads * (s.key_dim + s.value_dim) for s in self.layers)
        return numbers * kv_dtype.itemsize

    @property
    def window(self) -> int:
        """How many tokens the farthest-sighted layer attends to; 0 if one attends to all."""
        windows = [shape.window for shape in self.layers]
        return max(windows) if all(windows) else 0

    @torch.inference_mode()
    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor | None,
        step: AttentionStep,
        keep: torch.Tensor | None,
        adapted: AdaptedTokens | None = None,
    ) -> torch.Tensor:
        """One forward pass over packed tokens.

        Args:
            token_ids: `int64[T]`.
            positions: `int64[T]`; None if the tokens are one sequence from its start, for the
                model to number.
            step: attends in each layer, and stores K and V.
            keep: `int64[n]`, the tokens whose logits are wanted; None for all.
            adapted: the tokens that have adapters; None if there are none.

        Returns:
            `[n, vocabulary]`.
        """
        inputs = {"input_ids": token_ids[None]}
        if positions is not None:
            inputs["position_ids"] = positions[None]
        if keep is not None and self._keeps_logits:
            inputs["logits_to_keep"] = keep
        with attending(step), adapting(adapted):
            logits: torch.Tensor = self.module(**inputs, use_cache=False).logits[0]
        return logits if keep is None or self._keeps_logits else logits[keep]

    def _adapted_logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor | None,
        step: AttentionStep,
        keep: torch.Tensor,
    ) -> torch.Tensor:
        """Every adapter for every token, so that one that cannot work shows when it is loaded."""
        every = dict.fromkeys(range(len(self.adapters)))
        adapted = AdaptedTokens(len(token_ids), every) if every else None
        return self.logits(token_ids, positions, step, keep, adapted)


def check_supported(config: Any, model_class: Any) -> None:
    """Refuse, from its class and configuration alone, a model that cannot be served.

    Raises:
        UnsupportedModelError: says which model and why.
    """
    reason = next(reasons_to_refuse(config, model_class), None)
    if reason is not None:
        raise _unsupported(config, reason)


def _probed(module: Any, forward: Forward) -> tuple[LayerShape, ...]:
    try:
        return probe(module, forward)
    except UnsupportedModelError as refusal:
        raise _unsupported(module.config, str(refusal)) from refusal


def _unsupported(config: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"model type {config.model_type!r} is not supported: {reason}")


def model_class_of(config: Any) -> Any:
    """The causal-LM class that transformers has for a configuration; None if there is none."""
    from transformers import AutoModelForCausalLM

    mapping = AutoModelForCausalLM._model_mapping
    return mapping.get(type(config), None)


def share_model(model: Any, adapters: Adapters = NO_ADAPTERS) -> PagedModel:
    """A paged model over the same weights as `model`, which is not changed.

    The module tree and its configuration are copied, and so are buffers that are no part of a
    checkpoint: rotary frequencies are such, and LongRoPE writes into them. All else is shared.

    Args:
        model: the caller's.
        adapters: see `attach_adapters`.

    Raises:
        UnsupportedModelError: the model's attention cannot be paged.
        ConfigError: an adapter cannot be read, or does not fit.
    """
    check_supported(model.config, type(model))
    tensors = [*model.parameters(), *model.state_dict(keep_vars=True).values()]
    module = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    attach_adapters(module, adapters)
    return PagedModel(module, tuple(adapters))


def _eos_token_ids(module: Any) -> tuple[int, ...]:
    """End-of-text tokens; the generation configuration beats the model's own."""
    sources = (
        getattr(module, "generation_config", None),
        module.config,
        text_config(module.config),
    )
    named = (getattr(source, "eos_token_id", None) for source in sources)
    ids = next((each for each in named if each is not None), ())
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def _default_params(module: Any) -> SamplingParams:
    """What transformers' `generate` would do: greedy, unless the configuration says to sample."""
    generation = getattr(module, "generation_config", None)
    if not getattr(generation, "do_sample", None):
        return SamplingParams(temperature=0)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(generation, name, None) for name in names}
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})
