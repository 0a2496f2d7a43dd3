"""The contract between the block manager and an allocator strategy.

An allocator chooses *places*. It never sees tokens, K, V or the model: it is synchronous,
deterministic Python over integers. The block manager owns the truth (reference counts, owners,
block tables) and checks every answer.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from kvpage.blocks import AllocatorStatistics, BlockId, Extent, PoolGeometry, SequenceId


@attrs.frozen
class Grant:
    """What an allocator gives a sequence.

    Attributes:
        extents: blocks to append to the sequence's block table, in order.
        moves: pairs `(from, to)` for strategies that compact. The block manager puts `to` in the
            sequence's table in place of `from`; K and V are copied before the step computes;
            `from` comes back through `free` once nobody holds it. `to` is a free block that is in
            no extent of the grant. Sequences that share `from` keep it.
    """

    extents: tuple[Extent, ...] = ()
    moves: tuple[tuple[BlockId, BlockId], ...] = ()


NOTHING = Grant()
"""The grant of an `extend` that finds enough room already there."""


@runtime_checkable
class Allocator(Protocol):
    """Chooses the places of blocks. See `docs/how-to/write-an-allocator.md`.

    Every method is atomic: it raises `OutOfBlocks` with nothing changed, or succeeds as a whole.
    Any other exception is a fault of the plugin; it fails the one request it was called for.
    """

    @property
    def sharing(self) -> bool:
        """Do blocks come and go one by one?

        If so, a block may be held by several sequences, outlive the sequence that it was granted
        to, and come back while that one lives, when a sliding window has left it behind. If not, a
        sequence keeps all that it was granted until it is over.
        """
        ...

    def admit(
        self, seq: SequenceId, num_tokens: int, *, max_tokens: int, shared_tokens: int = 0
    ) -> Grant:
        """Start sequence `seq` and make room for its first tokens.

        Args:
            seq: an id that is not live.
            num_tokens: tokens that need room now, at least 1.
            max_tokens: the sequence never grows beyond this, `>= num_tokens`.
            shared_tokens: the first so many tokens (a multiple of `block_size`, below
                `num_tokens`) have blocks already, or need none any more; grant room for the rest
                only. 0 unless `sharing`.

        Raises:
            OutOfBlocks: not now; `seq` is not live.
        """
        ...

    def extend(self, seq: SequenceId, num_tokens: int) -> Grant:
        """Make room so that `num_tokens` tokens fit in all; may grant nothing, may grant more.

        Raises:
            OutOfBlocks: not now; `seq` keeps what it has.
        """
        ...

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Take back blocks that nobody holds any more: any subset of grants, in any order.

        Where the strategy shares, these may be early blocks of a sequence that lives on.
        """
        ...

    def finish(self, seq: SequenceId) -> None:
        """Forget `seq`: finished, cancelled or preempted. Comes after its last `free`.

        Where the strategy shares, blocks granted to `seq` may come back through `free` later still.
        """
        ...

    def statistics(self) -> AllocatorStatistics:
        """A snapshot of the free space."""
        ...


@runtime_checkable
class Trimmable(Protocol):
    """An allocator that can give back the unused tail of a live sequence under pressure."""

    def trim(self, seq: SequenceId, num_tokens: int) -> Sequence[BlockId]:
        """Give back blocks of `seq` beyond the first `num_tokens` tokens.

        Returns:
            The blocks given back: a suffix of the sequence's table. They are free at once; `free`
            is not called for them.
        """
        ...


@runtime_checkable
class Slidable(Protocol):
    """An allocator that wants to know what a sliding window has left behind.

    Only one that moves blocks does: it must not move what the sequence holds no longer.
    """

    def slide(self, seq: SequenceId, num_tokens: int) -> None:
        """The first `num_tokens` tokens of `seq`, a multiple of `block_size`, are never read again.

        Comes before their blocks come back through `free`: each when nobody holds it any more,
        which may be much later.
        """
        ...


AllocatorFactory = Callable[..., Allocator]
"""Called as `factory(geometry, **options)`; unknown options are refused by the plugin door."""


def _plugin_name(_instance: object, _attribute: "attrs.Attribute[str]", value: str) -> None:
    if not isinstance(value, str) or not value.replace("-", "_").isidentifier():
        raise ValueError(
            f"an allocator name is a word of letters, digits, '-' and '_', got {value!r}"
        )


def _is_callable(_instance: object, _attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if not callable(value):
        raise TypeError(f"factory must be callable as factory(geometry, **options), got {value!r}")


def _one_line(_instance: object, _attribute: "attrs.Attribute[str]", value: str) -> None:
    if not isinstance(value, str) or not value.strip() or "\n" in value:
        raise ValueError(f"summary must be one line of text, got {value!r}")


@attrs.frozen
class AllocatorPlugin:
    """What a plugin's `kvpage_allocators` hook returns, one record a strategy.

    Attributes:
        name: the name users write in `allocator="name"`.
        factory: `factory(geometry, **options)` gives a new `Allocator`. Its keyword parameters are
            the options of `"name:key=value"`.
        summary: one line for listings.
    """

    name: str = attrs.field(validator=_plugin_name)
    factory: AllocatorFactory = attrs.field(validator=_is_callable)
    summary: str = attrs.field(validator=_one_line)

    def build(self, geometry: PoolGeometry, **options: Any) -> Allocator:
        """A new allocator over the pool `geometry`, with the strategy's own options."""
        return self.factory(geometry, **options)
