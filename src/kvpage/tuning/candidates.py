"""What can be tuned: settings of an engine, and the values to try for each."""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import attrs

from kvpage.errors import ConfigError
from kvpage.plugins import AllocatorSpec

_MIB = 2**20


@attrs.frozen(order=True)
class Candidate:
    """Settings of an engine.

    Attributes:
        allocator: a strategy's name, or `"name:key=value,..."`.
        block_size: tokens per block.
        kv_bytes: memory for K and V.
        max_num_seqs: sequences that run at once.
        max_batch_tokens: tokens that one step computes at most.
    """

    allocator: str
    block_size: int
    kv_bytes: int
    max_num_seqs: int
    max_batch_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.allocator}/{self.block_size}, {memory_text(self.kv_bytes)}, "
            f"{self.max_num_seqs} sequences, {self.max_batch_tokens} tokens a step"
        )

    def num_slots(self, bytes_per_token: int) -> int:
        """Token slots in whole blocks."""
        return self.kv_bytes // (bytes_per_token * self.block_size) * self.block_size

    def settings(self) -> dict[str, Any]:
        """The arguments of `AsyncEngine.from_pretrained`."""
        return {
            "allocator": self.allocator,
            "block_size": self.block_size,
            "kv_memory": memory_text(self.kv_bytes),
            "max_num_seqs": self.max_num_seqs,
            "max_batch_tokens": self.max_batch_tokens,
        }


def memory_text(num_bytes: int) -> str:
    """Bytes as `kv_memory` reads them: `"512MiB"` where that is exact."""
    return f"{num_bytes // _MIB}MiB" if num_bytes % _MIB == 0 else f"{num_bytes}B"


def _several(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(values)


def _values(_instance: object, attribute: "attrs.Attribute[Any]", value: tuple[Any, ...]) -> None:
    if not value or len(set(value)) < len(value):
        raise ConfigError(f"{attribute.name} needs different values to try, got {list(value)}")


def _sizes(instance: object, attribute: "attrs.Attribute[Any]", value: tuple[Any, ...]) -> None:
    _values(instance, attribute, value)
    for number in value:
        if type(number) is not int or number < 1:
            raise ConfigError(
                f"{attribute.name} must be whole numbers of at least 1, got {number!r}"
            )


@attrs.frozen(kw_only=True)
class SearchSpace:
    """The values to try. Every combination is a candidate.

    Attributes:
        allocators: strategies, each a name or `"name:key=value,..."` without `block_size`.
        block_sizes: tokens per block.
        memory_shares: of the memory that there is for K and V, above 0 and at most 1.
        max_num_seqs: sequences that run at once.
        max_batch_tokens: tokens that one step computes at most.
    """

    allocators: tuple[str, ...] = attrs.field(
        default=("fixed", "dynamic", "contiguous"), converter=_several, validator=_values
    )
    block_sizes: tuple[int, ...] = attrs.field(
        default=(8, 16, 32, 64), converter=_several, validator=_sizes
    )
    memory_shares: tuple[float, ...] = attrs.field(
        default=(0.125, 0.25, 0.5, 1.0), converter=_several, validator=_values
    )
    max_num_seqs: tuple[int, ...] = attrs.field(
        default=(8, 16, 32, 64, 128, 256), converter=_several, validator=_sizes
    )
    max_batch_tokens: tuple[int, ...] = attrs.field(
        default=(128, 256, 512, 1024, 2048), converter=_several, validator=_sizes
    )

    def __attrs_post_init__(self) -> None:
        for allocator in self.allocators:
            if AllocatorSpec.parse(allocator).block_size is not None:
                raise ConfigError(f"{allocator!r} names a block size; give it as a block size")
        for share in self.memory_shares:
            if not 0 < share <= 1:
                raise ConfigError(f"a share of the memory is above 0 and at most 1, got {share}")

    def memory_bytes(self, budget_bytes: int) -> tuple[int, ...]:
        """The values of `kv_bytes`: shares of the budget in whole MiB where there are that many."""
        shares = (int(budget_bytes * share) for share in self.memory_shares)
        return tuple(dict.fromkeys(b - b % _MIB if b >= _MIB else max(1, b) for b in shares))

    def axes(self, budget_bytes: int) -> dict[str, tuple[Any, ...]]:
        """The values of each attribute of a `Candidate`, in order of preference where two tie."""
        return {
            "allocator": self.allocators,
            "block_size": self.block_sizes,
            "kv_bytes": tuple(sorted(self.memory_bytes(budget_bytes))),
            "max_num_seqs": tuple(sorted(self.max_num_seqs)),
            "max_batch_tokens": tuple(sorted(self.max_batch_tokens)),
        }

    def candidates(self, budget_bytes: int) -> Iterator[Candidate]:
        """Every combination."""
        axes = self.axes(budget_bytes)
        for values in product(*axes.values()):
            yield Candidate(**dict(zip(axes, values, strict=True)))
