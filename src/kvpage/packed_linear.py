"""Linear layers in the layout that the matrix library multiplies fastest, on a CPU.

torch multiplies by weights as they lie in memory. oneDNN can be given them in blocks of its own
order instead, and then needs no reordering at each call, which at the few rows of a decode step is
most of the work. Whether that pays depends on the processor, so it is measured when a model is
loaded. The original weights are given up; only an embedding that shares them with the output layer
keeps its own.
"""

import math
import time
from typing import Any, TypeAlias, TypeGuard

import torch

from kvpage.kernels import cpu_rows
from kvpage.kernels.cpu_product import Panels, Room

PACKED_FOR_ROWS = 64
"""The layout is chosen for so many rows; measured from 1 to 512, it serves all of them best."""

TRIED_ROWS = (1, 4, 16, 64)
TRIED_WEIGHTS = 2**23
TRIALS = 3


class PanelLinear(torch.nn.Module):
    """What `torch.nn.Linear` does, in float32, from panels that our own kernel multiplies.

    Args:
        linear: its bias is copied, and its weights are.
        room: where to; None makes room for this layer alone.
        rounded: weights in its stead: `int8[out_features, in_features]`, and the scales
            `float32[out_features]` that they are to be multiplied with.
    """

    def __init__(
        self,
        linear: torch.nn.Linear,
        room: Room | None = None,
        rounded: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        bias = None if linear.bias is None else linear.bias.detach()
        weight, scales = rounded or (linear.weight.detach(), None)
        room = room or Room([(self.out_features, self.in_features)], weight.dtype)
        self.panels = Panels.of(weight, bias, room, scales)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        product = cpu_rows.product(inputs.reshape(-1, self.in_features), self.panels)
        return product.view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Like that of `torch.nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedLinear(torch.nn.Module):
    """What `torch.nn.Linear` does, in float32, from packed weights.

    Args:
        linear: its weights are copied, its bias is shared.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # Opaque to torch's own operators, so it is neither a parameter nor a buffer.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach(), PACKED_FOR_ROWS
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs.contiguous(), self._packed, self.bias, "none", [], ""
        )
        return product

    def extra_repr(self) -> str:
        """Like that of `torch.nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


Form: TypeAlias = type[PanelLinear] | type[PackedLinear]


def pack_linears(model: torch.nn.Module) -> None:
    """Replace the linear layers of `model`, if packing pays on this machine.

    One by one, so that no more than one of them is held twice.

    Args:
        model: changed; a layer that is not plain is left alone.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_plain(child)
    ]
    layers = [getattr(parent, name) for parent, name in places]
    form = fastest_form(max(layers, key=_num_weights)) if places else None
    if form is None:
        return
    room = Room((each.out_features, each.in_features) for each in layers)
    del layers
    for parent, name in places:
        linear = getattr(parent, name)
        packed = PanelLinear(linear, room) if form is PanelLinear else form(linear)
        setattr(parent, name, packed)


def is_plain(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Whether a module is a linear layer in float32 on a CPU, and nothing more."""
    # A subclass, or a hook, may do more than the product.
    if type(module) is not torch.nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight: torch.Tensor = module.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32


@torch.inference_mode()
def fastest_form(linear: torch.nn.Linear) -> Form | None:
    """The form that is fastest over the row counts of decoding and chunks taken together.

    None is the layer as it is.
    """
    linear = _part_of(linear)
    forms: list[Form] = [PanelLinear]
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        forms.append(PackedLinear)
    costs: dict[Form | None, float] = {None: _cost(linear)}
    for form in forms:
        costs[form] = _cost(form(linear))
    return min(costs, key=lambda form: costs[form])


def _part_of(linear: torch.nn.Linear) -> torch.nn.Linear:
    """The layer, or so many of its outputs that trying them takes no time to speak of."""
    outputs = min(linear.out_features, max(1, TRIED_WEIGHTS // linear.in_features))
    part = torch.nn.Linear(linear.in_features, outputs, bias=False, device="meta")
    part.weight = torch.nn.Parameter(linear.weight.detach()[:outputs], requires_grad=False)
    return part


def _cost(layer: Any) -> float:
    """The mean of the logarithms of its times."""
    inputs = (torch.ones(rows, layer.in_features) for rows in TRIED_ROWS)
    return sum(math.log(_seconds(layer, each)) for each in inputs)


def _num_weights(linear: torch.nn.Linear) -> int:
    return linear.in_features * linear.out_features


def _seconds(layer: torch.nn.Module, inputs: torch.Tensor) -> float:
    """The best of a few calls, after one that warms up."""
    layer(inputs)
    best = math.inf
    for _ in range(TRIALS):
        started = time.perf_counter()
        layer(inputs)
        best = min(best, time.perf_counter() - started)
    return best
