"""Measures what steps cost: some dozens of them, run by hand, on a runner of each block size."""

from collections.abc import Callable, Sequence
from time import perf_counter

import attrs
import numpy as np

from kvpage.blocks import PoolGeometry
from kvpage.plan import Runner, StepPlan
from kvpage.sampling import SamplingRows
from kvpage.tuning.cost import Curve, MachineCost

MakeRunner = Callable[[PoolGeometry], Runner]
"""Builds a runner over a pool; `calibrate` closes it."""

REPEATS = 3
"""Each step runs so often, and the fastest counts: what disturbs a step only makes it slower."""

ENOUGH_S = 0.3
"""A step that has run this long in all is not run again."""

PAIRS = 7
"""Two steps whose difference matters take turns, so often."""

SHORT_CONTEXT = 16
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS = (16, 64, 256, 1024)
PROBE_ROWS = 8
COPIED_TOKENS = 512


@attrs.frozen
class Shape:
    """Sequences of a step, all alike.

    Attributes:
        sequences: how many.
        queries: tokens that each computes.
        keys: tokens that each has in the cache after the step.
    """

    sequences: int
    queries: int
    keys: int

    @property
    def pairs(self) -> float:
        """Queries times the keys that each sees, in all sequences together."""
        return self.sequences * self.queries * (self.keys - (self.queries - 1) / 2)

    def blocks(self, block_size: int) -> int:
        """Blocks that hold them."""
        return self.sequences * -(-self.keys // block_size)

    def plan(self, block_size: int, *, copied_tokens: int = 0) -> StepPlan:
        """The step, over the first blocks of a pool, in scattered order as in a used pool."""
        sequences, width = self.sequences, -(-self.keys // block_size)
        blocks = np.random.default_rng(0).permutation(self.blocks(block_size))
        tables = blocks.reshape(sequences, width).astype(np.int32)
        positions = np.tile(np.arange(self.keys - self.queries, self.keys), sequences)
        of_token = np.repeat(np.arange(sequences), self.queries)
        slots = tables[of_token, positions // block_size].astype(np.int64) * block_size
        num_copies = copied_tokens // block_size
        return StepPlan(
            rows=np.arange(sequences, dtype=np.int32),
            query_lens=np.full(sequences, self.queries, np.int32),
            kv_lens=np.full(sequences, self.keys, np.int32),
            token_ids=np.zeros(len(positions), np.int64),
            positions=positions,
            slots=slots + positions % block_size,
            block_tables=tables,
            copies=np.arange(2 * num_copies, dtype=np.int64).reshape(2, num_copies).T.copy(),
            sample_tokens=np.arange(1, sequences + 1) * self.queries - 1,
            sample_rows=np.arange(sequences),
            sample_indices=np.zeros(sequences, np.int64),
            sampling=SamplingRows.empty(sequences),
        )


@attrs.frozen
class _Bench:
    """Times steps on one runner."""

    runner: Runner
    geometry: PoolGeometry
    clock: Callable[[], float]

    def fits(self, shape: Shape) -> bool:
        blocks = shape.blocks(self.geometry.block_size)
        return blocks <= self.geometry.num_blocks and shape.keys <= self.geometry.max_model_len

    def seconds(self, shape: Shape, *, copied_tokens: int = 0) -> float:
        """The fastest of some repeats, after one that warms up."""
        plan = shape.plan(self.geometry.block_size, copied_tokens=copied_tokens)
        self.runner.execute(plan)
        times: list[float] = []
        while len(times) < REPEATS and sum(times) < ENOUGH_S:
            times.append(self._timed(plan))
        return min(times)

    def gain(self, low: Shape, high: Shape) -> float:
        """Seconds that `high` takes longer: of each the fastest, in turn."""
        plans = [shape.plan(self.geometry.block_size) for shape in (low, high)]
        for plan in plans:
            self.runner.execute(plan)
        times = [[self._timed(plan) for plan in plans] for _ in range(PAIRS)]
        return max(0.0, min(high for _, high in times) - min(low for low, _ in times))

    def _timed(self, plan: StepPlan) -> float:
        started = self.clock()
        self.runner.execute(plan)
        return self.clock() - started


def calibrate(
    make_runner: MakeRunner,
    *,
    block_sizes: Sequence[int],
    bytes_per_token: int,
    max_model_len: int,
    num_tokens: int,
    clock: Callable[[], float] = perf_counter,
    progress: Callable[[str], None] = lambda _: None,
) -> MachineCost:
    """Measure what a model's steps cost on this machine. Takes some seconds; blocks.

    Args:
        make_runner: called once for each block size; one runner lives at a time.
        block_sizes: for which the attention of decoding rows is measured.
        bytes_per_token: K and V of one token in all layers.
        max_model_len: longest sequence of the model, in tokens.
        num_tokens: slots of the pools to measure in.
        clock: seconds.
        progress: told what is measured now.
    """
    per_kv_token_s: dict[int, float] = {}
    base: MachineCost | None = None
    for block_size in block_sizes:
        progress(f"measuring steps in blocks of {block_size} tokens")
        num_blocks = max(1, num_tokens // block_size)
        geometry = PoolGeometry(num_blocks, block_size, min(max_model_len, num_blocks * block_size))
        bench = _Bench(make_runner(geometry), geometry, clock)
        try:
            per_kv_token_s[block_size] = _per_kv_token_s(bench)
            if base is None:
                base = _base(bench, per_kv_token_s, bytes_per_token)
        finally:
            bench.runner.close()
    assert base is not None, "there is no block size to measure"
    return attrs.evolve(base, per_kv_token_s=per_kv_token_s)


def _per_kv_token_s(bench: _Bench) -> float:
    """Between short and long contexts of the same rows."""
    longest = min(bench.geometry.max_model_len, bench.geometry.num_slots // PROBE_ROWS)
    longest -= longest % bench.geometry.block_size
    short, long = (Shape(PROBE_ROWS, 1, keys) for keys in (SHORT_CONTEXT, longest))
    if not bench.fits(long) or long.keys <= short.keys:
        return 0.0
    return bench.gain(short, long) / (long.pairs - short.pairs)


def _base(bench: _Bench, per_kv: dict[int, float], bytes_per_token: int) -> MachineCost:
    """Everything that does not depend on the size of blocks."""
    per_kv_token_s = per_kv[bench.geometry.block_size]
    per_pair_s = _per_pair_s(bench)
    rows = [Shape(count, 1, SHORT_CONTEXT) for count in DECODE_ROWS]
    chunks = [Shape(1, count, count) for count in CHUNKS]
    decode = Curve(
        (shape.sequences, _net(bench.seconds(shape), per_kv_token_s * shape.pairs))
        for shape in rows
        if bench.fits(shape)
    )
    chunk = Curve(
        (shape.queries, _net(bench.seconds(shape), per_pair_s * shape.pairs))
        for shape in chunks
        if bench.fits(shape)
    )
    return MachineCost(
        decode, chunk, per_kv, per_pair_s, _per_copied_token_s(bench), bytes_per_token
    )


def _net(seconds: float, attention_s: float) -> float:
    """Without attention; a step takes time whatever the noise says."""
    return max(seconds - attention_s, seconds / 10)


def _per_pair_s(bench: _Bench) -> float:
    """Between a chunk at the start of a sequence and one behind a long context."""
    chunk = min(64, bench.geometry.max_model_len // 2)
    far = bench.geometry.max_model_len
    start, end = Shape(1, chunk, chunk), Shape(1, chunk, far)
    return bench.gain(start, end) / (end.pairs - start.pairs)


def _per_copied_token_s(bench: _Bench) -> float:
    """Between a step with copies and one without."""
    block_size, slots = bench.geometry.block_size, bench.geometry.num_slots
    copied = min(COPIED_TOKENS, slots // 2) // block_size * block_size
    if not copied:
        return 0.0
    one = Shape(1, 1, 1)
    return max(0.0, (bench.seconds(one, copied_tokens=copied) - bench.seconds(one)) / copied)
