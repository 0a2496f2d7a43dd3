"""LoRA adapters: many in one batch, each token for token what peft itself generates with it."""

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpage import AsyncEngine, Completion, ConfigError, RequestError, SamplingParams
from kvpage.adapters import AdaptedLinear, AdaptedTokens, LowRank, adapting, attach_adapters
from kvpage.packed_linear import pack_linears
from tests.engine import scenes
from tests.model.tiny import greedy, prompts, tiny_model

peft = pytest.importorskip("peft")
pytestmark = [
    # peft asks transformers for something by its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

MAX_TOKENS = 10
PROMPTS = prompts([3, 8, 17, 5, 24, 9, 16])

ATTENTION: Mapping[str, list[str]] = {
    "llama": ["q_proj", "v_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "phi3": ["qkv_proj"],
}
MLP: Mapping[str, str] = {"llama": "down_proj", "gpt2": "c_fc", "phi3": "gate_up_proj"}


@attrs.frozen
class Trained:
    """A tiny model, and adapters for it that change what it says.

    Attributes:
        folders: of the adapters.
        models: what peft makes of them; under None the model itself.
    """

    folders: Mapping[str, Path]
    models: Mapping[str | None, Any]

    def expected(self, adapter: str | None, prompt: list[int]) -> list[int]:
        """What is generated without us."""
        return greedy(self.models[adapter], prompt, MAX_TOKENS)


def adapter_of(model: Any, folder: Path, seed: int, **config: Any) -> Any:
    """A copy of `model` with an adapter of random weights, which is saved to `folder`."""
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config))
    with torch.no_grad():
        for name, weights in adapted.named_parameters():
            if "lora_B" in name:
                weights.normal_(std=0.4)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_model("llama", tmp_path_factory.mktemp("adapters"))


def trained_model(family: str, root: Path) -> Trained:
    """A model of a family with three adapters."""
    model, mlp = tiny_model(family), MLP[family]
    configs: dict[str, dict[str, Any]] = {
        "attention": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION[family]},
        "every layer": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"},
        "patterns": {
            "r": 8,
            "use_rslora": True,
            "target_modules": [*ATTENTION[family], mlp],
            "rank_pattern": {mlp: 3},
            "alpha_pattern": {mlp: 5},
            "layers_to_transform": [1],
        },
    }
    models: dict[str | None, Any] = {None: model}
    for seed, (name, config) in enumerate(configs.items()):
        transposed = family == "gpt2"  # its layers are Conv1D
        models[name] = adapter_of(model, root / name, seed, fan_in_fan_out=transposed, **config)
    return Trained({name: root / name for name in configs}, models)


def engine(trained: Trained, **settings: Any) -> AsyncEngine:
    return AsyncEngine(
        model=trained.models[None],
        adapters=trained.folders,
        **{"block_size": 8, "kv_memory": "1024 tokens", **settings},
    )


async def complete_all(
    served: AsyncEngine, requests: list[tuple[list[int], str | None]], **options: Any
) -> list[Completion]:
    """All requests at once."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, **options)
    calls = [
        partial(served.complete, prompt, params, adapter=adapter) for prompt, adapter in requests
    ]
    return await scenes.complete_all(served, calls)


SETTINGS: Mapping[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"max_batch_tokens": 7},
    "preempted": {"kv_memory": "96 tokens", "max_model_len": 64},
    "contiguous": {"allocator": "contiguous:reserve=request"},
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_every_request_gets_its_own_adapter(trained: Trained, name: str) -> None:
    """Three adapters and none, in one batch; equal prompts with different ones among them."""
    preemptions = await check_mixed_batch(trained, **SETTINGS[name])
    assert (preemptions > 0) == (name == "preempted")


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
async def test_layers_of_other_kinds_are_adapted_too(family: str, tmp_path: Path) -> None:
    """Conv1D, which lies transposed; Q, K and V in one."""
    await check_mixed_batch(trained_model(family, tmp_path))


async def check_mixed_batch(trained: Trained, **settings: Any) -> int:
    """Compare a mixed batch with what is generated without us; returns the preemptions."""
    names = list(trained.models)
    requests = [(prompt, names[i % 4]) for i, prompt in enumerate(PROMPTS)]
    requests += [(PROMPTS[4], adapter) for adapter in names]
    async with engine(trained, **settings) as served:
        completions = await complete_all(served, requests)
        preemptions = served.stats().preemptions
    expected = [trained.expected(adapter, prompt) for prompt, adapter in requests]
    assert [list(one.token_ids) for one in completions] == expected
    assert len({tuple(tokens) for tokens in expected[-4:]}) == 4
    return preemptions


async def test_cached_prefixes_belong_to_their_adapter(trained: Trained) -> None:
    """The same prompt again finds the blocks of its own adapter, and no others."""
    requests = [(PROMPTS[4], adapter) for adapter in trained.models]
    async with engine(trained) as served:
        first = [(await complete_all(served, [request]))[0] for request in requests]
        again = [(await complete_all(served, [request]))[0] for request in requests]
    assert [one.usage.cached_tokens for one in first] == [0] * 4
    assert [one.usage.cached_tokens for one in again] == [16] * 4
    assert [one.token_ids for one in again] == [one.token_ids for one in first]


async def test_choices_share_their_adapter(trained: Trained) -> None:
    """Forks of a prompt that was computed with it."""
    async with engine(trained) as served:
        [completion] = await complete_all(served, [(PROMPTS[2], "attention")], n=3)
    expected = tuple(trained.expected("attention", PROMPTS[2]))
    assert [choice.token_ids for choice in completion.choices] == [expected] * 3


async def test_without_an_adapter_nothing_changes(trained: Trained) -> None:
    """To the last bit of the log-probabilities; one by one, so that steps are the same."""

    async def alone(served: AsyncEngine) -> list[Any]:
        async with served:
            found = [await complete_all(served, [(each, None)], logprobs=3) for each in PROMPTS]
        return [completion.logprobs for [completion] in found]

    with_adapters = await alone(engine(trained))
    assert with_adapters == await alone(engine(attrs.evolve(trained, folders={})))


async def test_an_unknown_adapter_is_refused_with_the_known_ones(trained: Trained) -> None:
    """In the caller's task; nothing is computed."""
    async with engine(trained) as served:
        with pytest.raises(RequestError) as refusal:
            await served.complete(PROMPTS[0], adapter="other")
        assert served.stats().steps == 0
        assert served.model.adapters == ("attention", "every layer", "patterns")
    assert str(refusal.value) == (
        "there is no adapter 'other'; this engine has: attention, every layer, patterns"
    )


def test_the_caller_s_model_stays_as_it_is(trained: Trained) -> None:
    """Its modules, its tensors, and whether they can be trained."""
    model = trained.models[None]
    before = [(name, id(each), each.requires_grad) for name, each in model.named_parameters()]
    anyio.run(engine(trained).aclose)
    after = [(name, id(each), each.requires_grad) for name, each in model.named_parameters()]
    assert after == before
    assert not any(isinstance(module, AdaptedLinear) for module in model.modules())


def test_a_loaded_model_with_packed_layers_has_adapters_too(
    trained: Trained, tmp_path: Path
) -> None:
    """Layers are packed inside their adapters, whose weights are what they were."""
    module = copy.deepcopy(trained.models[None])
    attach_adapters(module, trained.folders)
    pack_linears(module)
    adapted = [each for each in module.modules() if isinstance(each, AdaptedLinear)]
    assert adapted
    inputs = torch.tensor([PROMPTS[2]])
    for number, name in enumerate(trained.folders):
        tokens = AdaptedTokens(inputs.shape[1], {number: None})
        with torch.inference_mode(), adapting(tokens):
            logits = module(inputs).logits
            # The output layer is not adapted, and sees all tokens here.
            expected = trained.models[name](inputs).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layers", [[1], None])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj"]])
async def test_a_model_loaded_from_a_folder_has_adapters(
    targets: list[str], layers: list[int] | None, tmp_path: Path
) -> None:
    """`from_pretrained` fuses and packs layers around those that are adapted, never these away."""
    model = tiny_model("llama")
    config = {"r": 4, "target_modules": targets, "layers_to_transform": layers}
    adapted = adapter_of(model, tmp_path / "adapter", 7, **config)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    opening = AsyncEngine.from_pretrained(
        tmp_path / "model",
        device="cpu",
        adapters={"one": tmp_path / "adapter"},
        kv_memory="512 tokens",
    )
    async with opening as served:
        requests = [(prompt, name) for prompt in PROMPTS[:3] for name in ("one", None)]
        completions = await complete_all(served, requests)
    expected = [greedy(adapted if name else model, prompt, MAX_TOKENS) for prompt, name in requests]
    assert [list(one.token_ids) for one in completions] == expected


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}


# -- one layer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequences", [[2, -1, 0, 1, 2], [0, 0, 0, 0, 0], [-1, -1, -1, -1, 2]])
def test_each_token_gets_the_products_of_its_adapter(sequences: list[int]) -> None:
    """Tokens without one keep, bit for bit, what the layer gives them."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    base = torch.nn.Linear(12, 20)
    updates = {
        0: LowRank(random(3, 12), random(20, 3), 0.5),
        2: LowRank(random(1, 12), random(20, 1), 2),
    }
    layer = AdaptedLinear(base, updates)
    adapters, lengths = np.array(sequences, np.int32), np.array([3, 2, 1, 4, 1], np.int32)
    inputs = random(1, int(lengths.sum()), 12)
    tokens = AdaptedTokens.of(adapters, lengths, torch.device("cpu"))
    with torch.inference_mode(), adapting(tokens):
        outputs = layer(inputs)[0]
    plain = base(inputs)[0].detach()
    for place, adapter in enumerate(np.repeat(adapters, lengths).tolist()):
        update = updates.get(adapter)
        if update is None:
            assert torch.equal(outputs[place], plain[place])
        else:
            change = update.scaling * update.b @ (update.a @ inputs[0, place])
            torch.testing.assert_close(outputs[place], plain[place] + change)


def test_a_layer_that_does_not_see_every_token_says_so() -> None:
    """An expert gets those that were routed to it: rows are no tokens there."""
    layer = AdaptedLinear(torch.nn.Linear(4, 4), {})
    tokens = AdaptedTokens(5, {0: None})
    with adapting(tokens), pytest.raises(RuntimeError, match="got 3 rows in a pass of 5 tokens"):
        layer(torch.zeros(3, 4))


# -- what is refused -------------------------------------------------------------------------------


@cache
def base_model() -> Any:
    return tiny_model("llama")


def cannot_be_loaded(folder: Path) -> str:
    """Why an engine refuses the adapter; its model is as it was."""
    module = copy.deepcopy(base_model())
    names = [name for name, _ in module.named_modules()]
    with pytest.raises(ConfigError) as refusal:
        attach_adapters(module, {"odd": folder})
    assert [name for name, _ in module.named_modules()] == names
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


NOT_PLAIN: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "not plain LoRA: it has DoRA"),
    ({"modules_to_save": ["lm_head"]}, "not plain LoRA: it has modules of its own"),
    ({"bias": "lora_only"}, "not plain LoRA: it changes biases"),
    ({"lora_bias": True}, "not plain LoRA: it has a bias of its own"),
    ({"trainable_token_indices": [1, 2]}, "not plain LoRA: it has embeddings of its own"),
    ({"target_modules": ["embed_tokens"]}, "it adapts 'model.embed_tokens', a Embedding"),
    ({"target_modules": ["lm_head"]}, "it adapts 'lm_head', a Linear"),
]


@pytest.mark.filterwarnings("ignore")  # peft has something to say about some of them
@pytest.mark.parametrize(("config", "sentence"), NOT_PLAIN, ids=lambda value: str(value)[:30])
def test_what_is_not_plain_lora_is_refused(
    config: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """Rather than served wrongly."""
    adapter_of(base_model(), tmp_path, 0, **{"target_modules": ["q_proj"], **config})
    assert sentence in cannot_be_loaded(tmp_path)


def test_other_kinds_of_adapters_are_refused(tmp_path: Path) -> None:
    """By their kind."""
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    peft.get_peft_model(copy.deepcopy(base_model()), config).save_pretrained(tmp_path)
    assert cannot_be_loaded(tmp_path) == "adapter 'odd' is of the kind IA3, not LORA"


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Missing, surplus and misshapen weights; no files at all."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    adapter_of(base_model(), good, 0, r=4, target_modules=["q_proj"])
    weights = load_file(good / "adapter_model.safetensors")
    first = next(iter(weights))
    spoilt: list[tuple[dict[str, torch.Tensor], str]] = [
        ({name: each for name, each in weights.items() if name != first}, "the model lacks"),
        ({**weights, "base_model.model.else.lora_A.weight": torch.ones(1)}, "does not use"),
        ({**weights, first: torch.ones(4, 3)}, "size mismatch"),
    ]
    for change, sentence in spoilt:
        bad.mkdir(exist_ok=True)
        config = (good / "adapter_config.json").read_text()
        (bad / "adapter_config.json").write_text(config)
        save_file(change, bad / "adapter_model.safetensors")
        assert sentence in cannot_be_loaded(bad)
    assert "adapter 'odd' cannot be read from" in cannot_be_loaded(tmp_path / "nothing")


def test_without_the_extra_adapters_are_refused() -> None:
    """The sentence says what to install."""
    program = (
        "import sys; sys.modules['peft'] = None\n"
        "from kvpage.adapters import attach_adapters\n"
        "try: attach_adapters(object(), {'a': 'b'})\n"
        "except ValueError as refusal: print(refusal)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "adapters need peft: pip install 'kvpage[lora]'\n"
