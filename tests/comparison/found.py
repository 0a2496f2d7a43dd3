"""Comparisons that were never measured: their numbers are given."""

from collections.abc import Sequence

import attrs

from kvpage import CandidateResult, CandidateRun, Comparison, ComparisonSettings
from kvpage.comparison import Candidate, Distribution, Machine, MemoryFilm, Workload
from kvpage.plugins import AllocatorSpec
from kvpage.simulator import TraceRequest
from kvpage.simulator.instruments import Sample

MACHINE = Machine("A <fast> processor", 2, 2**34, "cpu", "Linux", (("Python", "3.11"),))
FILM = MemoryFilm((0.0, 1.0, 3.0), (b"\0\2\3", b"\1\4\5", b"\0\0\1"), 1)


def run(
    tokens_per_second: float, *, utilisation: float = 0.5, preemptions: int = 0
) -> CandidateRun:
    """A run of 100 tokens."""
    half_full = Sample(32, 40, 8, 0, 2, 1, 5)
    return CandidateRun(
        duration_s=100 / tokens_per_second,
        output_tokens=100,
        first_token=Distribution((0.3, 0.1, 0.2)),
        inter_token=Distribution((0.02, 0.01)),
        utilisation=utilisation,
        internal_waste=0.1,
        external_waste=0.0,
        running=2.5,
        steps=40,
        step_s=0.02,
        host_s=0.0003,
        preemptions=preemptions,
        recomputed_tokens=0,
        cached_prompt_tokens=0,
        peak_kv_bytes=5000,
        peak_table_bytes=64,
        peak_process_bytes=2**30,
        series=((0.5, half_full), (1.5, half_full)),
        film=FILM,
    )


def result(
    label: str, *speeds: float, utilisation: float = 0.5, failure: str | None = None
) -> CandidateResult:
    """A result with a run of each of these speeds; the label is like `"fixed/16"`."""
    name, _, size = label.rpartition("/")
    candidate = Candidate(AllocatorSpec.parse(name), int(size))
    runs = tuple(run(speed, utilisation=utilisation) for speed in speeds)
    return CandidateResult(candidate, 8, runs, failure)


def comparison(results: Sequence[CandidateResult]) -> Comparison:
    """A complete comparison of these."""
    return Comparison(
        model="a <model>",
        machine=MACHINE,
        settings=ComparisonSettings(),
        workload=Workload("mine", (TraceRequest(0.0, 20, 10),) * 10),
        max_model_len=64,
        slots=64,
        token_bytes=1000,
        results=tuple(results),
        state="complete",
        elapsed_s=12.0,
    )


def interrupted(found: Comparison) -> Comparison:
    """The same, cut short."""
    return attrs.evolve(found, state="interrupted")
