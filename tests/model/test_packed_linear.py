"""Packed linear layers compute what plain ones do."""

import pytest
import torch

from kvpage.packed_linear import Form, PackedLinear, PanelLinear, fastest_form, pack_linears
from tests.model.tiny import tiny_model


@pytest.fixture(params=[PanelLinear, PackedLinear])
def form(request: pytest.FixtureRequest) -> Form:
    """Each way to pack."""
    if request.param is PackedLinear and not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("torch was built without oneDNN")
    chosen: Form = request.param
    return chosen


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 6, 7, 12, 15, 64, 200])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inputs", [1, 96, 700])
def test_the_product_is_that_of_float64(form: Form, rows: int, bias: bool, inputs: int) -> None:
    """Within float32 rounding, for any number of rows and any leading dims."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(inputs, 130, bias=bias)
    x = torch.randn(1, rows, inputs)
    with torch.inference_mode():
        actual = form(linear)(x)
        expected = linear.double()(x.double())
    assert actual.shape == (1, rows, 130)
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=5e-6)


def test_a_row_alone_and_among_others() -> None:
    """What panels give for a row depends on that row alone, to the last bit."""
    torch.manual_seed(0)
    layer = PanelLinear(torch.nn.Linear(700, 50))
    x = torch.randn(41, 700)
    together = layer(x)
    for first, last in ((0, 1), (5, 7), (20, 32), (9, 41)):
        assert torch.equal(together[first:last], layer(x[first:last]))


def test_strided_inputs_are_read_right(form: Form) -> None:
    """A transposed view, as attention gives."""
    linear = torch.nn.Linear(8, 5)
    inputs = torch.randn(8, 3).T
    with torch.inference_mode():
        torch.testing.assert_close(form(linear)(inputs), linear(inputs))


def test_the_fastest_form_is_one_of_them() -> None:
    """Which, depends on the processor."""
    assert fastest_form(torch.nn.Linear(64, 64)) in {None, PanelLinear, PackedLinear}


def test_every_plain_layer_is_replaced(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that packing pays for."""
    monkeypatch.setattr("kvpage.packed_linear.fastest_form", lambda _: form)
    model = tiny_model("llama")
    pack_linears(model)
    packed = [m for m in model.modules() if isinstance(m, form)]
    assert len(packed) == 2 * 7 + 1
    assert not any(type(m) is torch.nn.Linear for m in model.modules())


def test_nothing_is_packed_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is left as it is."""
    monkeypatch.setattr("kvpage.packed_linear.fastest_form", lambda _: None)
    model = tiny_model("llama")
    pack_linears(model)
    assert not any(isinstance(m, (PackedLinear, PanelLinear)) for m in model.modules())


def test_a_layer_that_does_more_is_left_alone(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subclasses, other types of weights, and layers with hooks."""

    class Adapted(torch.nn.Linear):
        pass

    monkeypatch.setattr("kvpage.packed_linear.fastest_form", lambda _: form)
    hooked = torch.nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    prepared = torch.nn.Linear(4, 4)
    prepared.register_forward_pre_hook(lambda *_: None)
    model = torch.nn.Sequential(Adapted(4, 4), torch.nn.Linear(4, 4).bfloat16(), hooked, prepared)
    pack_linears(model)
    assert not any(isinstance(m, (PackedLinear, PanelLinear)) for m in model)
