"""kvpage: async LLM inference in your own process, with a pluggable KV-cache allocator.

See `AsyncEngine` to generate text, and `Allocator` to write a strategy of your own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvpage.allocators.base import Allocator, AllocatorPlugin, Grant, Slidable, Trimmable
from kvpage.blocks import (
    AllocatorStatistics,
    BlockId,
    Extent,
    PoolGeometry,
    PoolStatistics,
    SequenceId,
)
from kvpage.chat import Chat
from kvpage.config import EngineConfig, KVMemory
from kvpage.engine import AsyncEngine
from kvpage.errors import (
    AllocatorFault,
    ConfigError,
    DuplicateRequest,
    EngineBroken,
    EngineBusy,
    EngineClosed,
    KvpageError,
    LedgerError,
    OutgrewPool,
    OutOfBlocks,
    PluginError,
    RequestError,
    RequestFailed,
    RequestTooLong,
    StepFailed,
    UnsupportedModelError,
)
from kvpage.estimate import Estimate
from kvpage.grammar import StructuredOutputs
from kvpage.hookspecs import hookimpl
from kvpage.plugins import InstalledAllocator, installed_allocators
from kvpage.sampling import Logprobs, SamplingParams
from kvpage.stats import (
    BlockImage,
    BlockMap,
    EngineHealth,
    EngineStatistics,
    SequenceBlocks,
    SequenceImage,
    SwapStatistics,
)
from kvpage.stream import Choice, Completion, Timings, Token, TokenStream, Usage
from kvpage.traffic import TraceRequest, Traffic

if TYPE_CHECKING:
    from kvpage.comparison import (
        CandidateResult,
        CandidateRun,
        Comparison,
        ComparisonSettings,
        compare,
    )
    from kvpage.tuning import Recommendation, SearchSpace, TuningSettings, tune

__version__ = "0.1.0"

__all__ = [
    "Allocator",
    "AllocatorFault",
    "AllocatorPlugin",
    "AllocatorStatistics",
    "AsyncEngine",
    "BlockId",
    "BlockImage",
    "BlockMap",
    "CandidateResult",
    "CandidateRun",
    "Chat",
    "Choice",
    "Comparison",
    "ComparisonSettings",
    "Completion",
    "ConfigError",
    "DuplicateRequest",
    "EngineBroken",
    "EngineBusy",
    "EngineClosed",
    "EngineConfig",
    "EngineHealth",
    "EngineStatistics",
    "Estimate",
    "Extent",
    "Grant",
    "InstalledAllocator",
    "KVMemory",
    "KvpageError",
    "LedgerError",
    "Logprobs",
    "OutOfBlocks",
    "OutgrewPool",
    "PluginError",
    "PoolGeometry",
    "PoolStatistics",
    "Recommendation",
    "RequestError",
    "RequestFailed",
    "RequestTooLong",
    "SamplingParams",
    "SearchSpace",
    "SequenceBlocks",
    "SequenceId",
    "SequenceImage",
    "Slidable",
    "StepFailed",
    "StructuredOutputs",
    "SwapStatistics",
    "Timings",
    "Token",
    "TokenStream",
    "TraceRequest",
    "Traffic",
    "Trimmable",
    "TuningSettings",
    "UnsupportedModelError",
    "Usage",
    "compare",
    "hookimpl",
    "installed_allocators",
    "tune",
]

_IMPORTED_WHEN_USED = {
    **dict.fromkeys(
        ("CandidateResult", "CandidateRun", "Comparison", "ComparisonSettings", "compare"),
        "kvpage.comparison",
    ),
    **dict.fromkeys(("Recommendation", "SearchSpace", "TuningSettings", "tune"), "kvpage.tuning"),
}
"""A fifth of the time of `import kvpage`, which a web app that generates text need not spend."""


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module 'kvpage' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_IMPORTED_WHEN_USED[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
