"""A transformers model whose attention reads and writes a paged KV cache.

transformers lets an attention function be registered by name; every attention layer of a model
with `attn_implementation="kvpage"` then calls ours with its queries, keys and values, positions
already applied. No cache object is passed to the model: our function itself writes K and V to the
pools and attends through the block table. What it needs to know of the step travels in a context
variable set around the forward pass, since some model families do not hand keyword arguments
through to their attention layers.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import attrs
import torch

from kvpage.errors import UnsupportedModelError
from kvpage.kernels import AttentionBackend
from kvpage.kernels.work import AttentionBatch
from kvpage.sampling import SamplingParams

ATTENTION_NAME = "kvpage"


@attrs.frozen
class AttentionOptions:
    """What a layer asks of attention beside Q, K and V; see `kernels.reference.paged_attention`."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class AttentionStep(Protocol):
    """Stands behind the attention function during one forward pass."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend: q `[T, Hq, D]`, k `[T, Hkv, D]` and v `[T, Hkv, Dv]` give `[T, Hq, Dv]`."""
        ...


_STEP: ContextVar[AttentionStep] = ContextVar("kvpage_attention_step")


@contextmanager
def _attending(step: AttentionStep) -> Iterator[None]:
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_ignored: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: tensors are `[1, heads, T, head_dim]`."""
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    layer: Any = module.layer_idx
    return _STEP.get().attend(layer, q, k, v, options).unsqueeze(0), None


@attrs.frozen
class LayerShape:
    """The K and V of one token in one layer: `num_kv_heads * (key_dim + value_dim)` numbers."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class _Probe:
    """Records what the attention layers hand over; attends to nothing but itself."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        if layer in self.shapes:
            raise UnsupportedModelError(f"layer {layer} calls attention twice in one pass")
        self.shapes[layer] = LayerShape(k.shape[1], k.shape[2], v.shape[2])
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


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
        self.layers = [
            (
                torch.empty(num_slots, s.num_kv_heads, s.key_dim, dtype=dtype, device=device),
                torch.empty(num_slots, s.num_kv_heads, s.value_dim, dtype=dtype, device=device),
            )
            for s in shapes
        ]
        self._backend = backend

    def copy_blocks(self, copies: torch.Tensor, block_size: int) -> None:
        """Copy blocks in every layer: `int64[C, 2]` of (from, to)."""
        for k_pool, v_pool in self.layers:
            self._backend.copy_blocks(k_pool, v_pool, copies, block_size=block_size)

    def step(self, batch: AttentionBatch, slots: torch.Tensor) -> AttentionStep:
        """The attention of one step: `slots` `int64[T]` take the K and V of its tokens."""
        return _PagedStep(self.layers, self._backend, batch, slots)


@attrs.frozen(eq=False)
class _PagedStep:
    layers: list[tuple[torch.Tensor, torch.Tensor]]
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


class PagedModel:
    """A causal language model of transformers that attends through `AttentionStep`.

    Attributes:
        config: the model's own configuration.
        layers: the KV shape of each layer.
        max_len: longest sequence that the model's positions allow, in tokens.
        vocab_size: number of token ids that have an embedding.
        eos_token_ids: tokens that end a text.
        default_params: how the generation configuration would choose tokens.
        dtype: of weights, and of K and V.
        device: where it computes.
    """

    def __init__(self, module: Any) -> None:
        """Take over `module`, a model whose attention implementation is ours.

        Raises:
            UnsupportedModelError: its attention cannot be paged.
        """
        text = module.config.get_text_config()
        self._module = module.eval()
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        self.config = module.config
        self.max_len = int(getattr(text, "max_position_embeddings", None) or 2**20)
        self.vocab_size = int(text.vocab_size)
        self.eos_token_ids = _eos_token_ids(module)
        self.default_params = _default_params(module)
        self.dtype: torch.dtype = module.dtype
        self.device: torch.device = module.device
        self.layers = self._probe()

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        numbers = sum(s.num_kv_heads * (s.key_dim + s.value_dim) for s in self.layers)
        return numbers * self.dtype.itemsize

    @torch.inference_mode()
    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        keep: torch.Tensor,
    ) -> torch.Tensor:
        """One forward pass over packed tokens.

        Args:
            token_ids: `int64[T]`.
            positions: `int64[T]`.
            step: attends in each layer, and stores K and V.
            keep: `int64[n]`, the tokens whose logits are wanted.

        Returns:
            `[n, vocabulary]`.
        """
        inputs = {"input_ids": token_ids[None], "position_ids": positions[None]}
        with _attending(step):
            if self._keeps_logits:
                output = self._module(**inputs, use_cache=False, logits_to_keep=keep)
                logits: torch.Tensor = output.logits[0]
                return logits
            logits = self._module(**inputs, use_cache=False).logits[0]
            return logits[keep]

    def _probe(self) -> tuple[LayerShape, ...]:
        """One pass over a single token shows every layer's shape, whatever the family calls it."""
        probe = _Probe()
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.logits(token, token, probe, token)
        expected = range(len(probe.shapes))
        if not probe.shapes or sorted(probe.shapes) != list(expected):
            raise UnsupportedModelError(
                f"{type(self._module).__name__}: attention was called by layers "
                f"{sorted(probe.shapes)}; every layer must attend through AttentionInterface"
            )
        return tuple(probe.shapes[layer] for layer in expected)


def register_attention() -> None:
    """Make `attn_implementation="kvpage"` known to transformers. Again is a no-op."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)


def check_supported(config: Any, model_class: Any) -> None:
    """Refuse, from its class alone, a model that cannot work.

    Raises:
        UnsupportedModelError: says which model and why.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder; kvpage serves decoder-only models"
    elif model_class is None:
        reason = "transformers has no causal language model of this type"
    elif getattr(model_class, "_is_stateful", False):
        reason = "it keeps recurrent state beside or instead of a KV cache"
    elif not getattr(model_class, "_supports_attention_backend", False):
        reason = "its attention does not go through transformers' AttentionInterface"
    elif "chunked_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
        reason = "it attends in chunks, by a mask that the attention function is not given"
    else:
        return
    raise UnsupportedModelError(f"model type {name!r} is not supported: {reason}")


def model_class_of(config: Any) -> Any:
    """The causal-LM class that transformers has for a configuration; None if there is none."""
    from transformers import AutoModelForCausalLM

    mapping = AutoModelForCausalLM._model_mapping
    return mapping.get(type(config), None)


def share_model(model: Any) -> PagedModel:
    """A paged model over the same weights as `model`, which is not changed.

    The module tree and its configuration are copied, parameters and buffers are shared.

    Raises:
        UnsupportedModelError: the model's attention cannot be paged.
    """
    check_supported(model.config, type(model))
    register_attention()
    tensors = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    twin.set_attn_implementation(ATTENTION_NAME)
    return PagedModel(twin)


def _eos_token_ids(module: Any) -> tuple[int, ...]:
    """End-of-text tokens; the generation configuration beats the model's own."""
    generation = getattr(module, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(module.config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def _default_params(module: Any) -> SamplingParams:
    """What transformers' `generate` would do: greedy, unless the configuration says to sample."""
    generation = getattr(module, "generation_config", None)
    if not getattr(generation, "do_sample", None):
        return SamplingParams(temperature=0)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(generation, name, None) for name in names}
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})
