"""Replays request traces through the scheduler, block manager and allocators of production.

No model runs: a replay decides every step as an engine would, and pretends that it was computed.
"""

from kvpage.simulator.plot import check_plot, plot
from kvpage.simulator.replay import Replay
from kvpage.simulator.report import Report, write_csv, write_json
from kvpage.simulator.settings import ReplaySettings, StepClock, StepTime
from kvpage.simulator.traces import MOONCAKE_BLOCK, TraceFile
from kvpage.simulator.workloads import WORKLOADS, DrawnTrace
from kvpage.traffic import TraceRequest

__all__ = [
    "MOONCAKE_BLOCK",
    "WORKLOADS",
    "DrawnTrace",
    "Replay",
    "ReplaySettings",
    "Report",
    "StepClock",
    "StepTime",
    "TraceFile",
    "TraceRequest",
    "check_plot",
    "plot",
    "write_csv",
    "write_json",
]
