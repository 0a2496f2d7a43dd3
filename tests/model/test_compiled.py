"""Layers compiled by torch compute what they did."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpage import AsyncEngine, ConfigError, SamplingParams
from kvpage.compiled import compile_layers
from kvpage.model import share_model
from kvpage.pretrained import load_pretrained
from tests.model.families import PROMPTS, WholeSequence, family_model, logits_of, unchanged
from tests.model.folders import write_model
from tests.model.tiny import greedy

# torch's compiler imports what torch itself deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch compiles for a CPU with a C++ compiler"
)


def unique_graphs() -> int:
    """How many torch has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
def test_compiled_layers_give_the_same_logits(model_type: str) -> None:
    """For sequences of several lengths, with windows and caps; and they are compiled."""
    model = share_model(family_model(model_type))
    before = [logits_of(model, prompt, WholeSequence(unchanged)) for prompt in PROMPTS]
    compilations = unique_graphs()
    compile_layers(model)
    assert unique_graphs() > compilations
    compilations = unique_graphs()
    for expected, prompt in zip(before, PROMPTS, strict=True):
        actual = logits_of(model, prompt, WholeSequence(unchanged))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert unique_graphs() == compilations


@pytest.mark.slow
@needs_compiler
async def test_an_engine_serves_a_compiled_model(tmp_path: Path) -> None:
    """The reference's tokens; and nothing is compiled once it is open."""
    folder, model = write_model(tmp_path), family_model("llama")
    async with AsyncEngine.from_pretrained(
        folder, compile=True, device="cpu", kv_memory="512 tokens"
    ) as engine:
        compilations = unique_graphs()
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        for prompt in ([3, 1, 4, 1, 5], [9, 2, 6]):
            completion = await engine.complete(prompt, params)
            assert list(completion.token_ids) == greedy(model, prompt, 12)
        assert unique_graphs() == compilations > 0


@pytest.mark.parametrize("options", [{"weights": "int8"}, {"adapters": {"one": "somewhere"}}])
def test_what_does_not_go_together_is_refused(options: Any) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match="compile=True does not go together with"):
        load_pretrained(compile=True, **options)


@pytest.mark.slow
def test_without_a_compiler_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch, which has forgotten what other tests let it compile."""
    torch.compiler.reset()
    model = share_model(family_model("llama"))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    with pytest.raises(ConfigError, match=r"torch cannot compile this model: .*ompiler"):
        compile_layers(model)


def test_a_model_without_layers_is_refused() -> None:
    """There is nothing to compile in it."""
    model = share_model(family_model("llama"))
    model.module.model.layers = torch.nn.ModuleList(list(model.module.model.layers)[:1])
    with pytest.raises(ConfigError, match="none to see"):
        compile_layers(model)
