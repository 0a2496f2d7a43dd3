"""Shows, before a model serves anything, that it computes what paged attention assumes.

A model's class and configuration do not tell whether its layers mix tokens anywhere but in
attention, whether it takes positions as given, or which mask it would have attended under. So it
is run twice over a handful of tokens, with an attention in which a token sees only itself:

* as transformers would run it: the tokens as one sequence, positions and masks its own making;
* as kvpage runs it: the same tokens packed among strangers, in another order, positions given.

A token's Q, K, V and logits must be the same both times. Else something but attention looks at
other tokens: a convolution, a recurrent state, a position counted rather than taken. And the
masks of the first pass must be those that the layers' options describe: causal, and as narrow as
the window that is passed to attention, for in the second pass there are none.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import torch

from kvpage.attention import (
    ATTENTION_NAME,
    AttentionStep,
    attend,
    options_of,
    register_attention,
)
from kvpage.errors import UnsupportedModelError
from kvpage.families import max_len, text_config
from kvpage.kernels import AttentionOptions

_PROBE_NAME = "kvpage-probe"

Forward = Callable[[torch.Tensor, torch.Tensor | None, AttentionStep, torch.Tensor], torch.Tensor]
"""One pass: token ids `int64[T]`, positions `int64[T]` or None for a sequence from its start, what
attends, and `int64[n]` tokens whose logits `[n, vocabulary]` are wanted."""

# A sequence, and four of its tokens scattered among two strangers. Both batches are of one size,
# so that matrix products round alike in both.
_SEQUENCE = (11, 17, 13, 19, 23, 29)
_PACKED = (17, 12, 19, 11, 16, 13)
_PACKED_POSITIONS = (1, 9, 3, 0, 0, 2)
_PLACES = (3, 0, 5, 2)
_COMPARED = len(_PLACES)


@attrs.frozen
class LayerShape:
    """The K and V of one token in one layer: `num_kv_heads * (key_dim + value_dim)` numbers.

    Each KV head serves `group_size` query heads. A token attends to itself and the `window - 1`
    tokens before it; 0 means to all.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    group_size: int
    window: int = 0


@attrs.frozen(eq=False)
class Call:
    """One call of attention: q `[T, Hq, D]`, k `[T, Hkv, D]`, v `[T, Hkv, Dv]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: AttentionOptions

    @property
    def shape(self) -> LayerShape:
        """Of its K and V."""
        num_kv_heads, key_dim = self.k.shape[1:]
        group_size = self.q.shape[1] // num_kv_heads
        return LayerShape(num_kv_heads, key_dim, self.v.shape[2], group_size, self.options.window)


class Witness:
    """An attention step in which each token sees only itself, and that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        del layer
        if q.shape[1] % k.shape[1]:
            raise UnsupportedModelError(
                f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads evenly"
            )
        self.calls.append(Call(q, k, v, options))
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def probe(module: Any, forward: Forward) -> tuple[LayerShape, ...]:
    """Run a model twice over a few tokens; its attention implementation is ours afterwards.

    Args:
        module: the model.
        forward: how kvpage runs it.

    Returns:
        The shape of the K and V of each attention call of a forward pass, in order.

    Raises:
        UnsupportedModelError: its output would be wrong; says why.
    """
    _register()
    try:
        module.set_attn_implementation(_PROBE_NAME)
        alone = _run(module, forward, _SEQUENCE, None, range(_COMPARED))
        module.set_attn_implementation(ATTENTION_NAME)
        packed = _run(module, forward, _PACKED, _PACKED_POSITIONS, _PLACES)
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever breaks in a model that is run without cache and mask
        raise UnsupportedModelError(
            f"a forward pass without a cache object fails with {type(error).__name__}: {error}"
        ) from error
    _compare(alone.calls, packed.calls)
    _check_window(text_config(module.config), packed.calls)
    if differ(alone.logits, packed.logits):
        raise UnsupportedModelError("its logits depend on other tokens than those attended to")
    return tuple(call.shape for call in packed.calls)


@attrs.frozen(eq=False)
class _Trace:
    """What a pass did: its attention calls, and `[n, vocabulary]`, the logits of the sequence."""

    calls: list[Call]
    logits: torch.Tensor


def _run(
    module: Any,
    forward: Forward,
    tokens: Sequence[int],
    positions: Sequence[int] | None,
    places: Sequence[int],
) -> _Trace:
    """One pass over `tokens`, of which those at `places` are the sequence."""
    witness = Witness()
    vocab_size = text_config(module.config).vocab_size
    token_ids, keep = (torch.tensor(numbers, device=module.device) for numbers in (tokens, places))
    given = None if positions is None else torch.tensor(positions, device=module.device)
    return _Trace(witness.calls, forward(token_ids % vocab_size, given, witness, keep))


def _compare(alone: list[Call], packed: list[Call]) -> None:
    if not alone:
        raise UnsupportedModelError("none of its layers attends through AttentionInterface")
    if len(alone) != len(packed):
        raise UnsupportedModelError(
            f"it attends {len(alone)} times in one forward pass and {len(packed)} in another"
        )
    places = list(_PLACES)
    for layer, (one, other) in enumerate(zip(alone, packed, strict=True)):
        if attrs.evolve(one.options, sinks=None) != attrs.evolve(other.options, sinks=None):
            raise UnsupportedModelError(f"layer {layer} does not attend the same way in every pass")
        pairs = ((one.q, other.q), (one.k, other.k), (one.v, other.v))
        if any(differ(mine[:_COMPARED], theirs[places]) for mine, theirs in pairs):
            raise UnsupportedModelError(
                f"Q, K or V of layer {layer} depend on other tokens than those attended to, or on "
                "another position than the one given"
            )


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether more than half of the tokens `[tokens, ...]` differ by more than rounding.

    The bound is the square root of the type's precision: far above rounding, far below what another
    token's values are. Rounding may yet send a token to another expert, so that in half precision
    one or two differ; a model that mixes tokens, or counts their positions, changes them all.
    """
    if one.shape != other.shape:
        return True
    errors = (one - other).abs().flatten(1).amax(1)
    bound = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
    return 2 * int((errors > bound).sum()) > len(errors)


def _probing_attention(
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
    """The attention function of the first pass: it is given the masks that ours replaces."""
    options = options_of(query, scaling, sliding_window, softcap, s_aux, others)
    _check_mask(attention_mask, options.window)
    return attend(query, key, value, options), None


def _probing_mask(*args: Any, config: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask function of the first pass: never left out, and it knows its window or chunk."""
    from transformers.masking_utils import sdpa_mask

    # Any: the mask's span and its limit travel as attributes of the tensor.
    mask: Any = sdpa_mask(*args, config=config, **{**kwargs, "allow_is_causal_skip": False})
    if mask is not None:
        mask.limit = max_len(config)
        mask.span = min(kwargs.get("local_size") or mask.limit, mask.limit)
    return cast(torch.Tensor | None, mask)


def _check_mask(mask: Any, window: int) -> None:
    """Refuse a mask that is another than the one that paged attention implies."""
    if mask is None:
        raise UnsupportedModelError("its layers attend without a causal mask")
    limit, span = getattr(mask, "limit", None), getattr(mask, "span", None)
    if limit is None or span != min(window or limit, limit):
        raise UnsupportedModelError(
            f"its layers attend under a mask that spans {span} tokens, where they tell attention "
            f"of a window of {window or 'none'}"
        )
    distance = torch.arange(mask.shape[2])[:, None] - torch.arange(mask.shape[3])
    if not torch.equal(mask[0, 0].cpu(), (distance >= 0) & (distance < span)):
        raise UnsupportedModelError("its layers attend under another mask than a causal one")


def _check_window(config: Any, calls: list[Call]) -> None:
    """Refuse a window that layers are not told of: transformers' own cache would keep to it."""
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        limit = max_len(config)
        told = {min(call.options.window or limit, limit) for call in calls}
        if told != {min(config.sliding_window, limit)}:
            raise UnsupportedModelError(
                f"its configuration has a window of {config.sliding_window} tokens, of which its "
                "layers do not tell attention"
            )


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    register_attention()
    AttentionInterface.register(_PROBE_NAME, _probing_attention)
    AttentionMaskInterface.register(_PROBE_NAME, _probing_mask)
