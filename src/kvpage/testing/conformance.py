"""`check_allocator`: can the block manager live with this allocator?"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from kvpage.allocators.base import Allocator
from kvpage.blocks import PoolGeometry, SequenceId
from kvpage.testing.machine import machine_for
from kvpage.testing.shadow import ContractViolation

AllocatorUnderTest = Callable[[PoolGeometry], Allocator]
"""Makes an allocator, its options given: a class, or a `functools.partial` of one."""

MAX_COST_RATIO = 8
"""How much more an `extend` may cost where sequences and pool are 32 times as long."""


def check_allocator(
    factory: AllocatorUnderTest, *, max_examples: int = 100, steps: int = 50
) -> None:
    """Judge an allocator from outside, by all that its contract says.

    A shadow model of the pool follows random histories of admissions, growth, forks, cached
    prefixes, partial frees, exhaustion and trims. Checked are: every grant in range, free, not
    twice, large enough; content found through the table after moves; nothing changed by
    `OutOfBlocks`; free blocks counted right; nothing lost once all has ended; equal answers of a
    second allocator. Then: no torch, no threads, and a constant amortised cost of `extend`.

    Args:
        factory: makes the allocator.
        max_examples: how many histories to try.
        steps: how many calls each of them has at most.

    Raises:
        ContractViolation: the first thing found wrong; hypothesis prints the shortest history.
    """
    _check_imports(type(factory(PoolGeometry(8, 16, 128))).__module__)
    threads = set(threading.enumerate())
    with _without_torch():
        _check_histories(factory, max_examples=max_examples, steps=steps)
        _check_cost(factory)
    if started := set(threading.enumerate()) - threads:
        raise ContractViolation(f"it started threads: {', '.join(t.name for t in started)}")


def _check_histories(factory: AllocatorUnderTest, *, max_examples: int, steps: int) -> None:
    settings = _settings(max_examples=max_examples, steps=steps)
    try:
        run_state_machine_as_test(machine_for(factory), settings=settings)
    except hypothesis.errors.Flaky as flaky:
        raise ContractViolation(
            "a history failed once and passed when repeated: the answers depend on something "
            "other than the calls"
        ) from flaky


def _settings(*, max_examples: int, steps: int) -> hypothesis.settings:
    profile = hypothesis.settings()  # the caller's, which may choose not to shrink
    return hypothesis.settings(
        # Which draws of a history do not matter is slow to find out and tells little here.
        phases=[phase for phase in profile.phases if phase is not hypothesis.Phase.explain],
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,  # nothing is written into the caller's repository
        report_multiple_bugs=False,
        derandomize=True,  # the same histories every time: red stays red until it is mended
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@contextmanager
def _without_torch() -> Iterator[None]:
    """Inside, `import torch` is an error, whether or not somebody else has imported it before."""
    torch = sys.modules.get("torch")
    sys.modules["torch"] = None  # type: ignore[assignment]  # what the import system looks for
    try:
        yield
    finally:
        del sys.modules["torch"]
        if torch is not None:
            sys.modules["torch"] = torch


def _check_imports(module: str) -> None:
    if _imports_torch(module):
        raise ContractViolation(f"importing {module} imports torch; an allocator needs no tensors")


@cache  # an interpreter is slow to start, and what a module imports does not change
def _imports_torch(module: str) -> bool:
    """Does a fresh interpreter have torch after importing `module`?

    What cannot be imported by its name, such as a cell of a notebook, passes unjudged.
    """
    script = f"import sys, {module}; sys.exit({_HAS_TORCH} if 'torch' in sys.modules else 0)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    finished = subprocess.run(command, check=False, env=environment, capture_output=True)
    return finished.returncode == _HAS_TORCH


_HAS_TORCH = 42  # an exit status that Python does not use itself


def _check_cost(factory: AllocatorUnderTest) -> None:
    """Grow sequences block by block, short ones in a small pool and long ones in a large pool."""
    short, long = (
        min(_seconds_per_extend(factory, blocks) for _ in range(3)) for blocks in (64, 2048)
    )
    if long > MAX_COST_RATIO * short:
        raise ContractViolation(
            f"extend costs {long / short:.0f} times as much where sequences and pool are 32 times "
            f"as long; at most {MAX_COST_RATIO} times would pass as constant"
        )


def _seconds_per_extend(factory: AllocatorUnderTest, num_blocks: int) -> float:
    """Processor time of an `extend` that brings a table of about `num_blocks` one block more."""
    geometry = PoolGeometry(8 * num_blocks, 1, num_blocks)
    allocator = factory(geometry)
    sequences = [SequenceId(i) for i in range(4)]
    first = num_blocks - 63
    for seq in sequences:
        allocator.admit(seq, first, max_tokens=num_blocks)
    start = time.thread_time()
    for num_tokens in range(first + 1, num_blocks + 1):
        for seq in sequences:
            moves = allocator.extend(seq, num_tokens).moves
            allocator.free([source for source, _ in moves])
    return (time.thread_time() - start) / (len(sequences) * 63)
