"""Which model families cannot be served, as far as their class and configuration tell.

What these do not tell is found by `kvpage.probe`, once the weights are there.
"""

from collections.abc import Iterator, Mapping
from typing import Any

UNBOUNDED_LEN = 2**20
"""Longest sequence, in tokens, of a model whose positions have no end of their own."""

PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Layers, in transformers' words, that need the K and V of earlier tokens and nothing else."""

_OTHER_LAYER_TYPES: Mapping[str, str] = {
    "chunked_attention": "attend within chunks of the text",
    "compressed_sparse_attention": "attend to compressed K and V",
    "conv": "keep a convolution's state beside K and V",
    "heavily_compressed_attention": "attend to compressed K and V",
    "hybrid": "keep a recurrent state beside K and V",
    "indexed_attention": "choose the keys they attend to by an index of their own",
    "linear_attention": "keep a recurrent state instead of K and V",
    "minimax_m3_sparse": "choose the keys they attend to by an index of their own",
}

_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("is_encoder_decoder", True, "it is an encoder-decoder; kvpage serves decoder-only models"),
    ("is_causal", False, "it attends to later tokens as well"),
    ("use_bidirectional_attention", True, "it attends to later tokens as well"),
    ("use_bidirectional_attention", "all", "it attends to later tokens as well"),
    ("recurrent_kv_cache_mode", "last_loop", "its loops attend to the K and V of the last loop"),
)
"""Attributes of a configuration that rule a model out when they have this value."""

_DRAFTER = "it drafts for another model, whose K and V it reads"
_OWN_POSITIONS = "it numbers positions from its padding token on, not from 0"

_MODEL_TYPES: Mapping[str, str] = {
    "blt": "it computes on patches of bytes that it cuts anew for every text",
    "camembert": _OWN_POSITIONS,
    "data2vec-text": _OWN_POSITIONS,
    "doge": "it weighs keys by a mask that it computes from V",
    "gemma3n": "its parts for images and sound are not tested; gemma3n_text, without them, is",
    "gemma4_assistant": _DRAFTER,
    "gemma4_unified_assistant": _DRAFTER,
    "git": "its attention does not go through transformers' AttentionInterface",
    "roberta": _OWN_POSITIONS,
    "roberta-prelayernorm": _OWN_POSITIONS,
    "xlm-roberta": _OWN_POSITIONS,
    "xlm-roberta-xl": _OWN_POSITIONS,
    "xmod": _OWN_POSITIONS,
}
"""Model types that nothing but their code tells apart from those that can be served."""


def reasons_to_refuse(config: Any, model_class: Any) -> Iterator[str]:
    """Why a model cannot be served; nothing if all that is known so far is well.

    Args:
        config: the model's configuration.
        model_class: its causal-LM class in transformers, None if there is none.
    """
    text = text_config(config)
    if config.model_type in _MODEL_TYPES:
        yield _MODEL_TYPES[config.model_type]
    for name, value, reason in _SETTINGS:
        if value in (getattr(config, name, None), getattr(text, name, None)):
            yield reason
    for layer_type in sorted(set(getattr(text, "layer_types", None) or ()) - PAGED_LAYER_TYPES):
        what = _OTHER_LAYER_TYPES.get(layer_type, "are of a kind that kvpage does not know")
        yield f"its layers of type {layer_type!r} {what}"
    yield from _reasons_of_class(model_class)
    # Some decoders that were never encoders have one of these two attributes, none has both.
    if hasattr(text, "add_cross_attention") and getattr(text, "is_decoder", True) is False:
        yield "it is an encoder unless its configuration says is_decoder"


def _reasons_of_class(model_class: Any) -> Iterator[str]:
    if model_class is None:
        yield "transformers has no causal language model of this type"
        return
    if getattr(model_class, "_is_stateful", False):
        yield "it keeps recurrent state beside or instead of K and V"
    # The flag is missing from some classes that do use the interface, so transformers' own look at
    # the source counts too. Where both are wrong, the probe finds out.
    flag = getattr(model_class, "_supports_attention_backend", False)
    if not flag and not model_class._can_set_attn_implementation():
        yield "its attention does not go through transformers' AttentionInterface"


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the language model."""
    return config.get_text_config(decoder=True)


def max_len(config: Any) -> int:
    """Longest sequence, in tokens, that the positions of a text configuration allow.

    LongRoPE has two sets of frequencies, and takes the long one for a whole batch once any position
    in it is beyond the original length: a sequence would depend on its company, and K that was
    cached under one set would meet Q of the other. Within the original length there is one set.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]
    limits = [getattr(config, "max_position_embeddings", None)] + [
        each.get("original_max_position_embeddings")
        for each in ropes
        if each.get("rope_type") == "longrope"
    ]
    # XLNet says -1, others nothing: no limit.
    return min((int(limit) for limit in limits if limit and limit > 0), default=UNBOUNDED_LEN)
