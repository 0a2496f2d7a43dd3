"""Weights in one byte: how far off, how large, and where they are refused."""

import pytest
import torch

from kvpage import ConfigError
from kvpage.kernels.cpu_product import SLICE_INPUTS, TILE_ROWS, WIDENED_ROWS
from kvpage.model import share_model
from kvpage.packed_linear import PanelLinear
from kvpage.quantised_linear import (
    QuantisedEmbedding,
    QuantisedLinear,
    check_int8,
    multiplies_bytes,
    quantise_weights,
)
from tests.model.families import PROMPTS, WholeSequence, family_model, logits_of, unchanged

multiplying = pytest.mark.skipif(not multiplies_bytes(), reason="this CPU does not multiply bytes")


@multiplying
@pytest.mark.parametrize("rows", [1, 2, 15, 64, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_rounded_numbers(rows: int, bias: bool) -> None:
    """Sums of bytes are exact; only what went in was rounded, rows and outputs each by a scale."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 130, bias=bias)
    inputs = torch.randn(1, rows, 96) * torch.logspace(-3, 3, rows)[:, None]
    with torch.inference_mode():
        weight, x = (_rounded(each.double()) for each in (linear.weight, inputs))
        expected = torch.nn.functional.linear(
            x, weight, None if linear.bias is None else linear.bias.double()
        )
        actual = QuantisedLinear(linear)(inputs)
    size = expected.abs().amax(dim=-1, keepdim=True)
    assert actual.shape == (1, rows, 130)
    assert float(((actual - expected) / size).abs().max()) < 2e-3


def _rounded(x: torch.Tensor) -> torch.Tensor:
    scales = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scales).round() * scales


@multiplying
def test_a_row_does_not_depend_on_its_company() -> None:
    """Alone or among rows a thousand times larger."""
    torch.manual_seed(0)
    layer = QuantisedLinear(torch.nn.Linear(64, 48))
    inputs = torch.randn(70, 64)
    inputs[1:] *= 1000
    with torch.inference_mode():
        assert torch.equal(layer(inputs)[:1], layer(inputs[:1]))


def test_an_embedding_is_within_half_a_step() -> None:
    """One scale for each token."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(30, 20)
    tokens = torch.tensor([[3, 0, 29]])
    with torch.inference_mode():
        exact = embedding(tokens)
        error = (QuantisedEmbedding(embedding)(tokens) - exact).abs().amax(dim=-1)
    assert bool((error <= exact.abs().amax(dim=-1) / 127 * 0.5001).all())


def panels_of_bytes(linear: torch.nn.Linear) -> tuple[PanelLinear, torch.Tensor]:
    """A layer, and the weights it has: the nearest whole steps."""
    weight = linear.weight.detach()
    scales = weight.abs().amax(dim=1) / 127
    steps = (weight / scales[:, None]).round()
    return PanelLinear(linear, None, (steps.to(torch.int8), scales)), steps * scales[:, None]


@pytest.mark.parametrize("inputs", [96, 2 * SLICE_INPUTS + 7])
@pytest.mark.parametrize("bias", [True, False])
def test_panels_of_bytes_give_the_product_of_rounded_weights(inputs: int, bias: bool) -> None:
    """In float32, for any number of rows, each as it is alone."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(inputs, 70, bias=bias)
    most = WIDENED_ROWS + TILE_ROWS + 2
    x = torch.randn(most, inputs) * torch.logspace(-3, 3, most)[:, None]
    with torch.inference_mode():
        layer, weight = panels_of_bytes(linear)
        expected = torch.nn.functional.linear(
            x.double(), weight.double(), None if linear.bias is None else linear.bias.double()
        )
        alone = torch.cat([layer(x[i : i + 1]) for i in range(most)])
        for rows in range(1, most + 1):
            assert torch.equal(layer(x[:rows]), alone[:rows])
    size = expected.abs().amax(dim=-1, keepdim=True)
    assert float(((alone - expected) / size).abs().max()) < 1e-5


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "olmo2", "qwen2"])
def test_a_model_in_bytes_is_near(
    model_type: str, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No float32 matrix is left, and logits are within a few hundredths of the largest."""
    if multiplies and not multiplies_bytes():
        pytest.skip("this CPU does not multiply bytes")
    monkeypatch.setattr("kvpage.quantised_linear.multiplies_bytes", lambda: multiplies)
    model = share_model(family_model(model_type))
    with torch.inference_mode():
        before = [logits_of(model, each, WholeSequence(unchanged)) for each in PROMPTS]
        quantise_weights(model.module)
        after = [logits_of(model, each, WholeSequence(unchanged)) for each in PROMPTS]
    matrices = [each for each in model.module.state_dict().values() if each.dim() > 1]
    assert not any(each.is_floating_point() for each in matrices)
    for one, other in zip(before, after, strict=True):
        assert float((one - other).abs().max() / one.abs().max()) < 0.1


def test_a_model_without_linear_layers_is_refused() -> None:
    """GPT-2's matrices are of a class of their own."""
    model = share_model(family_model("gpt2"))
    model.module.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="model type 'gpt2' has none"):
        quantise_weights(model.module)


def test_bytes_are_refused_where_they_cannot_be_had() -> None:
    """On a GPU, and for other weights than float32."""
    with pytest.raises(ConfigError, match=r"this is torch.float32 on cuda"):
        check_int8(torch.device("cuda"), torch.float32)
    with pytest.raises(ConfigError, match=r"this is bfloat16 on cpu"):
        check_int8(torch.device("cpu"), "bfloat16")
    check_int8(torch.device("cpu"), torch.float32)


def test_a_cpu_without_the_instructions_does_not_multiply_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever else it has."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    assert not multiplies_bytes()
