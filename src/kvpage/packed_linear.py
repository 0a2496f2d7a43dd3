"""Linear layers in the layout that the matrix library multiplies fastest, on a CPU.

torch multiplies by weights as they lie in memory. oneDNN can be given them in blocks of its own
order instead, and then needs no reordering at each call, which at the few rows of a decode step is
most of the work. Whether that pays depends on the processor, so it is measured when a model is
loaded. The original weights are given up; only an embedding that shares them with the output layer
keeps its own.
"""

import math
import time
from typing import TypeGuard

import torch

PACKED_FOR_ROWS = 64
"""The layout is chosen for so many rows; measured from 1 to 512, it serves all of them best."""

TRIED_ROWS = (1, 4, 16, 64)
TRIALS = 3


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
    layers = (getattr(parent, name) for parent, name in places)
    if places and packing_pays(max(layers, key=_num_weights)):
        for parent, name in places:
            setattr(parent, name, PackedLinear(getattr(parent, name)))


def is_plain(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Whether a module is a linear layer in float32 on a CPU, and nothing more."""
    # A subclass, or a hook, may do more than the product.
    if type(module) is not torch.nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight: torch.Tensor = module.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32


@torch.inference_mode()
def packing_pays(linear: torch.nn.Linear) -> bool:
    """Is the packed layer faster, over the row counts of decoding and chunks taken together?"""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    packed = PackedLinear(linear)
    gain = 0.0
    for rows in TRIED_ROWS:
        inputs = torch.ones(rows, linear.in_features)
        gain += math.log(_seconds(linear, inputs) / _seconds(packed, inputs))
    return gain > 0


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
