"""K and V in one byte: which types, which scales, what error.

A pool of a one-byte type stores `x / scale`, rounded and clamped, with one scale for each KV head
and for each of K and V. int8 has 127 equal steps a side: its error is at most half a scale for
all that is not clamped. fp8 rounds relatively: e4m3 has 3 bits of mantissa, so at most 1/16 of a
value, e5m2 has 2, so at most 1/8.
"""

import torch

INT8_MAX = 127.0
_FP8_E4M3_SINCE = (8, 9)


def largest(dtype: torch.dtype) -> float:
    """The largest number that a one-byte type is asked to hold."""
    return INT8_MAX if dtype == torch.int8 else torch.finfo(dtype).max


def quantised(x: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None) -> torch.Tensor:
    """`x` as a pool of this type stores it.

    Args:
        x: `[T, Hkv, D]`.
        dtype: of the pool.
        scales: `[Hkv]`, or none for scales of one.
    """
    if scales is not None:
        x = x.float() / scales.float()[:, None]
    if dtype.itemsize > 1:
        return x.to(dtype)
    if dtype == torch.int8:
        # Half up rather than to even: one instruction less on a GPU, the same error bound.
        x = torch.floor(x.float() + 0.5)
    # A cast alone would wrap around, or turn what is too large into NaN.
    limit = largest(dtype)
    return x.float().clamp(-limit, limit).to(dtype)


def scales_for(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`float32[Hkv]`: the smallest scales that clamp nothing of `x`.

    Args:
        x: `[T, Hkv, D]`, K or V of representative tokens.
        dtype: of the pool.
    """
    return x.float().abs().amax(dim=(0, 2)).clamp(min=torch.finfo(torch.float32).tiny) / largest(
        dtype
    )


def fp8_dtype(device: torch.device) -> torch.dtype:
    """The more precise of the fp8 types that Triton compiles for this device.

    Triton has e4m3 for NVIDIA GPUs from compute capability 8.9 and for AMD GPUs; e5m2 elsewhere.
    """
    on_older_nvidia = (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < _FP8_E4M3_SINCE
    )
    return torch.float8_e5m2 if on_older_nvidia else torch.float8_e4m3fn
