"""The attention function that transformers calls, and what stands behind it.

transformers lets an attention function be registered by name; every attention layer of a model
with `attn_implementation="kvpage"` then calls ours with its queries, keys and values, positions
already applied. No cache object is passed to the model: an `AttentionStep` stores K and V and
attends. It travels in a context variable set around the forward pass, since some model families
do not hand keyword arguments through to their attention layers.

Layers are told apart by the order in which they call, not by the index they bear: some families
attend twice in one layer, and some run their layers several times over. Each call of a pass has
K and V of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch

from kvpage.errors import UnsupportedModelError
from kvpage.kernels import AttentionOptions

if TYPE_CHECKING:  # it brings numba
    from kvpage.kernels.cpu_layer import LayerRun

ATTENTION_NAME = "kvpage"

HARMLESS_KEYWORDS = frozenset(
    {
        "dropout",  # zero: models are in evaluation mode
        "position_ids",  # Q and K have their positions already
        "use_cache",
        "output_attentions",
        "output_router_logits",
        "logits_to_keep",
    }
)
"""Keywords of an attention call that change nothing about its result."""


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
        """Attend: q `[T, Hq, D]`, k `[T, Hkv, D]` and v `[T, Hkv, Dv]` give `[T, Hq, Dv]`.

        Args:
            layer: how many calls came before this one in the forward pass.
            q: queries.
            k: keys of the same tokens.
            v: values of the same tokens.
            options: how to attend.
        """
        ...


@attrs.frozen(eq=False)
class _Pass:
    step: AttentionStep
    calls: Iterator[int] = attrs.field(factory=count)


_PASS: ContextVar[_Pass] = ContextVar("kvpage_forward_pass")


@contextmanager
def attending(step: AttentionStep) -> Iterator[None]:
    """One forward pass runs within: `step` stands behind its attention layers."""
    token = _PASS.set(_Pass(step))
    try:
        yield
    finally:
        _PASS.reset(token)


def paged_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: tensors are `[1, heads, T, head_dim]`.

    Raises:
        UnsupportedModelError: the layer asks for something that paged attention does not do.
    """
    if attention_mask is not None:
        raise UnsupportedModelError("it makes attention masks of its own")
    options = options_of(query, scaling, sliding_window, softcap, s_aux, others)
    if torch.compiler.is_compiling():  # by `kvpage.compiled`, which defines this operator
        values = options.scale, options.window, options.softcap, options.sinks
        return torch.ops.kvpage.attend(query, key, value, *values), None
    return attend(query, key, value, options), None


def options_of(
    query: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    others: Mapping[str, Any],
) -> AttentionOptions:
    """What the keywords of an attention call ask for.

    Raises:
        UnsupportedModelError: names a keyword that is set and not understood, which may be a bias,
            a mask or anything else that must not be ignored.
    """
    for name, value in others.items():
        if value is None or name in HARMLESS_KEYWORDS or (name == "is_causal" and value):
            continue
        raise UnsupportedModelError(
            f"its layers pass {name!r} to attention, whose effect is unknown"
        )
    return AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """The next call of this forward pass, from and to transformers' layout of tensors."""
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return attend_packed(q, k, v, options).unsqueeze(0)


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """The next call of this forward pass; shapes as in `AttentionStep.attend`."""
    forward = _PASS.get()
    return forward.step.attend(next(forward.calls), q, k, v, options)


def compute_layers(
    run: "LayerRun",
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    options: Sequence[AttentionOptions],
) -> torch.Tensor:
    """The next calls of this forward pass, with all of the decoder layers around them.

    In one piece if the step can do that, which it says by a method of this name that takes the
    number of the first call and these arguments, and may give None for no.

    Args:
        run: the layers.
        x: `float32[T, hidden]`, contiguous.
        cos: `float32[T, R]`, of positions, contiguous.
        sin: likewise.
        options: of each layer.
    """
    forward = _PASS.get()
    calls = [next(forward.calls) for _ in options]
    in_one_piece = getattr(forward.step, "compute_layers", None)
    if in_one_piece is not None:
        whole: torch.Tensor | None = in_one_piece(calls[0], run, x, cos, sin, options)
        if whole is not None:
            return whole
    for call, kernel, each in zip(calls, run.layers, options, strict=True):
        q, k, v = kernel.before_attention(x, cos, sin)
        x = kernel.after_attention(x, forward.step.attend(call, q, k, v, each))
    return x


def register_attention() -> None:
    """Make `attn_implementation="kvpage"` known to transformers. Again is a no-op."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
