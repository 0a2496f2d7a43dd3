"""The ledger of blocks: who holds what, checked at every answer of an allocator.

The block manager is the only caller of an allocator and the only owner of truth. An allocator
chooses places; the block manager counts references, keeps block tables, remembers blocks of
finished sequences for prefix reuse, and refuses an answer that breaks the contract before it
changes anything.

A block is in exactly one state::

    free    the allocator may grant it                     references == FREE (0)
    used    held by one sequence or more                   references >= 1
    cached  held by nobody, its K and V kept for reuse     references == CACHED (-1)

and `free + used + cached == num_blocks` after every operation.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.allocators.base import Allocator, Grant, Slidable, Trimmable
from kvpage.blocks import BlockId, Extent, PoolGeometry, PoolStatistics, SequenceId
from kvpage.errors import AllocatorFault, LedgerError, OutOfBlocks
from kvpage.latencies import BlockLifetimes
from kvpage.prefix import BlockKey
from kvpage.swap import NO_PAIRS

logger = logging.getLogger("kvpage")

FREE = 0
CACHED = -1

_Answer = TypeVar("_Answer")


@attrs.define(eq=False)
class _Holding:
    """The blocks of one live sequence, in table order.

    Attributes:
        row: its row of the table.
        blocks: what it holds.
        first: index in the table of the first of these; a window has left those before behind.
    """

    row: int
    blocks: list[BlockId]
    first: int = 0

    @property
    def end(self) -> int:
        """Entries of the table, those left behind included."""
        return self.first + len(self.blocks)


class BlockManager:
    """Block tables and reference counts of all live sequences.

    Attributes:
        geometry: the pool.
        tables: `int32[max_num_seqs, W]`: row `r` lists the blocks of the sequence that lives in
            row `r`; W covers `max_model_len`. Read-only for everyone else.
        capacity_tokens: `int64[max_num_seqs]`: tokens that the blocks of row `r` have room for,
            counted from the start of the sequence.
        first_blocks: `int64[max_num_seqs]`: index in row `r` of the first block that it holds; the
            entries before are -1.
        window: a token attends to itself and the `window - 1` tokens before it, in every layer;
            what is behind is given back. 0: to all, or the strategy does not share.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        allocator: Allocator,
        *,
        max_num_seqs: int,
        name: str = "custom",
        prefix_cache: bool = False,
        window: int = 0,
        lifetimes: BlockLifetimes | None = None,
    ) -> None:
        """Start with every block free.

        Args:
            geometry: the pool that `allocator` was built for.
            allocator: hands out places; nobody else may call it from now on.
            max_num_seqs: rows of the block table.
            name: the allocator's name, for messages.
            prefix_cache: keep full blocks of finished sequences for reuse; needs `sharing`.
            window: how many tokens every layer attends to, itself included; 0 for all.
            lifetimes: is told of every grant and return.
        """
        self.geometry = geometry
        self.tables: npt.NDArray[np.int32] = np.full(
            (max_num_seqs, geometry.blocks_for(geometry.max_model_len)), -1, np.int32
        )
        self.capacity_tokens: npt.NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.first_blocks: npt.NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.window = window if allocator.sharing else 0
        self.prefix_cache = prefix_cache and allocator.sharing
        self._allocator = allocator
        self._name = name
        self._lifetimes = lifetimes
        self._references = [FREE] * geometry.num_blocks
        self._holdings: dict[SequenceId, _Holding] = {}
        self._num_free = geometry.num_blocks
        self._keys: dict[BlockId, BlockKey] = {}
        self._published: dict[bytes, BlockId] = {}
        self._cached: dict[BlockId, None] = {}  # in order of release: the first is the oldest
        self._cached_flags = bytearray(geometry.num_blocks)  # the same, for a quick look
        self._copies: dict[BlockId, BlockId] = {}  # to -> from, until the next step takes them

    @property
    def sharing(self) -> bool:
        """May blocks be shared between sequences?"""
        return self._allocator.sharing

    @property
    def available_blocks(self) -> int:
        """Blocks that are free or would be after eviction of everything cached."""
        return self._num_free + len(self._cached)

    def blocks_of(self, seq: SequenceId) -> tuple[BlockId, ...]:
        """The blocks that `seq` holds, in table order, from `first_blocks` of its row on."""
        return tuple(self._holdings[seq].blocks)

    def table_of(self, seq: SequenceId) -> npt.NDArray[np.int32]:
        """`int32[n]`, the same as `blocks_of`, at the cost of copying some memory."""
        holding = self._holdings[seq]
        entries = self.tables[holding.row, holding.first : holding.end]
        if len(entries) == len(holding.blocks):
            return entries.copy()
        return np.array(holding.blocks, np.int32)  # it has blocks beyond `max_model_len`

    def contents_of(self, seq: SequenceId, num_tokens: int) -> tuple[BlockId, ...]:
        """Where the first `num_tokens` tokens of `seq` are until the next step makes its copies.

        Starts like `blocks_of`.
        """
        holding = self._holdings[seq]
        blocks = holding.blocks[: self.geometry.blocks_for(num_tokens) - holding.first]
        return tuple(self._copies.get(block, block) for block in blocks)

    @property
    def cached_flags(self) -> bytes:
        """For each block of the pool 1 if it is kept for reuse, else 0."""
        return bytes(self._cached_flags)

    def first_needed(self, num_computed: int) -> int:
        """Index in the table of the first block that tokens from `num_computed` on attend to."""
        if not self.window:
            return 0
        return max(0, num_computed - self.window + 1) // self.geometry.block_size

    def match(self, prefix: Sequence[BlockKey], num_tokens: int) -> list[BlockId]:
        """The cached blocks that a sequence of `num_tokens` tokens could start with.

        At least one of its tokens is left to be computed, to have logits.

        Args:
            prefix: keys of its leading full blocks.
            num_tokens: its length.
        """
        blocks: list[BlockId] = []
        for key in prefix[: (num_tokens - 1) // self.geometry.block_size]:
            block = self._published.get(key.digest)
            if block is None or self._keys[block] != key:
                break
            blocks.append(block)
        return blocks

    def num_taken(self, num_tokens: int, shared: Sequence[BlockId], num_computed: int) -> int:
        """How many `available_blocks` such an admission would take; arguments as for `admit`."""
        first = self.first_needed(max(num_computed, len(shared) * self.geometry.block_size))
        held = sum(self._references[block] > FREE for block in shared[first:])
        return self.geometry.blocks_for(num_tokens) - first - held

    def admit(
        self,
        seq: SequenceId,
        row: int,
        num_tokens: int,
        *,
        max_tokens: int,
        shared: Sequence[BlockId] = (),
        num_computed: int = 0,
    ) -> None:
        """Start `seq` in table row `row` with room for `num_tokens` tokens.

        Blocks that its next token does not attend to any more are neither granted nor shared.

        Args:
            seq: an id that is not live.
            row: a free row of `tables`.
            num_tokens: tokens that need room now.
            max_tokens: the sequence never grows beyond this.
            shared: what `match` has just found for it.
            num_computed: tokens that will have K and V without being computed: from swap space.

        Raises:
            OutOfBlocks: not now; nothing has changed.
            AllocatorFault: the allocator raised or its answer breaks the contract.
        """
        first = self.first_needed(max(num_computed, len(shared) * self.geometry.block_size))
        self._start(seq, _Holding(row, list(shared[first:]), first), num_tokens, max_tokens)

    def fork(
        self, parent: SequenceId, seq: SequenceId, row: int, num_tokens: int, *, max_tokens: int
    ) -> int:
        """Start `seq` with the first `num_tokens` tokens of `parent`, which it continues by itself.

        Full blocks are shared. The block of the last token is written by both, so `seq` gets a copy
        of it before the next step (copy-on-write, done at once since the write is certain).

        Args:
            parent: a live sequence that begins with these tokens, all but the last computed, and
                that still holds what the last attends to.
            seq: an id that is not live.
            row: a free row of `tables`.
            num_tokens: tokens that need room now.
            max_tokens: the sequence never grows beyond this.

        Returns:
            How many tokens have K and V already: all but the last, whose logits are needed.

        Raises:
            OutOfBlocks: not now; nothing has changed.
            AllocatorFault: the allocator raised or its answer breaks the contract.
        """
        num_shared, partly = divmod(num_tokens - 1, self.geometry.block_size)
        of_parent, first = self._holdings[parent], self.first_needed(num_tokens - 1)
        shared = of_parent.blocks[first - of_parent.first : num_shared - of_parent.first]
        holding = _Holding(row, shared, first)
        self._start(seq, holding, num_tokens, max_tokens)
        if partly:
            source = of_parent.blocks[num_shared - of_parent.first]
            self._copies[holding.blocks[num_shared - first]] = self._copies.get(source, source)
        return num_tokens - 1

    def _start(self, seq: SequenceId, holding: _Holding, num_tokens: int, max_tokens: int) -> None:
        """Enter a sequence; what it holds so far is full, and shared with others."""
        shared = list(holding.blocks)
        shared_tokens = holding.end * self.geometry.block_size
        self._hold(shared)
        try:
            grant = self._ask(
                "admit",
                lambda: self._allocator.admit(
                    seq, num_tokens, max_tokens=max_tokens, shared_tokens=shared_tokens
                ),
            )
            self._accept(seq, holding, grant, num_tokens)
        except BaseException as error:
            self._drop(shared)
            if isinstance(error, AllocatorFault):
                self._tell_finish(seq)
            raise
        self._write_table(holding, holding.first)
        self.first_blocks[holding.row] = holding.first
        self._holdings[seq] = holding

    def extend(self, seq: SequenceId, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens of `seq` in all.

        Raises:
            OutOfBlocks: not now; nothing has changed.
            AllocatorFault: the allocator raised or its answer breaks the contract. `seq` still
                holds what it held; release it.
        """
        holding = self._holdings[seq]
        end = holding.end
        grant = self._ask("extend", lambda: self._allocator.extend(seq, num_tokens))
        self._accept(seq, holding, grant, num_tokens)
        self._write_table(holding, end)

    def slide(self, seq: SequenceId, num_computed: int) -> None:
        """Give back the blocks of `seq` that tokens from `num_computed` on do not attend to."""
        holding = self._holdings[seq]
        first = self.first_needed(num_computed)
        behind = holding.blocks[: max(0, first - holding.first)]
        if not behind:
            return
        self.tables[holding.row, holding.first : first] = -1
        del holding.blocks[: len(behind)]
        holding.first = self.first_blocks[holding.row] = first
        if isinstance(self._allocator, Slidable):
            allocator = self._allocator
            self._tell("slide", lambda: allocator.slide(seq, first * self.geometry.block_size))
        self._drop(behind)

    def release(self, seq: SequenceId) -> None:
        """`seq` is over (finished, cancelled, preempted): its blocks are free, or cached.

        Raises:
            KeyError: `seq` is not live; a double release is a bug of the caller.
        """
        holding = self._holdings.pop(seq)
        self.tables[holding.row] = -1
        self.capacity_tokens[holding.row] = self.first_blocks[holding.row] = 0
        self._drop(holding.blocks)
        self._tell_finish(seq)

    def trim(self, num_tokens: npt.NDArray[np.int64]) -> int:
        """Take unused tail blocks back from live sequences, where the strategy can.

        Args:
            num_tokens: `int64[max_num_seqs]`, tokens of each row that need room.

        Returns:
            How many blocks became free.
        """
        if not isinstance(self._allocator, Trimmable):
            return 0
        before = self._num_free
        for seq, holding in self._holdings.items():
            keep = self.geometry.blocks_for(int(num_tokens[holding.row]))
            if holding.end > keep:
                self._trim_one(self._allocator, seq, holding, keep)
        return self._num_free - before

    def publish(self, seq: SequenceId, keys: Sequence[BlockKey], first: int) -> None:
        """Offer full blocks of `seq` for reuse. Call it after the step that wrote them has ended.

        Args:
            seq: a live sequence.
            keys: one key for each of its blocks `first, first + 1, ...`.
            first: index in the sequence's table.
        """
        holding = self._holdings[seq]
        blocks = holding.blocks[first - holding.first :][: len(keys)]
        for block, key in zip(blocks, keys, strict=True):
            if key.digest not in self._published and block not in self._keys:
                self._published[key.digest] = block
                self._keys[block] = key

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """The content of these used blocks was lost: no other sequence may share them."""
        for block in blocks:
            self._unpublish(block)

    def take_copies(self) -> npt.NDArray[np.int64]:
        """Pairs `int64[C, 2]` of blocks (from, to) to copy before the next step computes.

        All sources are read as they were before any destination is written. Asking empties the
        list.
        """
        if not self._copies:
            return NO_PAIRS
        pairs = np.array([(source, to) for to, source in self._copies.items()], np.int64)
        self._copies.clear()
        return pairs

    def statistics(self) -> PoolStatistics:
        """Blocks by state."""
        cached = len(self._cached)
        used = self.geometry.num_blocks - self._num_free - cached
        return PoolStatistics(
            num_blocks=self.geometry.num_blocks,
            block_size=self.geometry.block_size,
            free_blocks=self._num_free,
            used_blocks=used,
            cached_blocks=cached,
        )

    @property
    def is_free(self) -> npt.NDArray[np.bool_]:
        """`bool[num_blocks]`, may the block be granted? Cost: linear in blocks; for debugging."""
        return np.equal(self._references, FREE)

    def verify(self) -> None:
        """Recount everything from the block tables. Cost: linear in blocks; for debugging.

        Raises:
            LedgerError: the ledger contradicts itself.
        """
        for contradiction in self._contradictions():
            raise LedgerError(f"the ledger of blocks contradicts itself: {contradiction}")

    def _contradictions(self) -> Iterator[str]:
        """What is wrong, each as the main clause of a sentence."""
        counted = [FREE] * self.geometry.num_blocks
        for seq, holding in self._holdings.items():
            for block in holding.blocks:
                counted[block] += 1
            expected = [-1] * holding.first + holding.blocks
            width = min(holding.end, self.tables.shape[1])
            if self.tables[holding.row, :width].tolist() != expected[:width]:
                yield f"row {holding.row} does not list the blocks of sequence {seq}"
        for block in self._cached:
            if counted[block] != FREE:
                yield f"block {block} is cached, and {counted[block]} sequences hold it"
            counted[block] = CACHED
        marked = np.flatnonzero(np.frombuffer(self._cached_flags, np.uint8)).tolist()
        if marked != sorted(self._cached):
            yield f"blocks {marked} are marked as cached, and {sorted(self._cached)} are"
        for number, (found, noted) in enumerate(zip(counted, self._references, strict=True)):
            if found != noted:
                yield f"block {number} has {noted} references, and {found} are found"
        if self._num_free != counted.count(FREE):
            yield f"{self._num_free} blocks count as free, and {counted.count(FREE)} are"
        for block in self._keys:
            if counted[block] == FREE:
                yield f"block {block} is free, and offered for reuse"
        free_blocks = self._allocator.statistics().free_blocks
        if free_blocks != self._num_free:
            yield (
                f"allocator {self._name!r} says that {free_blocks} blocks are free, and "
                f"{self._num_free} are"
            )

    # -- prefix index --------------------------------------------------------------------------

    def _evict(self, num_blocks: int) -> bool:
        """Free up to `num_blocks` cached blocks, the oldest first; False if none is left."""
        victims = [block for block, _ in zip(self._cached, range(num_blocks), strict=False)]
        for block in victims:
            del self._cached[block]
            self._cached_flags[block] = 0
            self._unpublish(block)
            self._references[block] = FREE
        self._give_back(victims)
        return bool(victims)

    def _unpublish(self, block: BlockId) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._published[key.digest]

    # -- references ----------------------------------------------------------------------------

    def _hold(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if self._references[block] == CACHED:
                del self._cached[block]
                self._cached_flags[block] = 0
                self._references[block] = FREE
            self._references[block] += 1

    def _drop(self, blocks: Sequence[BlockId]) -> None:
        """One holder less. The last blocks go first, so that eviction takes leaves before roots."""
        freed = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == FREE:
                if block in self._keys:
                    self._references[block] = CACHED
                    self._cached[block] = None
                    self._cached_flags[block] = 1
                else:
                    self._copies.pop(block, None)
                    freed.append(block)
        self._give_back(freed)

    # -- the allocator -------------------------------------------------------------------------

    def _ask(self, method: str, call: Callable[[], _Answer]) -> _Answer:
        """Call the allocator; when it is out of blocks, evict what is cached and call again."""
        while True:
            try:
                return call()
            except OutOfBlocks as signal:
                if not self._evict(signal.missing):
                    raise
            except Exception as error:
                raise AllocatorFault(
                    self._name, f"raised {type(error).__name__} in {method}: {error}"
                ) from error

    def _give_back(self, blocks: Sequence[BlockId]) -> None:
        """These blocks are free. A strategy that fails here cannot unfree them."""
        self._num_free += len(blocks)
        self._note_return(blocks)
        if blocks:
            self._tell("free", lambda: self._allocator.free(blocks))

    def _tell_finish(self, seq: SequenceId) -> None:
        self._tell("finish", lambda: self._allocator.finish(seq))

    def _tell(self, method: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # the request is over already; nobody is left to fail
            logger.warning("allocator %r raised in %s", self._name, method, exc_info=True)

    def _accept(self, seq: SequenceId, holding: _Holding, grant: Grant, num_tokens: int) -> None:
        """Check a grant as a whole, then enter it in the ledger and the block table."""
        try:
            blocks = self._granted_blocks(grant)
            problem = self._problem_with(grant, blocks, holding, num_tokens)
        except (TypeError, ValueError) as error:  # no number, no pair where one was due
            raise AllocatorFault(
                self._name, f"gave a grant that cannot be read: {grant!r}"
            ) from error
        if problem:
            self._return_refused(blocks, grant)
            raise AllocatorFault(self._name, f"{problem} (sequence {seq}, {num_tokens} tokens)")
        self._move(holding, grant.moves)
        self._append(holding, blocks)

    def _granted_blocks(self, grant: Grant) -> list[BlockId]:
        if not isinstance(grant, Grant):
            raise AllocatorFault(self._name, f"returned {grant!r} where a Grant was due")
        blocks: list[int] = []
        for extent in grant.extents:
            if not isinstance(extent, Extent):
                raise AllocatorFault(self._name, f"granted {extent!r}, which is not an Extent")
            if not 1 <= extent.num_blocks <= self.geometry.num_blocks:  # before it is written out
                raise AllocatorFault(
                    self._name,
                    f"granted {extent.num_blocks} blocks of a pool of {self.geometry.num_blocks}",
                )
            blocks.extend(range(extent.first_block, extent.end))
        return cast("list[BlockId]", blocks)

    def _problem_with(
        self, grant: Grant, blocks: Sequence[BlockId], holding: _Holding, num_tokens: int
    ) -> str | None:
        """What is wrong with a grant, as the predicate of a sentence; None if nothing is."""
        taken = [*blocks, *(to for _, to in grant.moves)]
        for block in taken:
            if not 0 <= block < self.geometry.num_blocks:
                return f"granted block {block} of a pool of {self.geometry.num_blocks}"
            if self._references[block] != FREE:
                return f"granted block {block}, which is not free"
        if len(set(taken)) != len(taken):
            return "granted a block twice in one answer"
        sources = [source for source, _ in grant.moves]
        if sources and len(set(sources) & set(holding.blocks)) < len(sources):
            return f"moved blocks {sources}, not all of them blocks of the sequence"
        room = (holding.end + len(blocks)) * self.geometry.block_size
        if room < num_tokens:
            return f"made room for {room} tokens where {num_tokens} were asked"
        return None

    def _return_refused(self, blocks: Sequence[BlockId], grant: Grant) -> None:
        """Offer back what a refused grant named and nobody holds, so that it is not lost."""
        named = dict.fromkeys([*blocks, *(to for _, to in grant.moves)])
        pool = range(self.geometry.num_blocks)
        unheld = [b for b in named if b in pool and self._references[b] == FREE]
        self._tell("free", lambda: self._allocator.free(unheld))

    def _append(self, holding: _Holding, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            self._references[block] = 1
        self._num_free -= len(blocks)
        self._note_grant(blocks)
        holding.blocks.extend(blocks)
        self.capacity_tokens[holding.row] = holding.end * self.geometry.block_size

    def _note_grant(self, blocks: Sequence[BlockId]) -> None:
        if self._lifetimes is not None:
            self._lifetimes.granted(blocks)

    def _note_return(self, blocks: Sequence[BlockId]) -> None:
        if self._lifetimes is not None:
            self._lifetimes.returned(blocks)

    def _write_table(self, holding: _Holding, first: int) -> None:
        """Enter the blocks of a holding in its row, from index `first` of the table on.

        A strategy may grant beyond `max_model_len` (rounding up); such blocks have no entry.
        """
        row = self.tables[holding.row]
        entries = holding.blocks[first - holding.first : len(row) - holding.first]
        row[first : first + len(entries)] = entries

    def _move(self, holding: _Holding, moves: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Put `to` in place of `from` in the sequence's table and note the copy."""
        for source, to in moves:
            index = holding.blocks.index(source)
            holding.blocks[index] = to
            entry = holding.first + index
            if entry < self.tables.shape[1]:
                self.tables[holding.row, entry] = to
            self._references[to] = 1
            self._num_free -= 1
            self._note_grant([to])
            self._copies[to] = self._copies.get(source, source)
            self._rename_published(source, to)
        self._drop([source for source, _ in moves])

    def _rename_published(self, source: BlockId, to: BlockId) -> None:
        """A published block that nobody else holds takes its key along."""
        if self._references[source] == 1 and source in self._keys:
            key = self._keys.pop(source)
            self._keys[to] = key
            self._published[key.digest] = to

    def _trim_one(
        self, allocator: Trimmable, seq: SequenceId, holding: _Holding, keep: int
    ) -> None:
        try:
            blocks = sorted(allocator.trim(seq, keep * self.geometry.block_size))
        except Exception:  # the sequence keeps what it has; pressure is met by preemption
            logger.warning("allocator %r raised in trim", self._name, exc_info=True)
            return
        tail = holding.blocks[len(holding.blocks) - len(blocks) :]
        if blocks != sorted(tail) or holding.end - len(blocks) < keep:
            logger.warning(
                "allocator %r trimmed blocks that are not a tail: %s", self._name, blocks
            )
            return
        self._forget_tail(holding, len(blocks))

    def _forget_tail(self, holding: _Holding, num_blocks: int) -> None:
        """The last blocks of `holding` are free; the allocator knows already."""
        if not num_blocks:
            return
        for block in holding.blocks[-num_blocks:]:
            self._references[block] = FREE
        self._note_return(holding.blocks[-num_blocks:])
        del holding.blocks[-num_blocks:]
        self._num_free += num_blocks
        self.tables[holding.row, holding.end :] = -1
        self.capacity_tokens[holding.row] = holding.end * self.geometry.block_size
