"""Replays request traces through the scheduler, block manager and allocators of production.

No model runs: a replay decides every step as an engine would, and pretends that it was computed.
"""

from kvpage.simulator.replay import Replay, ReplaySettings, StepTime
from kvpage.simulator.report import Report, write_csv, write_json
from kvpage.simulator.traces import TraceFile, TraceRequest

__all__ = [
    "Replay",
    "ReplaySettings",
    "Report",
    "StepTime",
    "TraceFile",
    "TraceRequest",
    "write_csv",
    "write_json",
]
