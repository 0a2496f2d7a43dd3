"""What the arguments of a kernel must look like, and what is said when they do not.

A kernel trusts its arguments: a wrong stride or device there is silent nonsense or a crashed GPU.
These checks cost some microseconds a layer, nothing in a captured graph, and no device access.
"""

import math

import attrs
import torch

from kvpage.kernels.work import AttentionBatch

_QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

KVScales = tuple[torch.Tensor, torch.Tensor]


@attrs.frozen(eq=False)
class AttentionCall:
    """The arguments of `paged_attention` that are the same for any backend, described there."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    batch: AttentionBatch
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    kv_scales: KVScales | None = None

    @property
    def num_heads(self) -> int:
        """Hq, the query heads."""
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Hkv, the heads of the pools."""
        return self.k_pool.shape[1]

    @property
    def head_dim(self) -> int:
        """D, of Q and K."""
        return self.k_pool.shape[2]

    @property
    def value_dim(self) -> int:
        """Dv, of V and the output."""
        return self.v_pool.shape[2]

    @property
    def group_size(self) -> int:
        """G, the query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


def check_call(call: AttentionCall) -> None:
    """Refuse a call that the kernel would misread.

    Raises:
        ValueError: with the argument, what it is, and what it has to be.
    """
    check_pools(call.k_pool, call.v_pool, call.kv_scales)
    _check_queries(call)
    if call.window < 0 or call.softcap < 0:
        raise ValueError(
            f"window and softcap must not be negative, got {call.window} and {call.softcap}"
        )
    check_vector("sinks", call.sinks, call.num_heads, call.q.device)
    check_vector("alibi_slopes", call.alibi_slopes, call.num_heads, call.q.device)


def check_output(call: AttentionCall, out: torch.Tensor) -> None:
    """Refuse an output that does not fit the call.

    Raises:
        ValueError: its shape, type, device or layout is another than the result's.
    """
    shape = (call.q.shape[0], call.num_heads, call.value_dim)
    if out.shape != shape or out.dtype != call.q.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be a contiguous {call.q.dtype} tensor of shape {shape}, got {describe(out)}"
        )
    _check_device("out", out, call.q.device)


def check_pools(k_pool: torch.Tensor, v_pool: torch.Tensor, kv_scales: KVScales | None) -> None:
    """Refuse pools that do not belong together.

    Raises:
        ValueError: they differ in slots, heads, type or device, or scales lack or are too many.
    """
    if k_pool.ndim != 3 or v_pool.ndim != 3 or k_pool.shape[:2] != v_pool.shape[:2]:
        raise ValueError(
            "k_pool and v_pool must be [num_slots, Hkv, D] and [num_slots, Hkv, Dv], "
            f"got {describe(k_pool)} and {describe(v_pool)}"
        )
    if k_pool.dtype != v_pool.dtype:
        raise ValueError(f"k_pool is {k_pool.dtype} and v_pool is {v_pool.dtype}: use one type")
    _check_last_dim("k_pool", k_pool)
    _check_last_dim("v_pool", v_pool)
    _check_device("v_pool", v_pool, k_pool.device)
    if kv_scales is None:
        if k_pool.dtype == torch.int8:
            raise ValueError("int8 pools need kv_scales: a K or V is rarely a whole number")
        return
    if k_pool.dtype.itemsize > 1:
        raise ValueError(f"kv_scales are for int8 and fp8 pools, got {k_pool.dtype} pools")
    check_vector("k_scales", kv_scales[0], k_pool.shape[1], k_pool.device)
    check_vector("v_scales", kv_scales[1], k_pool.shape[1], k_pool.device)


def check_new_tokens(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> None:
    """Refuse new K and V that do not fit the pools.

    Raises:
        ValueError: their shapes, layout or devices are not those of tokens of the pools.
    """
    for name, new, pool in (("k", k, k_pool), ("v", v, v_pool)):
        if new.ndim != 3 or new.shape[1:] != pool.shape[1:]:
            raise ValueError(
                f"{name} must be [T, {pool.shape[1]}, {pool.shape[2]}] as its pool, "
                f"got {describe(new)}"
            )
        _check_last_dim(name, new)
        _check_device(name, new, pool.device)
    if len(k) != len(v) or k.dtype != v.dtype:
        raise ValueError(
            f"k and v must be of the same tokens and type, got {describe(k)} and {describe(v)}"
        )


def check_vector(name: str, vector: torch.Tensor | None, length: int, device: torch.device) -> None:
    """Refuse a vector, where there is one, of another length, layout or device.

    Raises:
        ValueError: with what it is and what it has to be.
    """
    if vector is None:
        return
    if vector.shape != (length,) or not vector.is_contiguous():
        raise ValueError(f"{name} must be contiguous of shape [{length}], got {describe(vector)}")
    _check_device(name, vector, device)


def stride_alignment(name: str, tensor: torch.Tensor) -> int:
    """What the first two strides are multiples of, in elements: up to 16, from the last dim alone.

    Raises:
        ValueError: they are not, so vectors of this length would not be aligned.
    """
    align = math.gcd(16, tensor.shape[2])
    if tensor.stride(0) % align or tensor.stride(1) % align:
        raise ValueError(
            f"the strides of {name} must be multiples of {align}, got {describe(tensor)}"
        )
    return align


def padded_dim(head_dim: int) -> int:
    """The block a kernel works on: matrix products want powers of two, of at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def describe(tensor: torch.Tensor) -> str:
    """Type, shape and strides in a few words."""
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"


def _check_queries(call: AttentionCall) -> None:
    q, k_pool = call.q, call.k_pool
    if q.dtype not in _QUERY_DTYPES:
        raise ValueError(f"q must be float32, float16 or bfloat16, got {q.dtype}")
    if k_pool.dtype not in (q.dtype, torch.int8, *_FP8_DTYPES):
        raise ValueError(f"pools must be {q.dtype} as q, int8 or fp8, got {k_pool.dtype}")
    if q.ndim != 3 or q.shape[2] != k_pool.shape[2] or q.shape[1] % k_pool.shape[1]:
        raise ValueError(
            f"q must be [T, a multiple of {k_pool.shape[1]} heads, {k_pool.shape[2]}], "
            f"got {describe(q)}"
        )
    _check_last_dim("q", q)
    _check_device("q", q, k_pool.device)
    if len(q) != call.batch.num_tokens:
        raise ValueError(f"q has {len(q)} tokens and the batch {call.batch.num_tokens}")


def _check_last_dim(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(f"the last dim of {name} must be contiguous, got {describe(tensor)}")


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and its peers on {device}")
