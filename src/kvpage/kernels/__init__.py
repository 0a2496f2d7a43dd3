"""Attention over a paged KV cache: three implementations behind one signature.

`triton` serves GPUs, `numba` serves CPUs, `reference` is plain torch and the oracle of both. All
of them read the same pools through the same block tables. Importing this package imports none of
the libraries behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

import attrs

if TYPE_CHECKING:
    import torch

    from kvpage.kernels.work import AttentionBatch

BackendName: TypeAlias = Literal["triton", "numba", "reference"]


@attrs.frozen
class AttentionOptions:
    """What a layer asks of attention beside Q, K and V; see `reference.paged_attention`."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class PagedAttention(Protocol):
    """Causal attention of a step's queries over pools; see `reference.paged_attention`."""

    def __call__(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, and return `[T, Hq, Dv]`."""


class WriteKV(Protocol):
    """Store the K and V of a step's tokens; see `reference.write_kv`."""

    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
        *,
        kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Write in place, skipping tokens whose slot is -1."""


class CopyBlocks(Protocol):
    """Copy whole blocks inside pools; see `reference.copy_blocks`."""

    def __call__(
        self,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        copies: torch.Tensor,
        *,
        block_size: int,
    ) -> None:
        """Copy in place, all sources as they were before the first copy."""


@attrs.frozen
class AttentionBackend:
    """The kernels that a model needs, from one implementation.

    Attributes:
        compute_layers: decoder layers and all; see `cpu.compute_layers`.
    """

    name: BackendName
    paged_attention: PagedAttention
    write_kv: WriteKV
    copy_blocks: CopyBlocks
    compute_layers: Callable[..., torch.Tensor | None] | None = None


def attention_backend(name: BackendName) -> AttentionBackend:
    """Import one implementation.

    Raises:
        ValueError: there is none of this name.
        ImportError: its library is not installed.
    """
    if name == "reference":
        from kvpage.kernels import reference

        return AttentionBackend(
            name, reference.paged_attention, reference.write_kv, reference.copy_blocks
        )
    if name == "numba":
        from kvpage.kernels import cpu

        return AttentionBackend(
            name, cpu.paged_attention, cpu.write_kv, cpu.copy_blocks, cpu.compute_layers
        )
    if name == "triton":
        from kvpage.kernels import cache_write, paged_attention

        return AttentionBackend(
            name,
            paged_attention.paged_attention,
            cache_write.write_kv,
            cache_write.copy_blocks,
        )
    known = ", ".join(get_args(BackendName))
    raise ValueError(f"no attention backend is called {name!r}; there are {known}")


def default_backend(device_type: str) -> BackendName:
    """The fastest implementation for `torch.device.type`; AMD GPUs are `cuda` to torch as well."""
    if device_type == "cuda":
        return "triton"
    return "numba" if device_type == "cpu" else "reference"
