"""A model whose output would be wrong is refused when it is built, with the reason."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from kvpage import AsyncEngine, SamplingParams, UnsupportedModelError
from kvpage.attention import ATTENTION_NAME
from kvpage.families import UNBOUNDED_LEN, max_len
from kvpage.model import PagedModel, check_supported, model_class_of, share_model
from tests.model.families import WINDOW, family_model
from tests.model.tiny import FAMILIES, MAX_LEN, greedy, prompts, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Mixing(torch.nn.Module):
    """A layer that adds the token before to each token, as a short convolution does."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden + hidden.roll(1, dims=1))  # type: ignore[no-any-return]


class Counting(torch.nn.Module):
    """Rotary frequencies of positions counted within the batch, whatever is given."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.inner(hidden, torch.arange(position_ids.shape[1])[None])


class With(torch.nn.Module):
    """A module that is always called with some keywords set."""

    def __init__(self, inner: torch.nn.Module, **keywords: Any) -> None:
        super().__init__()
        self.inner = inner
        self._keywords = keywords

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **{**kwargs, **self._keywords})


class Twice(torch.nn.Module):
    """A layer that is run again if the text is long."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> Any:
        for _ in range(2 if kwargs["position_ids"].max() > 8 else 1):
            hidden = self.inner(hidden, **kwargs)
        return hidden


class Peeking(torch.nn.Module):
    """A layer whose first token sees the second."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> Any:
        if kwargs["attention_mask"] is not None:
            kwargs["attention_mask"][..., 0, 1] = True
        return self.inner(hidden, **kwargs)


class OutOfReach(torch.nn.Module):
    """A layer without attention."""

    def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden


def mix_before_attention(model: Any) -> None:
    model.model.layers[0].input_layernorm = Mixing(model.model.layers[0].input_layernorm)


def mix_behind_attention(model: Any) -> None:
    model.model.norm = Mixing(model.model.norm)


def count_positions(model: Any) -> None:
    model.model.rotary_emb = Counting(model.model.rotary_emb)


def bias_scores(model: Any) -> None:
    model.model.layers[1] = With(model.model.layers[1], position_bias=torch.zeros(1))


def make_own_mask(model: Any) -> None:
    model.model.layers[1] = With(model.model.layers[1], attention_mask=torch.zeros(1, 1, 1, 1))


def drop_mask(model: Any) -> None:
    model.model.layers[1] = With(model.model.layers[1], attention_mask=None)


def look_ahead(model: Any) -> None:
    model.model.layers[1] = With(model.model.layers[1], is_causal=False)


def peek_ahead(model: Any) -> None:
    model.model.layers[1] = Peeking(model.model.layers[1])


def repeat_by_length(model: Any) -> None:
    model.model.layers[1] = Twice(model.model.layers[1])


def remove_attention(model: Any) -> None:
    model.model.layers = torch.nn.ModuleList([OutOfReach()])


def fail_without_mask(model: Any) -> None:
    model.model.layers[1] = With(model.model.layers[1], position_embeddings=None)


BROKEN: list[tuple[Callable[[Any], None], str]] = [
    (mix_before_attention, "Q, K or V of layer 0 depend on other tokens"),
    (mix_behind_attention, "its logits depend on other tokens"),
    (count_positions, "or on another position than the one given"),
    (bias_scores, "its layers pass 'position_bias' to attention"),
    (make_own_mask, "under a mask that spans None tokens"),
    (drop_mask, "attend without a causal mask"),
    (look_ahead, "its layers pass 'is_causal' to attention"),
    (peek_ahead, "attend under another mask than a causal one"),
    (repeat_by_length, "it attends 2 times in one forward pass and 3 in another"),
    (remove_attention, "none of its layers attends through AttentionInterface"),
    (fail_without_mask, "a forward pass without a cache object fails with TypeError"),
]


@pytest.mark.parametrize(("breaks", "reason"), BROKEN)
def test_a_model_that_would_be_wrong_is_refused(breaks: Callable[[Any], None], reason: str) -> None:
    """By the name of its type, and with what is wrong."""
    model = tiny_model("llama")
    breaks(model)
    with pytest.raises(UnsupportedModelError, match="'llama' is not supported") as refused:
        share_model(model)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        # The mask has a window, and attention is not told of it.
        (
            transformers.PhimoeConfig(
                num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=32, vocab_size=128, num_local_experts=2, sliding_window=WINDOW,
            ),
            f"under a mask that spans {WINDOW} tokens",
        ),
        # Nor the mask nor attention is told; the cache of transformers would keep to it.
        (
            transformers.MoshiConfig(
                num_hidden_layers=1, hidden_size=64, num_attention_heads=4, ffn_dim=64,
                vocab_size=128, sliding_window=WINDOW,
            ),
            f"its configuration has a window of {WINDOW} tokens",
        ),
    ],
    ids=["phimoe", "moshi"],
)  # fmt: skip
def test_a_window_that_attention_is_not_told_of_is_refused(config: Any, reason: str) -> None:
    """Families that are served without it, as their released models are."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    check_supported(model.config, type(model))
    with pytest.raises(UnsupportedModelError, match=reason):
        share_model(model)


def test_a_chunked_mask_is_no_window() -> None:
    """Llama 4's layers attend in chunks, which only its mask knows."""
    config = transformers.Llama4TextConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=64, intermediate_size_mlp=64, num_local_experts=2,
        vocab_size=128, attention_chunk_size=WINDOW, layer_types=["chunked_attention"],
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="attend within chunks of the text"):
        check_supported(config, type(model))
    with pytest.raises(UnsupportedModelError, match=f"under a mask that spans {WINDOW} tokens"):
        PagedModel(model)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"is_causal": False}, "attends to later tokens"),
        ({"use_bidirectional_attention": True}, "attends to later tokens"),
        ({"layer_types": ["new_attention"] * 2}, "'new_attention' are of a kind"),
        ({"recurrent_kv_cache_mode": "last_loop"}, "the K and V of the last loop"),
    ],
)
def test_a_setting_that_rules_a_model_out_is_seen_before_weights(
    setting: dict[str, Any], reason: str
) -> None:
    """From the configuration alone."""
    config = FAMILIES["llama"]()
    model_class = model_class_of(config)
    check_supported(config, model_class)
    for name, value in setting.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(config, model_class)


def test_a_model_type_without_a_causal_model_is_refused() -> None:
    """T5, say, or a vision model."""
    config = transformers.ViTConfig()
    with pytest.raises(UnsupportedModelError, match="'vit' is not supported: transformers has no"):
        check_supported(config, model_class_of(config))


def test_the_probe_leaves_our_attention_in_place() -> None:
    """Of a copy: the caller's model keeps its own."""
    module = copy.deepcopy(tiny_model("llama"))
    PagedModel(module)
    assert module.config._attn_implementation == ATTENTION_NAME


def longrope(original: int) -> Any:
    """Phi-3 with LongRoPE, tiny: trained for `original` tokens, stretched to `MAX_LEN`."""
    config = FAMILIES["phi3"]()
    config.original_max_position_embeddings = original
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": original,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    }
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


async def test_longrope_is_served_up_to_its_original_length() -> None:
    """Beyond it, a sequence would depend on the longest one in its batch."""
    model = longrope(32)
    prompt = prompts([20])[0]
    async with AsyncEngine(model=model, kv_memory="512 tokens") as engine:
        completion = await engine.complete(prompt, SamplingParams(temperature=0, max_tokens=12))
        assert engine.config.max_model_len == 32
    assert list(completion.token_ids) == greedy(model, prompt, 12)


def test_rotary_frequencies_are_not_shared_with_the_callers_model() -> None:
    """LongRoPE writes into them: the caller's long text must not change ours, nor ours theirs."""
    model = longrope(32)
    twin = share_model(model)
    token = torch.zeros(1, dtype=torch.int64)
    before = twin.module.model.rotary_emb.inv_freq.clone()
    model(input_ids=token[None], position_ids=torch.tensor([[100]]))
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    assert torch.equal(twin.module.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("configuration", [transformers.MptConfig, transformers.XLNetConfig])
def test_positions_without_an_end_have_a_generous_limit(configuration: Any) -> None:
    """Of configurations that name no limit, or -1."""
    assert max_len(configuration()) == UNBOUNDED_LEN


async def test_dynamic_ntk_scaling_changes_nothing_within_the_models_length() -> None:
    """Its frequencies adapt to the longest text only beyond `max_position_embeddings`."""
    config = FAMILIES["llama"]()
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    prompt = prompts([30])[0]
    async with AsyncEngine(model=model.eval(), kv_memory="1024 tokens") as engine:
        completion = await engine.complete(prompt, SamplingParams(temperature=0, max_tokens=12))
        assert engine.config.max_model_len == MAX_LEN
    assert list(completion.token_ids) == greedy(model, prompt, 12)


def test_every_attention_call_has_pools_of_its_own() -> None:
    """Two halves of a differential layer, loops of a recurrent one, layers that share K and V."""
    shapes = {name: share_model(family_model(name)).layers for name in ("diffllama", "hrm_text")}
    assert len(shapes["diffllama"]) == 2 * 2
    assert len(shapes["hrm_text"]) == 8 * 2
    assert len(share_model(family_model("gemma3n_text")).layers) == 4


def test_all_end_tokens_are_known() -> None:
    """One, several or none, of a model or of the text model within."""
    model = tiny_model("llama")
    assert share_model(model).eos_token_ids == ()
    model.generation_config.eos_token_id = [5, 7]
    assert share_model(model).eos_token_ids == (5, 7)
    model.config.eos_token_id = 3  # what the generation configuration says goes first
    assert share_model(model).eos_token_ids == (5, 7)
    within = family_model("gemma3")
    within.config.eos_token_id = None
    within.config.text_config.eos_token_id = 9
    assert share_model(within).eos_token_ids == (9,)
