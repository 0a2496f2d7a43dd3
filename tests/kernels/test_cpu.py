"""The CPU kernel against the reference in float64. Slots that nothing was written to hold NaN."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import attrs
import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvpage.kernels import cpu, cpu_kernel, cpu_threads, reference
from kvpage.kernels.work import AttentionBatch

Placing = Literal["permuted", "counting", "extents"]


@attrs.frozen(eq=False)
class Step:
    """Queries, pools and batch of one step."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    batch: AttentionBatch

    def attend(self, **options: Any) -> torch.Tensor:
        scale = self.q.shape[2] ** -0.5
        return cpu.paged_attention(
            self.q, self.k_pool, self.v_pool, self.batch, scale=scale, **options
        )

    def exact(self, **options: Any) -> torch.Tensor:
        scale = self.q.shape[2] ** -0.5
        return reference.paged_attention(
            self.q.double(), self.k_pool, self.v_pool, self.batch, scale=scale, **options
        )


def make_step(
    sequences: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (9, 3),
    dims: tuple[int, int] = (64, 64),
    block_size: int = 16,
    placing: Placing = "permuted",
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    names: Sequence[int] | None = None,
) -> Step:
    """Make a step of sequences `(queries, keys)`.

    What a sequence holds follows from its name and lengths alone, wherever its blocks are. Blocks
    that lie behind the window of all its queries are -1; those after its end do not exist.
    """
    query_lens, kv_lens = (np.array(lens, np.int32) for lens in zip(*sequences, strict=True))
    table = block_table(kv_lens, block_size, placing)
    k_pool, v_pool = (
        torch.full((table.size * block_size, heads[1], d), float("nan"), dtype=dtype) for d in dims
    )
    queries = []
    for i, name in enumerate(range(len(sequences)) if names is None else names):
        numbers = torch.Generator().manual_seed(name)
        positions = np.arange(kv_lens[i])
        slots = table[i, positions // block_size] * np.int64(block_size) + positions % block_size
        for pool in (k_pool, v_pool):
            shape = (len(slots), *pool.shape[1:])
            pool[torch.from_numpy(slots)] = torch.randn(shape, generator=numbers).to(dtype)
        table[i, -(-kv_lens[i] // block_size) :] = np.iinfo(np.int32).max
        queries.append(torch.randn(heads[0], query_lens[i], dims[0], generator=numbers))
    if window:
        hide_blocks_behind(table, kv_lens - query_lens - window + 1, block_size, k_pool, v_pool)
    rows = np.arange(len(sequences), dtype=np.int32)
    batch = AttentionBatch(table, rows, query_lens, kv_lens, block_size)
    return Step(torch.cat(queries, 1).transpose(0, 1), k_pool, v_pool, batch)


def block_table(
    kv_lens: npt.NDArray[np.int32], block_size: int, placing: Placing
) -> npt.NDArray[np.int32]:
    """A row of blocks for each sequence, as the strategies place them."""
    width = -(-int(kv_lens.max()) // block_size)
    order = np.arange(len(kv_lens) * (width + width % 2), dtype=np.int32)
    shuffle = np.random.default_rng(7).permutation
    if placing == "permuted":
        order = shuffle(order)
    elif placing == "extents":
        order = shuffle(order.reshape(-1, 2)).reshape(-1)
    return order.reshape(len(kv_lens), -1)


def hide_blocks_behind(
    table: npt.NDArray[np.int32],
    first_visible: npt.NDArray[np.int32],
    block_size: int,
    *pools: torch.Tensor,
) -> None:
    """Take blocks away that no query sees: NaN in the pool, -1 in the table."""
    for row, first in zip(table, first_visible, strict=True):
        for index in range(max(0, int(first)) // block_size):
            for pool in pools:
                pool[row[index] * block_size : (row[index] + 1) * block_size] = float("nan")
            row[index] = -1


def assert_close(expected: torch.Tensor, actual: torch.Tensor, atol: float = 5e-6) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=atol)


# Decoding alone, in two and in several parts; chunks of a few, many and all tokens.
MIXED = [(1, 33), (5, 100), (17, 17), (1, 700), (1, 1), (300, 300), (2, 257), (3, 520)]


@pytest.fixture
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("heads", [(9, 3), (7, 1), (5, 1), (4, 4), (71, 1), (24, 1)], ids=str)
def test_any_group_of_heads(heads: tuple[int, int]) -> None:
    """A KV head serves any number of query heads, powers of two or not."""
    step = make_step(MIXED, heads=heads)
    assert_close(step.exact(), step.attend())


@pytest.mark.parametrize(
    "dims", [(16, 16), (64, 64), (80, 80), (128, 128), (96, 112), (192, 128), (24, 7)], ids=str
)
def test_any_head_dims(dims: tuple[int, int]) -> None:
    """Head dims need not fill vectors, and those of K and V may differ."""
    step = make_step(MIXED, heads=(6, 2), dims=dims)
    assert_close(step.exact(), step.attend())


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 64])
@pytest.mark.parametrize("num_blocks", [1, 2, 11])
def test_lengths_around_a_block(block_size: int, num_blocks: int) -> None:
    """One token less than a block, a full one and one more, as decode and as prefill."""
    tokens = num_blocks * block_size
    lengths = [n for n in (tokens - 1, tokens, tokens + 1) if n]
    step = make_step(
        [*((1, n) for n in lengths), *((n, n) for n in lengths)], block_size=block_size
    )
    assert_close(step.exact(), step.attend())


@pytest.mark.parametrize("keys", [255, 256, 257, 511, 512, 513, 2000])
def test_lengths_around_a_part(keys: int) -> None:
    """A long sequence is cut into parts whose results are merged."""
    step = make_step([(1, keys)])
    assert_close(step.exact(), step.attend())


@pytest.mark.parametrize("queries", [2, 3, 4, 5, 16, 21, 22, 23, 43, 64, 65, 130])
def test_chunks_around_a_tile(queries: int) -> None:
    """Chunks of any length, behind a cached prefix."""
    step = make_step([(queries, queries + 77)])
    assert_close(step.exact(), step.attend())


@pytest.mark.parametrize("window", [1, 7, 16, 17, 64, 100, 255, 256, 257, 1000])
def test_window(window: int) -> None:
    """A query sees so many positions, itself included; what is behind them has no blocks."""
    step = make_step(MIXED, window=window)
    assert_close(step.exact(window=window), step.attend(window=window))


@pytest.mark.parametrize("queries", [39, 40, 41, 80, 200])
def test_chunk_longer_than_the_window(queries: int) -> None:
    """The queries of one chunk see different keys, some of them disjoint ones."""
    step = make_step([(queries, queries + 100)], window=40)
    assert_close(step.exact(window=40), step.attend(window=40))


def test_softcap() -> None:
    """Scores are capped by a hyperbolic tangent."""
    step = make_step(MIXED)
    assert_close(step.exact(softcap=1.5), step.attend(softcap=1.5))


@pytest.mark.parametrize("sign", [1, -1])
def test_softcap_of_huge_scores(sign: int) -> None:
    """Scores of 3,000 times the cap stay finite."""
    step = make_step(MIXED)
    huge = attrs.evolve(step, q=step.q * 3000 * sign)
    # Scores of thousands that cancel to about 0 are only so exact in float32.
    assert_close(huge.exact(softcap=1.0), huge.attend(softcap=1.0), atol=1e-3)


def test_sinks() -> None:
    """A sink takes its share of the softmax, whether below, near or above all scores."""
    step = make_step(MIXED)
    sinks = torch.linspace(-30, 30, 9)
    assert_close(step.exact(sinks=sinks), step.attend(sinks=sinks))


def test_alibi() -> None:
    """Scores fall with the distance."""
    step = make_step(MIXED)
    slopes = torch.linspace(0.01, 0.9, 9)
    assert_close(step.exact(alibi_slopes=slopes), step.attend(alibi_slopes=slopes))


def test_all_features_at_once() -> None:
    """Cap, then bias, then mask, then sink."""
    step = make_step(MIXED, window=50)
    options = {
        "window": 50,
        "softcap": 2.0,
        "sinks": torch.linspace(-2, 2, 9),
        "alibi_slopes": torch.linspace(0.01, 0.3, 9),
    }
    assert_close(step.exact(**options), step.attend(**options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pools_of_half_precision(dtype: torch.dtype) -> None:
    """What is stored in 16 bits is computed with in float32."""
    step = make_step(MIXED, dims=(64, 80), dtype=dtype)
    assert_close(step.exact(), step.attend())


def test_queries_of_half_precision() -> None:
    """The output has the type of the queries."""
    step = make_step(MIXED)
    half = attrs.evolve(step, q=step.q.bfloat16())
    in_float32 = attrs.evolve(step, q=half.q.float()).attend().bfloat16()
    assert torch.equal(in_float32, half.attend())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_goes_where_it_is_wanted(dtype: torch.dtype) -> None:
    """`out` is written and returned, in its own type and layout."""
    step = make_step(MIXED)
    out = torch.empty(step.q.shape[0], 9, 2 * 64, dtype=dtype)[:, :, :64]
    assert step.attend(out=out) is out
    assert torch.equal(step.attend().to(dtype), out)


def test_queries_of_any_layout() -> None:
    """A view whose heads are not contiguous is read right."""
    step = make_step(MIXED)
    apart = torch.stack([step.q, step.q], dim=3)[..., 0]
    assert torch.equal(step.attend(), attrs.evolve(step, q=apart).attend())


@pytest.mark.parametrize("window", [0, 40])
def test_a_request_alone_and_in_a_batch(window: int) -> None:
    """Nothing of a request's output depends on the rest of the batch, to the last bit."""
    together = make_step(MIXED).attend(window=window)
    ends = itertools.accumulate(queries for queries, _ in MIXED)
    for name, (sequence, end) in enumerate(zip(MIXED, ends, strict=True)):
        alone = make_step([sequence], names=[name]).attend(window=window)
        assert torch.equal(together[end - sequence[0] : end], alone)


@pytest.mark.parametrize("placing", ["counting", "extents"])
def test_the_strategy_does_not_matter(placing: Placing) -> None:
    """Wherever the blocks are, the output is the same, to the last bit."""
    assert torch.equal(make_step(MIXED).attend(), make_step(MIXED, placing=placing).attend())


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_the_block_size_does_not_matter(block_size: int) -> None:
    """However large the blocks are, the output is the same, to the last bit."""
    assert torch.equal(make_step(MIXED).attend(), make_step(MIXED, block_size=block_size).attend())


def test_chunking_does_not_matter() -> None:
    """A prompt gives the same output in one chunk and in several, to the last bit."""
    whole = make_step([(300, 300)])
    first = attrs.evolve(whole, q=whole.q[:100], batch=chunk_of(whole.batch, 100, 100))
    second = attrs.evolve(whole, q=whole.q[100:], batch=chunk_of(whole.batch, 200, 300))
    assert torch.equal(whole.attend(), torch.cat([first.attend(), second.attend()]))


def chunk_of(batch: AttentionBatch, queries: int, keys: int) -> AttentionBatch:
    query_lens, kv_lens = (np.array([n], np.int32) for n in (queries, keys))
    return AttentionBatch(batch.block_table, batch.rows, query_lens, kv_lens, batch.block_size)


@pytest.mark.usefixtures("_one_torch_thread")
def test_the_number_of_threads_does_not_matter() -> None:
    """One thread and two give the same output, to the last bit."""
    alone = make_step(MIXED).attend()
    torch.set_num_threads(2)
    assert torch.equal(alone, make_step(MIXED).attend())


def test_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no GNU OpenMP, threads of our own do the same."""
    expected = make_step(MIXED).attend()
    monkeypatch.setattr(cpu_threads, "_openmp", lambda: None)
    assert torch.equal(expected, make_step(MIXED).attend())


def test_a_plan_serves_all_layers() -> None:
    """One batch object is used again with other pools, and other options."""
    step = make_step(MIXED)
    other = attrs.evolve(step, k_pool=-step.k_pool, v_pool=2 * step.v_pool)
    step.attend()
    assert_close(other.exact(), other.attend())
    assert_close(step.exact(window=20), step.attend(window=20))
    assert_close(step.exact(), step.attend())


def test_several_python_threads_at_once() -> None:
    """Engines on threads of their own do not disturb each other, even on one batch object."""
    step = make_step(MIXED)
    expected = step.attend()
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(step.attend) for _ in range(40)]
        assert all(torch.equal(expected, result.result()) for result in results)


@pytest.mark.usefixtures("_one_torch_thread")
def test_other_python_threads_run_meanwhile() -> None:
    """The kernel does not hold the GIL: another thread gets to run while it computes."""
    step = make_step([(1500, 1500)], heads=(16, 16))
    step.attend()
    ended = threading.Event()
    ticks: list[float] = []

    def tick() -> None:
        while not ended.wait(0.001):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    begin = time.perf_counter()
    step.attend()
    end = time.perf_counter()
    ended.set()
    ticker.join()
    assert [t for t in ticks if begin + 0.2 * (end - begin) < t < end - 0.2 * (end - begin)]


@pytest.mark.parametrize(
    ("dtype", "kv_scales"),
    [(torch.int8, (torch.ones(3), torch.ones(3))), (torch.int8, None), (torch.float64, None)],
    ids=str,
)
def test_pools_it_cannot_read(dtype: torch.dtype, kv_scales: Any) -> None:
    """Quantised and double pools are refused by name."""
    step = make_step([(1, 5)])
    stored = attrs.evolve(step, k_pool=step.k_pool.to(dtype), v_pool=step.v_pool.to(dtype))
    with pytest.raises(ValueError, match=str(dtype)):
        stored.attend(kv_scales=kv_scales)


@pytest.mark.parametrize(
    "change",
    [
        lambda step: attrs.evolve(step, q=step.q[:-1]),
        lambda step: attrs.evolve(step, q=step.q[:, :, :-1]),
        lambda step: attrs.evolve(step, q=step.q[:, :-1]),
        lambda step: attrs.evolve(step, v_pool=step.v_pool[:-1]),
        lambda step: attrs.evolve(step, v_pool=step.v_pool[:, :-1]),
    ],
    ids=["tokens", "dims", "heads", "slots", "kv_heads"],
)
def test_shapes_that_do_not_fit(change: Callable[[Step], Step]) -> None:
    """What would make the kernel read past a tensor is refused with all shapes."""
    step = make_step([(1, 5), (2, 5)])
    with pytest.raises(ValueError, match="do not belong together"):
        change(step).attend()


def test_output_of_another_shape() -> None:
    """An output that the result does not fit in is refused."""
    step = make_step([(1, 5), (2, 5)])
    with pytest.raises(ValueError, match=r"an output of \(3, 9, 64\)"):
        step.attend(out=torch.empty(2, 9, 64))


def test_an_empty_step() -> None:
    """No sequences, no output."""
    step = make_step([(1, 5)])
    nobody = np.empty(0, np.int32)
    batch = AttentionBatch(step.batch.block_table, nobody, nobody, nobody, 16)
    assert attrs.evolve(step, q=step.q[:0], batch=batch).attend().shape == (0, 9, 64)


def test_pools_with_holes_in_a_head() -> None:
    """Pools whose heads are not contiguous are refused with both strides."""
    step = make_step([(1, 5)])
    spread = torch.stack([step.k_pool, step.k_pool], dim=3)[..., 0]
    with pytest.raises(ValueError, match="2 apart in K and 1 in V"):
        attrs.evolve(step, k_pool=spread).attend()


@pytest.mark.parametrize("slots", [[3, 0, 7], [3, -1, 7], [-1, -1, -1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_write_kv(slots: list[int], dtype: torch.dtype) -> None:
    """K and V go to their slots in the pool's type; slot -1 is skipped."""
    k, v = torch.randn(2, 3, 16).transpose(0, 1), torch.randn(2, 3, 8).transpose(0, 1)
    pools = [torch.full((8, 2, d), 9.0, dtype=dtype) for d in (16, 8)]
    expected = [pool.clone() for pool in pools]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0][slot], expected[1][slot] = k[token], v[token]
    cpu.write_kv(k, v, pools[0], pools[1], torch.tensor(slots))
    assert all(map(torch.equal, expected, pools))


def test_copy_blocks_reads_before_it_writes() -> None:
    """Two blocks that change places and one copied from a block that is overwritten."""
    k_pool, v_pool = torch.randn(14, 2, 8), torch.randn(14, 2, 4)
    before = [pool.clone() for pool in (k_pool, v_pool)]
    cpu.copy_blocks(k_pool, v_pool, torch.tensor([[0, 2], [2, 0], [0, 3]]), block_size=3)
    for old, new in zip(before, (k_pool, v_pool), strict=True):
        moved = [old[6:9], old[3:6], old[0:3], old[0:3], old[12:]]
        assert torch.equal(torch.cat(moved), new)


def test_copy_no_blocks() -> None:
    """An empty list of copies is no special case."""
    k_pool, v_pool = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    before = k_pool.clone()
    cpu.copy_blocks(k_pool, v_pool, torch.empty(0, 2, dtype=torch.int64), block_size=3)
    assert torch.equal(before, k_pool)


def test_numba_is_imported_late() -> None:
    """Neither the package nor the list of backends imports numba or torch."""
    program = (
        "import sys, kvpage, kvpage.kernels; print({'numba', 'torch', 'triton'} & {*sys.modules})"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "set()\n"


COMPILED = """
import torch
from kvpage.kernels import cpu_kernel, cpu_plan, cpu_rows

found = [
    cpu_kernel.kernel(torch.float32).cache_hits,
    cpu_rows._kernel().cache_hits,
    cpu_rows._conductor().cache_hits,
    sum(cpu_plan.planner().stats.cache_hits.values()),
]
print(found)
"""


def test_what_is_compiled_once_is_found_by_the_next_process() -> None:
    """A start that compiles again takes seconds, and leaves another file each time."""
    for _ in range(2):
        printed = subprocess.check_output([sys.executable, "-c", COMPILED], text=True)
    assert printed.strip() == "[1, 1, 1, 1]"


def test_code_that_cannot_be_cached_is_compiled() -> None:
    """Where numba finds no folder for its cache the kernel is compiled all the same."""
    scope: dict[str, Callable[[int], int]] = {}
    exec("def twice(x): return 2 * x", scope)  # no file, so nothing to cache by
    assert cpu_kernel.cached(numba.njit, scope["twice"])(4) == 8
