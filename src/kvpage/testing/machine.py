"""The hypothesis state machine behind `check_allocator`: any history that the contract allows."""

from collections.abc import Callable
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpage.allocators.base import Allocator
from kvpage.blocks import BlockId, PoolGeometry, SequenceId
from kvpage.testing.shadow import ShadowPool


def machine_for(factory: Callable[[PoolGeometry], Allocator]) -> "type[ContractMachine]":
    """The state machine for the allocators that `factory` makes."""

    class History(ContractMachine):
        def __init__(self) -> None:
            super().__init__(factory)

    return History


class ContractMachine(RuleBasedStateMachine):
    """Calls an allocator as a block manager might, in any order, through a `ShadowPool`.

    Pools are small, so that they are exhausted often, and mostly of sizes that are no power of two.
    """

    def __init__(self, factory: Callable[[PoolGeometry], Allocator]) -> None:
        super().__init__()
        self._factory = factory
        self._next = 0
        self._pool: ShadowPool

    @initialize(
        num_blocks=st.integers(1, 20) | st.integers(21, 160),
        block_size=st.sampled_from((1, 3, 8, 16)),
        max_model_blocks=st.integers(1, 80),
    )
    def build(self, num_blocks: int, block_size: int, max_model_blocks: int) -> None:
        """A new pool; `max_model_len` may be far below or above what fits it."""
        geometry = PoolGeometry(num_blocks, block_size, max_model_blocks * block_size)
        self._pool = ShadowPool(self._factory, geometry)

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        """Start a sequence. An id that was refused is used again."""
        longest = self._pool.geometry.max_model_len
        max_tokens = data.draw(st.just(longest) | st.integers(1, longest), "max_tokens")
        num_tokens = data.draw(st.integers(1, max_tokens), "num_tokens")
        shared = self._draw_shared(data, num_tokens)
        seq = SequenceId(self._next)
        if self._pool.admit(seq, num_tokens, max_tokens=max_tokens, shared=shared):
            self._next += 1

    @precondition(lambda self: self._pool.live)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """Grow a sequence by any number of tokens, none included."""
        seq = self._draw_live(data)
        live = self._pool.live[seq]
        self._pool.extend(seq, data.draw(st.integers(live.num_tokens, live.max_tokens), "tokens"))

    @precondition(lambda self: self._pool.live)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """Grow all sequences side by side for some steps, each until there is no more room."""
        stride = data.draw(st.sampled_from((1, self._pool.geometry.block_size)), "tokens a step")
        growing = list(self._pool.live)
        for _ in range(data.draw(st.integers(1, 32), "steps")):
            growing = [seq for seq in growing if self._grow(seq, stride)]

    @precondition(lambda self: self._pool.live and self._pool.sharing)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Start a sequence that shares all full blocks of a live one and differs from there."""
        parent = self._pool.live[self._draw_live(data)]
        full = (parent.num_tokens - 1) // self._pool.geometry.block_size
        if parent.num_behind:
            return
        shared = parent.held[:full]
        seq = SequenceId(self._next)
        if self._pool.admit(seq, parent.num_tokens, max_tokens=parent.max_tokens, shared=shared):
            self._next += 1

    @precondition(lambda self: self._pool.live and self._pool.sharing)
    @rule(data=st.data(), order=st.integers(0, 2**16))
    def slide(self, data: st.DataObject, order: int) -> None:
        """Leave some full blocks of a live sequence behind, which a window does; cache some."""
        seq = self._draw_live(data)
        live = self._pool.live[seq]
        full = (live.num_tokens - 1) // self._pool.geometry.block_size
        num_blocks = data.draw(st.integers(live.num_behind, max(full, live.num_behind)), "behind")
        behind = live.held[: num_blocks - live.num_behind]
        keep = behind[: data.draw(st.integers(0, len(behind)), "cached")]
        self._pool.slide(seq, num_blocks, Random(order).shuffle, keep)

    @precondition(lambda self: self._pool.live)
    @rule(data=st.data(), order=st.integers(0, 2**16))
    def finish(self, data: st.DataObject, order: int) -> None:
        """End a sequence: finished, cancelled, preempted, with some leading blocks cached."""
        seq = self._draw_live(data)
        live = self._pool.live[seq]
        full = live.num_tokens // self._pool.geometry.block_size
        full = max(0, full - live.num_behind)
        keep = live.held[: data.draw(st.integers(0, full), "cached")]
        self._pool.finish(seq, Random(order).shuffle, keep)

    @precondition(lambda self: self._pool.cached)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Free any of the blocks that outlived their sequences."""
        cached = st.sampled_from(self._pool.cached)
        self._pool.evict(data.draw(st.lists(cached, min_size=1, unique=True), "evicted"))

    @precondition(lambda self: self._pool.live and self._pool.trimmable)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        """Ask for the unused tail of a sequence, after it gave up some tokens or none."""
        seq = self._draw_live(data)
        live = self._pool.live[seq]
        fewest = min(live.num_tokens, self._pool.shared_tokens(seq) + 1)
        self._pool.trim(seq, data.draw(st.integers(fewest, live.num_tokens), "tokens"))

    def teardown(self) -> None:
        """Nothing may have been lost on the way."""
        if hasattr(self, "_pool") and self._pool.sound:
            self._pool.drain()

    def _grow(self, seq: SequenceId, num_tokens: int) -> bool:
        """Make room for so many tokens more; False if `seq` may not or cannot have them."""
        live = self._pool.live[seq]
        wanted = live.num_tokens + num_tokens
        return wanted <= live.max_tokens and self._pool.extend(seq, wanted)

    def _draw_live(self, data: st.DataObject) -> SequenceId:
        return data.draw(st.sampled_from(sorted(self._pool.live)), "sequence")

    def _draw_shared(self, data: st.DataObject, num_tokens: int) -> list[BlockId]:
        """Leading blocks that a new sequence finds in the prefix cache."""
        if not self._pool.sharing:
            return []
        cached = self._pool.cached
        most = min(len(cached), (num_tokens - 1) // self._pool.geometry.block_size)
        return cached[: data.draw(st.integers(0, most), "shared blocks")]
