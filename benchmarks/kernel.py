"""The Triton kernel on a GPU: one table in under eight minutes.

    python benchmarks/kernel.py              decode bandwidth, block sizes, extend throughput
    python benchmarks/kernel.py --tune       tile sizes, pipeline stages and warps as well

Decode reads every K and V once, so it is measured as a share of the bandwidth of a device copy,
taken in the same run; extend is measured in TFLOP/s. Beside each stand torch's attention on
contiguous K and V, which pays for no table, and its paged `varlen_attn` where this torch has it.
All times are of captured graphs, without the host's launches.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import attrs
import torch
import triton.testing
from torch.nn.functional import scaled_dot_product_attention

from kvpage.kernels import arguments, paged_attention
from kvpage.testing.attention import AttentionProblem, AttentionShape, random_problem

BUDGET_S = 450.0
MAX_TOKENS = 2**21
"""Tokens of the largest case: 8 GiB of K and V at the shape below."""

LAYER = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
BATCHES = (1, 8, 64, 256)
CONTEXTS = (1024, 8192, 32768, 131072)
BLOCK_SIZES = (1, 8, 16, 32, 64, 1024)
EXTENDS = ((1, 8192, 8192), (8, 1024, 1024), (4, 2048, 32768), (64, 128, 4096))
TILES, STAGES, WARPS = (32, 64, 128), (3, 5), (2, 4, 8)

Run = Callable[[], object]
Timer = Callable[[Run], float]
"""Milliseconds of a call."""


@attrs.frozen
class Case:
    """Sequences of one length, with the same number of queries each.

    Attributes:
        batch: sequences.
        queries: of each sequence.
        context: tokens of each sequence.
        block_size: tokens per block.
    """

    batch: int
    queries: int
    context: int
    block_size: int = 16

    @property
    def tokens(self) -> int:
        """Tokens in the cache."""
        return self.batch * self.context

    def problem(self, device: str) -> AttentionProblem:
        """Random K and V in scattered blocks."""
        shape = attrs.evolve(LAYER, block_size=self.block_size)
        return random_problem(
            shape, [self.queries] * self.batch, [self.context] * self.batch, device=device
        )


@attrs.frozen
class Row:
    """A line of the table.

    Attributes:
        name: what was measured.
        milliseconds: of one call.
        rate: bytes or operations of a call.
        beside: milliseconds of the others, by name.
    """

    name: str
    milliseconds: float
    rate: float
    beside: dict[str, float]


def decode_cases() -> Iterator[Case]:
    """Batches times contexts that fit, then block sizes."""
    for batch, context in product(BATCHES, CONTEXTS):
        if batch * context <= MAX_TOKENS:
            yield Case(batch, 1, context)
    for block_size in BLOCK_SIZES:
        yield Case(64, 1, 8192, block_size)


def kv_bytes(problem: AttentionProblem, case: Case) -> int:
    """Bytes of K and V that a call must read at least once."""
    per_slot = problem.k_pool[0].nbytes + problem.v_pool[0].nbytes
    return case.tokens * per_slot


def operations(problem: AttentionProblem, case: Case) -> float:
    """Multiplications and additions of a call, of visible keys only."""
    pairs = case.batch * case.queries * (case.context - (case.queries - 1) / 2)
    return 4.0 * pairs * problem.q.shape[1] * problem.q.shape[2]


def contiguous(problem: AttentionProblem, case: Case) -> Run:
    """Torch's attention over the same sizes, each sequence's K and V in one piece.

    A chunk of a prompt attends to all keys here, causal or not, since torch aligns the causal mask
    of a chunk to its first key: a little more work than the kernel has.
    """
    batch, queries, context = case.batch, case.queries, case.context
    q = problem.q.view(batch, queries, *problem.q.shape[1:]).transpose(1, 2)
    k, v = (
        pool[: case.tokens].view(batch, context, *pool.shape[1:]).transpose(1, 2).contiguous()
        for pool in (problem.k_pool, problem.v_pool)
    )
    causal = 1 < queries == context
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def paged_varlen(problem: AttentionProblem, case: Case) -> Run | None:
    """Torch's paged attention on the same pools; none where torch or the GPU lacks it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    device = problem.q.device
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.queries
    k_pages, v_pages = (
        pool.view(-1, case.block_size, *pool.shape[1:]) for pool in (problem.k_pool, problem.v_pool)
    )
    table = torch.from_numpy(problem.batch.block_table).to(device)

    def run() -> object:
        return varlen_attn(
            problem.q, k_pages, v_pages, starts, None, case.queries, case.context,
            window_size=(-1, 0), enable_gqa=True, seqused_k=lengths, block_table=table,
            num_splits=1,
        )  # fmt: skip

    try:
        run()
    except (RuntimeError, TypeError):
        return None
    return run


def measure(
    case: Case, rate_of: Callable[[AttentionProblem, Case], float], timer: Timer, device: str
) -> Row:
    """Time the kernel and its peers on a case."""
    problem = case.problem(device)
    name = f"{case.batch} x {case.queries} of {case.context}, block {case.block_size}"
    peers = {"SDPA": contiguous(problem, case), "varlen_attn": paged_varlen(problem, case)}
    return Row(
        name,
        timer(lambda: problem.solve(paged_attention.paged_attention)),
        rate_of(problem, case),
        {peer: timer(run) for peer, run in peers.items() if run is not None},
    )


def tuned(case: Case, phase: str, timer: Timer, device: str) -> Iterator[Row]:
    """Every tiling of a case that compiles."""
    problem = case.problem(device)
    call = arguments.AttentionCall(
        problem.q, problem.k_pool, problem.v_pool, problem.batch, problem.options["scale"]
    )
    default = paged_attention.default_tilings(call, paged_attention.gpu_family(problem.q.device))
    for tile, stages, warps in product(TILES, STAGES, WARPS):
        tiling = attrs.evolve(
            getattr(default, phase), tile=tile, num_stages=stages, num_warps=warps
        )
        tilings = attrs.evolve(default, **{phase: tiling})
        name = f"{phase}, tile {tile}, {stages} stages, {warps} warps"
        try:
            elapsed = timer(
                partial(problem.solve, paged_attention.paged_attention, tilings=tilings)
            )
        except triton.runtime.errors.OutOfResources:
            continue
        rate = kv_bytes(problem, case) if phase == "decode" else operations(problem, case)
        yield Row(name, elapsed, rate, {})


def copy_bytes_per_ms(timer: Timer, device: str, size: int = 2**30) -> float:
    """What a copy inside the device moves, reads and writes counted."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timer(lambda: target.copy_(source))


def print_table(title: str, unit: str, scale: float, rows: Iterable[Row]) -> None:
    """Print rows as they come; rates are shown as multiples of `scale` a millisecond."""
    print(f"\n| {title} | us | {unit} | others, us |\n|---|---|---|---|")
    for row in rows:
        others = ", ".join(f"{name} {1e3 * ms:.0f}" for name, ms in row.beside.items())
        rate = row.rate / row.milliseconds / scale
        print(f"| {row.name} | {1e3 * row.milliseconds:.0f} | {rate:.3g} | {others} |", flush=True)


def within_budget(rows: Iterable[Row], deadline: float) -> Iterator[Row]:
    """Rows until time is up, and then a line that says so."""
    for row in rows:
        yield row
        if time.monotonic() > deadline:
            print(f"(stopped after {BUDGET_S:.0f} s)")
            return


def report(timer: Timer, device: str, *, tune: bool) -> None:
    """Print the tables."""
    deadline = time.monotonic() + BUDGET_S
    copied = copy_bytes_per_ms(timer, device)
    print(f"Device copy: {copied / 1e9:.2f} TB/s.")
    decodes = (measure(case, kv_bytes, timer, device) for case in decode_cases())
    extends = (measure(Case(*case), operations, timer, device) for case in EXTENDS)
    print_table("decode", "share of copy", copied, within_budget(decodes, deadline))
    print_table("extend", "TFLOP/s", 1e9, within_budget(extends, deadline))
    if tune:
        tilings = tuned(Case(64, 1, 8192), "decode", timer, device)
        print_table("decode", "share of copy", copied, within_budget(tilings, deadline))
        tilings = tuned(Case(8, 1024, 1024), "extend", timer, device)
        print_table("extend", "TFLOP/s", 1e9, within_budget(tilings, deadline))


def main() -> None:
    """Measure, if there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="also vary tiles, stages and warps")
    arguments_given = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU is at hand: nothing was measured.")
        return
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, triton {triton.__version__}")
    with torch.inference_mode():
        report(triton.testing.do_bench_cudagraph, "cuda", tune=arguments_given.tune)


if __name__ == "__main__":
    main()
