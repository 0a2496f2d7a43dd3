"""Public traces, where they are at hand: what others measured comes out here.

`docs/explanation/strategies-on-traces.md` has the figures for all of them, and where to get them.
"""

from itertools import islice
from pathlib import Path

import attrs
import pytest

from kvpage.allocators.contiguous import ContiguousAllocator
from kvpage.allocators.fixed import FixedAllocator
from kvpage.plugins import AllocatorSpec
from kvpage.simulator import Replay, ReplaySettings, Report, TraceFile

TRACES = Path(__file__).parents[3] / "shared" / "traces"

FIXED = AllocatorSpec("fixed", FixedAllocator, 16)
CONTIGUOUS = AllocatorSpec("contiguous", ContiguousAllocator, 16)


def trace(name: str) -> TraceFile:
    path = TRACES / f"{name}.csv.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not at ../shared/traces")
    return TraceFile(path)


def saturated(name: str, allocator: AllocatorSpec, num_requests: int) -> Report:
    return Replay(islice(trace(name), num_requests), allocator, ReplaySettings(), name=name).run()


def test_short_requests_fill_blocks_and_leave_rows_empty() -> None:
    """ServeGen's middle model: 95 % of the slots in use with blocks of 16, 12 % with rows."""
    fixed = saturated("servegen_m_mid", FIXED, 12_000)
    contiguous = saturated("servegen_m_mid", CONTIGUOUS, 12_000)
    assert fixed.utilisation == pytest.approx(0.95, abs=0.01)
    assert contiguous.utilisation == pytest.approx(0.12, abs=0.01)
    assert fixed.running is not None
    assert contiguous.running == 48  # 100,000 slots are 48 rows of 2,048
    assert fixed.running / contiguous.running == pytest.approx(8, abs=0.5)


def test_long_prompts_fill_rows_better() -> None:
    """Summaries of papers: 65 % with rows, where the articles say 20 to 40 %."""
    contiguous = saturated("lengths_arxiv_summ", CONTIGUOUS, 10_000)
    assert contiguous.utilisation == pytest.approx(0.65, abs=0.01)


def test_conversations_share_more_than_a_third_of_their_prompts() -> None:
    """Mooncake's conversations with a cache that keeps everything: 37 % of prompt tokens."""
    settings = ReplaySettings(
        slots=200_000_000, max_model_len=200_000, max_num_seqs=64, prefix_cache=True
    )
    spec = AllocatorSpec("fixed", FixedAllocator, 512)
    # What is answered plays no part, so one token will do.
    prompts = (attrs.evolve(r, output_tokens=1) for r in trace("mooncake_conversation"))
    report = Replay(prompts, spec, settings, hash_block_size=512).run()
    assert report.prefix_hit_rate == pytest.approx(0.37, abs=0.01)
