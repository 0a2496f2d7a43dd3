"""Linear layers and embeddings with weights in one byte, on a CPU.

Weights have one scale for each output; inputs are rounded to one byte as they come, with one scale
for each row (dynamic quantisation, as in LLM.int8(), Dettmers et al., 2022, without its outliers
apart). Products of bytes are summed exactly; the scales are applied to the sums. What a row gives
depends on that row alone.
"""

from typing import Any

import torch

from kvpage.errors import ConfigError
from kvpage.kernels import cpu_rows
from kvpage.packed_linear import is_plain

_INT8_MAX = 127
_INSTRUCTIONS = ("avx512_vnni", "avx_vnni")


def check_int8(device: torch.device, dtype: torch.dtype | str) -> None:
    """Refuse weights in one byte where they would be slow or wrong.

    Without instructions for products of bytes, oneDNN adds pairs of them in 16 bits, which
    overflow.

    Raises:
        ConfigError: says what is missing.
    """
    if device.type != "cpu" or dtype not in ("float32", torch.float32):
        raise ConfigError(
            f"weights='int8' is for float32 models on a CPU, this is {dtype} on {device.type}; "
            "leave weights out"
        )
    features = torch.cpu.get_capabilities()
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or not any(features.get(name) for name in _INSTRUCTIONS):
        raise ConfigError(
            "weights='int8' needs torch with oneDNN and a CPU that multiplies bytes (AVX-512 VNNI "
            "or AVX-VNNI), and this machine has not both; leave weights out"
        )


class QuantisedLinear(torch.nn.Module):
    """What `torch.nn.Linear` does, approximately, from weights in one byte.

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
    linears = 0
    for parent, name in places:
        child = getattr(parent, name)
        if isinstance(child, torch.nn.Embedding):
            setattr(parent, name, QuantisedEmbedding(child))
        else:
            setattr(parent, name, QuantisedLinear(child))
            linears += 1
    if not linears:
        raise ConfigError(
            f"weights='int8' is for linear layers, and model type {model.config.model_type!r} has "
            "none that is plain; leave weights out"
        )


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`int8[N, K]` and `float32[N]`: rows of `weight` `[N, K]` as whole steps, and the steps."""
    scales = weight.abs().amax(dim=1) / _INT8_MAX
    steps = torch.where(scales > 0, 1 / scales, 0)
    return (weight * steps[:, None]).round_().to(torch.int8), scales
