"""Every causal-LM family of transformers, tiny, and what becomes of it in kvpage.

Usage: python -m tests.model.families [--check]

Writes the table of `docs/reference/models.md`, or says whether it is up to date.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvpage import AsyncEngine, SamplingParams
from kvpage.families import reasons_to_refuse
from kvpage.kernels import AttentionOptions, reference
from kvpage.kernels.work import AttentionBatch
from kvpage.model import PagedModel, model_class_of, share_model
from tests.engine.scenes import complete_all
from tests.model.tiny import MAX_LEN, VOCABULARY, greedy, prompts

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WINDOW = 8
MAX_TOKENS = 6
# Two that fit together until they grow, and one that needs nearly the whole pool.
PROMPTS = prompts([9, 17, 3, 26])
POOL_TOKENS = 33
WINDOWED_POOL_TOKENS = 14
"""Where a window slides over every layer, sequences give back what is behind it."""
PATIENCE_S = 30.0

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "sliding_window": WINDOW,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # the same under older names
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_LEN,
    "n_inner": 96,
    "d_model": 64,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "rotary_dim": 8,
    "depth": 2,
    "num_layers": 2,
    # mixtures of experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # multi-head latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    # Gemma
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "attn_logit_softcapping": 0.1,
}
"""Small values for whatever of these a configuration has."""

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
_WINDOWED = {"sliding_window": WINDOW}
_SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_DECODER = {"is_decoder": True, "pad_token_id": 0}

_TWEAKS: Mapping[str, Mapping[str, Any]] = {
    "axk1": _LATENT,
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "camembert": _DECODER,
    "cohere_compass_text": {
        **_MIXED,
        "rope_parameters": dict.fromkeys(_MIXED["layer_types"], _ROPE),
    },
    "cwm": {"bos_token_id": 0, "eos_token_id": None},
    "data2vec-text": _DECODER,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dory": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "n_input_layers": 1,
        "n_output_layers": 1,
    },
    "dots1": _MIXED,
    "electra": _DECODER,
    "emu3": {"text_config": {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}},
    "ernie": _DECODER,
    "gemma3n": {"text_config": _SHARED_KV},
    "gemma3n_text": _SHARED_KV,
    "gemma4": {"text_config": {**_SHARED_KV, "pad_token_id": 0}},
    "gemma4_text": _SHARED_KV,
    "gemma4_unified": {"text_config": {"pad_token_id": 0}},
    "glm4_moe_lite": _LATENT,
    "laguna": _MIXED,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {**_LATENT, "zero_expert_num": 2},
    "mellum": _MIXED,
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "ministral3": _WINDOWED,
    "mixtral": _WINDOWED,
    "mllama": {"text_config": {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}},
    "modernbert-decoder": {"bos_token_id": 0, "pad_token_id": 0},
    "moshi": {"sliding_window": MAX_LEN},
    "phi3": _WINDOWED,
    "qwen2": {**_WINDOWED, **_MIXED, "use_sliding_window": True},
    "qwen3": {**_WINDOWED, **_MIXED, "use_sliding_window": True},
    "qwen3_moe": {**_WINDOWED, "use_sliding_window": True},
    "roberta": _DECODER,
    "roberta-prelayernorm": _DECODER,
    "roc_bert": _DECODER,
    "sarvam_mla": _LATENT,
    "smollm3": {**_WINDOWED, **_MIXED, "use_sliding_window": True},
    "starcoder2": _WINDOWED,
    "xlm-roberta": _DECODER,
    "xlm-roberta-xl": _DECODER,
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "youtu": _LATENT,
}
"""What a family needs beside, or instead of, the sizes above."""


_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}
"""What a configuration cannot even be made without."""


def config_of(model_type: str) -> Any:
    """A small configuration with what makes the family special; as released if that is refused."""
    configuration = CONFIG_MAPPING[model_type]
    released = configuration(**_DEFAULTS.get(model_type, {}))
    if model_type not in _TWEAKS and refusal(released) is not None:
        return released
    return configuration(**_small(released, _TWEAKS.get(model_type, {})))


def refusal(config: Any) -> str | None:
    """Why kvpage refuses a model of this configuration before it loads weights."""
    return next(reasons_to_refuse(config, model_class_of(config)), None)


def _small(default: Any, tweaks: Mapping[str, Any]) -> dict[str, Any]:
    """What to construct a configuration with, parts of it included."""
    own = {*default.to_dict(), *default.attribute_map}
    values = {name: size for name, size in _SIZES.items() if name in own}
    if not getattr(default, "sliding_window", None):
        values.pop("sliding_window", None)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(getattr(default, name, None) or ()))
        if kinds:
            values[name] = (kinds * 2)[:2]
    parts = {name: getattr(default, name, None) for name in default.sub_configs}
    for name, part in parts.items():
        if part is not None:
            values[name] = _small(part, tweaks.get(name, {}))
    return {**values, **{name: value for name, value in tweaks.items() if name not in parts}}


def family_model(model_type: str) -> Any:
    """A model of this type with transformers' own attention, the same weights each time."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(model_type), attn_implementation="eager"
    )
    _roughen(model)
    # Nothing of a family's own generation settings: no token ends a text.
    model.generation_config = transformers.GenerationConfig()
    return model.eval()


@torch.no_grad()
def _roughen(model: Any) -> None:
    """Give weights a size at which the greedy token depends on what is attended to.

    As they are initialised, layers add so little to the residual stream that a model with tied
    embeddings repeats its last token for ever, whatever its attention does.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        elif parameter.is_floating_point():
            parameter.add_(noise * 0.1)
    model.get_input_embeddings().weight.mul_(0.3)


class WholeSequence:
    """An attention step over one sequence from its start, in plain torch.

    Attributes:
        shapes: `(Hq, Hkv, D, Dv)` of each call.
        options: what each call asked for.
    """

    def __init__(self, change: Callable[[AttentionOptions], AttentionOptions]) -> None:
        """Attend as `change` makes it of what a layer asks for."""
        self._change = change
        self.shapes: list[tuple[int, int, int, int]] = []
        self.options: list[AttentionOptions] = []

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
        self.shapes.append((q.shape[1], k.shape[1], q.shape[2], v.shape[2]))
        self.options.append(options)
        length = np.array([len(q)], np.int32)
        row = np.zeros((1, 1), np.int32)
        batch = AttentionBatch(row, row[0], length, length, block_size=len(q))
        asked = self._change(options)
        return reference.paged_attention(
            q, k, v, batch,
            scale=asked.scale, window=asked.window, softcap=asked.softcap, sinks=asked.sinks,
        )  # fmt: skip


def unchanged(options: AttentionOptions) -> AttentionOptions:
    """Attend as the layer asks."""
    return options


def logits_of(model: PagedModel, prompt: list[int], step: WholeSequence) -> torch.Tensor:
    """`[vocabulary]`, the logits behind a prompt."""
    ids = torch.tensor(prompt)
    return model.logits(ids, torch.arange(len(ids)), step, torch.tensor([len(ids) - 1]))[0]


@attrs.frozen
class Served:
    """A family that kvpage runs.

    Attributes:
        model_class: its class in transformers.
        features: how it attends, in words.
        expected: what transformers generates for each of `PROMPTS`.
        actual: what kvpage generates, in chunks, in company, preempted.
        preemptions: how often.
    """

    model_class: str
    features: tuple[str, ...]
    expected: list[list[int]]
    actual: list[list[int]]
    preemptions: int

    @property
    def result(self) -> str:
        """For the table."""
        return "equal" if self.actual == self.expected else "DIFFERENT"


@attrs.frozen
class Refused:
    """A family that kvpage refuses before it loads weights, and why."""

    model_class: str
    reason: str

    @property
    def features(self) -> tuple[str, ...]:
        """Not looked at."""
        return ()

    @property
    def result(self) -> str:
        """For the table."""
        return f"refused: {self.reason}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: on models this small, several only wait for each other.

    On a busy machine with two cores a family takes 0.12 s on one thread and 2.9 s on two.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
@one_thread()
def outcome(model_type: str) -> Served | Refused:
    """What becomes of a family; about a tenth of a second."""
    config = config_of(model_type)
    model_class = getattr(model_class_of(config), "__name__", "none")
    reason = refusal(config)
    if reason is not None:
        return Refused(model_class, reason)
    model = family_model(model_type)
    expected = [greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    actual, preemptions = anyio.run(generate, model)
    return Served(model_class, features(model), expected, actual, preemptions)


async def generate(model: Any, **settings: Any) -> tuple[list[list[int]], int]:
    """All of `PROMPTS` at once, in chunks, in a pool hardly larger than the longest sequence.

    Returns:
        The tokens of each prompt, and the number of preemptions.
    """
    pool_tokens = WINDOWED_POOL_TOKENS if share_model(model).window else POOL_TOKENS
    narrow = {"block_size": 1, "max_batch_tokens": 7, "kv_memory": f"{pool_tokens} tokens"}
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    async with AsyncEngine(model=model, **{**narrow, "prefix_cache": False, **settings}) as engine:
        calls = [partial(engine.complete, prompt, params) for prompt in PROMPTS]
        completions = await complete_all(engine, calls)
        preemptions = engine.stats().preemptions
    return [list(one.token_ids) for one in completions], preemptions


def features(model: Any) -> tuple[str, ...]:
    """How a model attends, beside plain causal attention with as many KV heads as query heads."""
    step = WholeSequence(unchanged)
    logits_of(share_model(model), PROMPTS[0], step)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    found = {
        "GQA": any(1 < kv < heads for heads, kv, _, _ in step.shapes),
        "MQA": any(1 == kv < heads for heads, kv, _, _ in step.shapes),
        "MLA, expanded": any(key > value for _, _, key, value in step.shapes),
        "several shapes": len(set(step.shapes)) > 1,
        "sliding window": any(options.window for options in step.options),
        "softcap": any(options.softcap for options in step.options),
        "sinks": any(options.sinks is not None for options in step.options),
        "MoE": any("experts" in name for name, _ in model.named_modules()),
        "several calls a layer": len(step.options) > layers,
    }
    return tuple(name for name, is_there in found.items() if is_there)


TARGET = Path(__file__).parents[2] / "docs" / "reference" / "models.md"

_HEAD = """# Model families

Every model type that transformers {version} maps to a causal language model: {served} are served,
{refused} are refused, in one sentence, before any weights are loaded. Made by
`python -m tests.model.families`, which the test suite repeats: edit that, not this file.

"Equal" means that greedy output equals transformers' own `generate`, token for token, in float32
with its eager attention: a tiny model with random weights, {prompts} prompts of {lengths} tokens
at once, computed in chunks of at most 7 tokens, in a pool of {pool} tokens, so that running
sequences are preempted and recomputed. Sliding windows are {window} tokens there, and models that
mix windows with full attention have a layer of each.

What class and configuration cannot tell is tested when a model is built: two passes over a few
tokens, once as transformers would run them and once packed among strangers, must give every token
the same Q, K, V and logits, and the masks that transformers would have used must be those that the
layers' options describe. A model that fails, be it of a family of this table or of remote code, is
refused with the reason and never serves a token.

* Families of several modalities are served for text alone.
* Models with LongRoPE are served up to the length they were first trained for, where one set of
  frequencies holds for every batch; those with dynamic NTK scaling up to `max_position_embeddings`.
* Latent attention (MLA) works on expanded K and V, not on the latent: right, and no smaller.
* Layers that share the K and V of others each keep a copy of them.

| model type | class | attends with | result |
|---|---|---|---|
"""


def page() -> str:
    """The reference page."""
    outcomes = {model_type: outcome(model_type) for model_type in MODEL_TYPES}
    served = sum(isinstance(each, Served) for each in outcomes.values())
    head = _HEAD.format(
        version=transformers.__version__,
        served=served,
        refused=len(outcomes) - served,
        prompts=len(PROMPTS),
        lengths=", ".join(str(len(prompt)) for prompt in PROMPTS),
        pool=POOL_TOKENS,
        window=WINDOW,
    )
    return head + "".join(_rows(outcomes))


def _rows(outcomes: Mapping[str, Served | Refused]) -> Iterator[str]:
    for model_type, each in outcomes.items():
        how = ", ".join(each.features)
        yield f"| {model_type} | {each.model_class} | {how} | {each.result} |\n"


def served_by_page() -> tuple[str, ...]:
    """The model types that the committed page calls equal."""
    rows = (line.split(" | ") for line in TARGET.read_text().splitlines())
    return tuple(row[0].removeprefix("| ") for row in rows if row[-1] == "equal |")


def main() -> int:
    """Write the page, or with `--check` say whether it is up to date."""
    if "--check" in sys.argv:
        return 0 if TARGET.read_text() == page() else 1
    TARGET.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
