"""Fused modules compute what those of transformers do; what is not recognised is left alone."""

import weakref
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from kvpage import fusion
from kvpage.fused_modules import FusedAttention, FusedLayer, FusedModel, GatedMLP, RMSNorm
from kvpage.fusion import accelerate, fuse
from kvpage.model import PagedModel, share_model
from kvpage.packed_linear import PackedLinear, PanelLinear, pack_linears
from tests.model.families import (
    PROMPTS,
    WholeSequence,
    family_model,
    logits_of,
    served_by_page,
    unchanged,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Modules of each kind in two layers: whole layers, attention, MLPs, norms. Norms before and after,
# of Q and K per head or of all heads; weights stored less one; interleaved rotations; a GELU;
# biases; Q, K and V in one.
KINDS = {
    "llama": (2, 2, 2, 5),
    "qwen2": (2, 2, 2, 5),
    "qwen3": (2, 2, 2, 9),
    "gemma2": (0, 2, 2, 9),
    "olmo2": (0, 2, 2, 9),
    "smollm3": (2, 2, 2, 5),
    "glm": (0, 0, 0, 5),
    "phi3": (0, 0, 0, 5),
    "starcoder2": (0, 2, 0, 0),
    "gpt2": (0, 0, 0, 0),
}


def logits(model: PagedModel) -> torch.Tensor:
    """`[prompts, vocabulary]`, behind sequences of several lengths."""
    return torch.stack([logits_of(model, each, WholeSequence(unchanged)) for each in PROMPTS])


def number_of(model: PagedModel, kind: type) -> int:
    return sum(type(each) is kind for each in model.module.modules())


def assert_equal_logits(expected: torch.Tensor, actual: torch.Tensor) -> None:
    torch.testing.assert_close(actual / expected.abs().max(), expected / expected.abs().max(),
                               rtol=0, atol=2e-5)  # fmt: skip


@pytest.mark.parametrize("model_type", KINDS)
def test_what_is_fused_gives_the_same_logits(model_type: str) -> None:
    """And it is known what is fused."""
    model = share_model(family_model(model_type))
    before = logits(model)
    fuse(model)
    assert KINDS[model_type] == tuple(
        number_of(model, kind) for kind in (FusedLayer, FusedAttention, GatedMLP, RMSNorm)
    )
    assert_equal_logits(before, logits(model))


def accelerated(
    model_type: str, form: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[PagedModel, torch.Tensor, bool]:
    """A model with its layers in that form, its logits before, and whether it still works."""
    monkeypatch.setattr("kvpage.packed_linear.fastest_form", lambda _: form)
    model = share_model(family_model(model_type))
    before = logits(model)
    return model, before, accelerate(model, pack_linears)


@pytest.mark.parametrize("form", [PanelLinear, PackedLinear, None])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "smollm3", "granite", "gemma2"])
def test_what_is_packed_gives_the_same_logits(
    model_type: str, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each form; in panels, layers that are plain enough are computed in one call.

    Gemma 2 norms what a layer adds; Granite multiplies what the embedding gives.
    """
    model, before, works = accelerated(model_type, form, monkeypatch)
    assert works
    layers = [each for each in model.module.modules() if isinstance(each, FusedLayer)]
    runs = [len(each.run.layers) for each in layers if each.run is not None]
    plain = form is PanelLinear and model_type in {"llama", "qwen2", "smollm3", "granite"}
    assert runs == ([len(layers)] if plain else [])
    assert isinstance(model.module, FusedModel) == (model_type not in {"granite", "gemma2"})
    assert_equal_logits(before, logits(model))


class Between(torch.nn.Module):
    """A layer that is given something else than the one before it gave."""

    def __init__(self, layer: torch.nn.Module, change: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        hidden_states, tables = self.change(hidden_states, options.pop("position_embeddings"))
        return self.layer(hidden_states, position_embeddings=tables, **options)


@pytest.mark.parametrize(
    "change",
    [lambda x, tables: (x * 2, tables), lambda x, tables: (x, tuple(t.clone() for t in tables))],
)
def test_what_lies_between_two_layers_ends_a_run(
    change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other hidden states, or tables of their own; and nothing of it is lost."""
    monkeypatch.setattr("kvpage.packed_linear.fastest_form", lambda _: PanelLinear)
    model = share_model(family_model("llama"))
    layers = model.module.model.layers
    layers[1] = Between(layers[1], change)
    model = PagedModel(model.module)
    before = logits(model)
    assert accelerate(model, pack_linears)
    fused = [each for each in model.module.modules() if isinstance(each, FusedLayer)]
    assert [len(each.run.layers) for each in fused if each.run is not None] == [1, len(fused) - 1]
    assert_equal_logits(before, logits(model))


def with_a_hook(model: PagedModel) -> None:
    """Around the layers, which are what they were."""
    model.module.model.register_forward_hook(lambda *_: None)


def with_another_head(model: PagedModel) -> None:
    """Logits that are twice what the head gives."""
    head = model.module.lm_head
    model.module.lm_head = torch.nn.Sequential(head, Twice())


def with_another_embedding(model: PagedModel) -> None:
    """The first layer is given twice what the embedding gives."""
    embedding = model.module.model.embed_tokens
    model.module.model.embed_tokens = torch.nn.Sequential(embedding, Twice())


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("change", "is_whole"),
    [(with_a_hook, False), (with_another_head, True), (with_another_embedding, True)],
)
def test_nothing_of_what_lies_around_the_layers_is_lost(
    change: Callable[[PagedModel], None], is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook keeps the model as it is; what is more than one module is taken over in one piece."""
    monkeypatch.setattr("kvpage.packed_linear.fastest_form", lambda _: PanelLinear)
    model = share_model(family_model("llama"))
    change(model)
    before = logits(model)
    assert accelerate(model, pack_linears)
    assert isinstance(model.module, FusedModel) == is_whole
    assert_equal_logits(before, logits(model))


def test_logits_that_are_changed_behind_the_head_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the family's own code, which is no module: its layers alone are fused."""
    monkeypatch.setattr("kvpage.packed_linear.fastest_form", lambda _: PanelLinear)
    model = share_model(family_model("llama"))
    plain = model.module.forward

    def tripled(**inputs: Any) -> Any:
        output = plain(**inputs)
        output.logits = output.logits * 3
        return output

    monkeypatch.setattr(model.module, "forward", tripled)
    before = logits(model)
    assert accelerate(model, pack_linears)
    assert number_of(model, FusedLayer) == 2
    assert not isinstance(model.module, FusedModel)
    assert_equal_logits(before, logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("form", [PanelLinear, PackedLinear])
@pytest.mark.parametrize("model_type", served_by_page())
def test_every_family_gives_the_same_logits(
    model_type: str, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused and packed; or it says that it could not be."""
    model, before, works = accelerated(model_type, form, monkeypatch)
    if works:
        assert_equal_logits(before, logits(model))


def test_weights_are_not_held_twice() -> None:
    """Q, K and V are let go of when they are joined; the total stays what it was."""
    model = share_model(family_model("llama"))
    numbers = sum(each.numel() for each in model.module.state_dict().values())
    fuse(model)
    assert sum(each.numel() for each in model.module.state_dict().values()) == numbers


def test_what_is_packed_is_let_go_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the whole model is done: a head can be a fifth of all weights."""
    monkeypatch.setattr("kvpage.packed_linear.fastest_form", lambda _: PanelLinear)
    model = share_model(family_model("llama"))
    head, is_left = weakref.ref(model.module.lm_head), []

    def pack(module: torch.nn.Module) -> None:
        pack_linears(module)
        is_left.append(head() is not None)

    assert accelerate(model, pack)
    assert is_left == [False]


def test_nothing_is_left_of_what_was_loaded() -> None:
    """One tensor that shares memory with the checkpoint's file would keep all of it."""
    model = share_model(family_model("llama"))
    loaded = [each.detach() for each in model.module.parameters()]
    assert accelerate(model, pack_linears)
    assert not {each.data_ptr() for each in loaded} & {
        each.data_ptr() for each in model.module.state_dict().values()
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda use: attrs.evolve(use, output=_off(use.output)),
        lambda use: attrs.evolve(use, calls=[attrs.evolve(c, k=c.k * 1.001) for c in use.calls]),
    ],
    ids=["output", "K"],
)
def test_a_module_that_computes_something_else_is_left_alone(
    change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much its parts look like what is known."""
    model = share_model(family_model("llama"))
    watched, before = fusion._watch(model)
    monkeypatch.setattr(
        fusion,
        "_watch",
        lambda _: ({each: change(use) for each, use in watched.items()}, before),
    )
    fuse(model)
    assert number_of(model, FusedAttention) == 0


def _off(output: Any) -> Any:
    return tuple(x if x is None else x * 1.001 for x in output) if type(output) is tuple else output


def test_a_module_with_a_hook_is_left_alone() -> None:
    """A hook may change what it computes, now or later."""
    model = share_model(family_model("llama"))
    first = model.module.model.layers[0]
    first.mlp.register_forward_hook(lambda *_: None)
    first.self_attn.k_proj.register_forward_pre_hook(lambda *_: None)
    fuse(model)
    counts = [number_of(model, kind) for kind in (FusedAttention, GatedMLP)]
    assert counts == [1, 1]


def test_a_layer_that_scales_what_it_adds_is_left_alone() -> None:
    """Only its parts are fused; the other layer scales by 1."""
    model = share_model(family_model("granite"))
    model.module.model.layers[0].residual_multiplier = 0.7
    fuse(model)
    counts = [number_of(model, kind) for kind in (FusedLayer, FusedAttention, GatedMLP)]
    assert counts == [1, 2, 2]


def test_a_module_that_is_used_twice_is_left_alone() -> None:
    """Its calls may differ."""
    model = share_model(family_model("llama"))
    layers = model.module.model.layers
    layers[1].mlp = layers[0].mlp
    fuse(model)
    assert number_of(model, GatedMLP) == 0


def test_a_family_that_looks_into_its_layers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the weights of a layer itself, which packed layers do not have."""
    monkeypatch.setattr("kvpage.packed_linear.fastest_form", lambda _: PanelLinear)
    assert not accelerate(share_model(family_model("longcat_flash")), pack_linears)
