"""Linear layers in the layout that the matrix library multiplies fastest, on a CPU.

torch multiplies by weights as they lie in memory. oneDNN can be given them in blocks of its own
order instead, and then needs no reordering at each call, which at the few rows of a decode step is
most of the work. Whether that pays depends on the processor, so it is measured when a model is
loaded. The original weights are given up; only an embedding that shares them with the output layer
keeps its own.
"""

import math
import time
from collections.abc import Callable, Iterator

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


def pack_linears(model: torch.nn.Module) -> Callable[[], None]:
    """Replace the linear layers of `model`, if packing pays on this machine.

    Args:
        model: changed; a layer that is a subclass of `Linear` or not in float32 is left alone.

    Returns:
        Puts the original layers back. They are given up when nothing holds this any more.
    """
    found = list(_packable(model))
    if not found or not packing_pays(max((linear for *_, linear in found), key=_num_weights)):
        return lambda: None
    for parent, name, linear in found:
        setattr(parent, name, PackedLinear(linear))

    def restore() -> None:
        for parent, name, linear in found:
            setattr(parent, name, linear)

    return restore


@torch.inference_mode()
def packing_pays(linear: torch.nn.Linear) -> bool:
    """Is the packed layer faster, over the row counts of decoding and chunks taken together?"""
    packed = PackedLinear(linear)
    gain = 0.0
    for rows in TRIED_ROWS:
        inputs = torch.ones(rows, linear.in_features)
        gain += math.log(_seconds(linear, inputs) / _seconds(packed, inputs))
    return gain > 0


def _packable(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """Parent, name and layer of everything that can be packed."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for parent in model.modules():
        for name, child in parent.named_children():
            # A subclass, or a hook, may do more than the product.
            if isinstance(child, torch.nn.Linear) and type(child) is torch.nn.Linear:
                weight = child.weight
                on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
                if on_cpu and not child._forward_hooks and not child._forward_pre_hooks:
                    yield parent, name, child


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
