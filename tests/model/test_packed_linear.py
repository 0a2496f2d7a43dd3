"""Packed linear layers compute what plain ones do."""

import pytest
import torch

from kvpage.packed_linear import PackedLinear, pack_linears
from tests.model.tiny import tiny_model

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="torch was built without oneDNN",
)


@pytest.mark.parametrize("rows", [1, 2, 15, 64, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_float64(rows: int, bias: bool) -> None:
    """Within float32 rounding, for any number of rows and any leading dims."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 130, bias=bias)
    inputs = torch.randn(1, rows, 96)
    with torch.inference_mode():
        actual = PackedLinear(linear)(inputs)
        expected = linear.double()(inputs.double())
    assert actual.shape == (1, rows, 130)
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=2e-6)


def test_strided_inputs_are_read_right() -> None:
    """A transposed view, as attention gives."""
    linear = torch.nn.Linear(8, 5)
    inputs = torch.randn(8, 3).T
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(inputs), linear(inputs))


def test_every_plain_layer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that packing pays for."""
    monkeypatch.setattr("kvpage.packed_linear.packing_pays", lambda _: True)
    model = tiny_model("llama")
    pack_linears(model)
    packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(packed) == 2 * 7 + 1
    assert not any(type(m) is torch.nn.Linear for m in model.modules())


def test_nothing_is_packed_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is left as it is."""
    monkeypatch.setattr("kvpage.packed_linear.packing_pays", lambda _: False)
    model = tiny_model("llama")
    pack_linears(model)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


def test_a_layer_that_does_more_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subclasses, other types of weights, and layers with hooks."""

    class Adapted(torch.nn.Linear):
        pass

    monkeypatch.setattr("kvpage.packed_linear.packing_pays", lambda _: True)
    hooked = torch.nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    prepared = torch.nn.Linear(4, 4)
    prepared.register_forward_pre_hook(lambda *_: None)
    model = torch.nn.Sequential(Adapted(4, 4), torch.nn.Linear(4, 4).bfloat16(), hooked, prepared)
    pack_linears(model)
    assert not any(isinstance(m, PackedLinear) for m in model)
