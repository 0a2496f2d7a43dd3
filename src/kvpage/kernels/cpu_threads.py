"""Compiled functions on the threads that torch computes with."""

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(entry: int, job: int, threads: int) -> None:
    """Call the C function at `entry` on so many threads at once.

    Args:
        entry: shares the work of a job among whoever calls it.
        job: its argument, an address.
        threads: 1, or all that torch has: a smaller team would make OpenMP end the others.
    """
    if threads == 1:
        _ENTRY(entry)(job)
    else:
        (_openmp() or _on_threads)(entry, job, threads)


def in_a_thread_that_ends(function: Callable[[], T]) -> T:
    """Call a function that computes, and leave no OpenMP threads behind.

    OpenMP keeps a team of threads for every thread that has computed, until that one ends. Once
    all teams together have more threads than there are processors, GNU's lets each sleep at the end
    of every piece of work instead of waiting for the next one: hundreds of sleeps a step.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=work, name="kvpage-load", daemon=True)
    thread.start()
    thread.join()
    return outcome.result()


@functools.cache
def openmp_address() -> int:
    """Where `GOMP_parallel` of torch's own OpenMP is; 0 if torch has another one."""
    return ctypes.cast(_gomp_parallel(), ctypes.c_void_p).value or 0


def _openmp() -> Callable[[int, int, int], None] | None:
    parallel = _gomp_parallel()
    if parallel is None:
        return None
    return lambda entry, job, threads: parallel(entry, job, threads, 0)


@functools.cache
def _gomp_parallel() -> Any:
    """Run a kernel on torch's own OpenMP threads, if torch has them.

    A second pool would fight with torch's, whose threads wait actively for their next work: on two
    cores that made attention up to twice as slow. `GOMP_parallel` is the stable entry that
    compilers call for `#pragma omp parallel`. Each Python thread has a team of its own there.
    """
    folder = Path(torch.__file__).parent
    for name in (
        *folder.glob("lib/libgomp*"),
        *folder.glob("../torch.libs/libgomp*"),
        "libgomp.so.1",
    ):
        try:
            parallel = ctypes.CDLL(str(name), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
        except (OSError, AttributeError):  # it is not loaded, or this is not Linux
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel
    return None


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="kvpage-attention")


def _on_threads(entry: int, job: int, threads: int) -> None:
    """Run a kernel on threads of our own: where torch does not use GNU's OpenMP."""
    call = _ENTRY(entry)
    others = [_threads().submit(call, job) for _ in range(threads - 1)]
    call(job)
    for other in others:
        other.result()
