"""Linear layers and embeddings with weights in one byte, on a CPU.

Weights have one scale for each output. Where the processor multiplies bytes, inputs are rounded as
they come, with one scale for each row (dynamic quantisation, as in LLM.int8(), Dettmers et al.,
2022, without its outliers apart): products of bytes are summed exactly, and the scales are applied
to the sums. On other processors inputs stay as they are, and weights are widened on their way into
our own kernel. What a row gives depends on that row alone, both ways.
"""

from typing import Any

import torch

from kvpage.errors import ConfigError
from kvpage.kernels import cpu_rows
from kvpage.kernels.cpu_product import Room
from kvpage.packed_linear import PanelLinear, is_plain

_INT8_MAX = 127
_INSTRUCTIONS = ("avx512_vnni", "avx_vnni")


def check_int8(device: torch.device, dtype: torch.dtype | str) -> None:
    """Refuse weights in one byte where there is nothing that multiplies by them.

    Raises:
        ConfigError: says where there is.
    """
    if device.type != "cpu" or dtype not in ("float32", torch.float32):
        raise ConfigError(
            f"weights='int8' is for float32 models on a CPU, this is {dtype} on {device.type}; "
            "leave weights out"
        )


def multiplies_bytes() -> bool:
    """Whether this processor, and this torch, do: `QuantisedLinear` needs that.

    Without instructions for products of bytes, oneDNN adds pairs of them in 16 bits, which
    overflow.
    """
    features = torch.cpu.get_capabilities()
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and any(features.get(name) for name in _INSTRUCTIONS)


class QuantisedLinear(torch.nn.Module):
    """What `torch.nn.Linear` does, approximately, from weights and inputs in one byte.

    Args:
        linear: its weights are rounded and copied, its bias is shared.
    """

    scales: torch.Tensor
    zero_points: torch.Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        rounded, scales = _rounded(linear.weight.detach())
        self.register_buffer("scales", scales)
        self.register_buffer("zero_points", torch.zeros(len(scales), dtype=torch.int32))
        # Opaque to torch's own operators, so it is neither a parameter nor a buffer.
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        rows, row_scales = cpu_rows.quantise(inputs.reshape(-1, self.in_features))
        # Unsigned inputs: with signed ones oneDNN falls back to loops a hundred times slower
        # wherever there is no AMX.
        product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, cpu_rows.ZERO_POINT, self._packed, self.scales, self.zero_points, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        product.mul_(row_scales[:, None])
        if self.bias is not None:
            product.add_(self.bias)
        return product.view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Like that of `torch.nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class QuantisedEmbedding(torch.nn.Module):
    """What `torch.nn.Embedding` does, approximately, from weights in one byte.

    Args:
        embedding: its weights are rounded and copied, one scale for each token.
    """

    rounded: torch.Tensor
    scales: torch.Tensor

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        super().__init__()
        rounded, scales = _rounded(embedding.weight.detach())
        self.register_buffer("rounded", rounded)
        self.register_buffer("scales", scales)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`int64[...]` to `float32[..., hidden]`."""
        return self.rounded[token_ids] * self.scales[token_ids][..., None]


def quantise_weights(model: Any) -> None:
    """Replace the plain linear layers of a transformers model and its embedding of tokens.

    One by one, so that no more than one of them is held twice.

    Args:
        model: changed.

    Raises:
        ConfigError: it has no plain linear layer.
    """
    embedding = model.get_input_embeddings()
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_plain(child) or (child is embedding and type(child) is torch.nn.Embedding)
    ]
    layers = (getattr(parent, name) for parent, name in places)
    shapes = [(each.out_features, each.in_features) for each in layers if is_plain(each)]
    room = None if multiplies_bytes() else Room(shapes, torch.int8)
    for parent, name in places:
        child = getattr(parent, name)
        setattr(parent, name, _quantised(child, room))
    if not shapes:
        raise ConfigError(
            f"weights='int8' is for linear layers, and model type {model.config.model_type!r} has "
            "none that is plain; leave weights out"
        )


def _quantised(child: torch.nn.Module, room: Room | None) -> torch.nn.Module:
    if isinstance(child, torch.nn.Embedding):
        return QuantisedEmbedding(child)
    assert isinstance(child, torch.nn.Linear)
    if room is None:
        return QuantisedLinear(child)
    return PanelLinear(child, room, _rounded(child.weight.detach()))


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`int8[N, K]` and `float32[N]`: rows of `weight` `[N, K]` as whole steps, and the steps."""
    scales = weight.abs().amax(dim=1) / _INT8_MAX
    steps = torch.where(scales > 0, 1 / scales, 0)
    return (weight * steps[:, None]).round_().to(torch.int8), scales
