"""Finds the settings of an engine for a workload, a model and a machine.

Closed form, simulation, then measurement: each is dearer and surer than the one before, and sees
fewer candidates. `tune` is the door; what it gives is a `Recommendation`.
"""

from kvpage.tuning.candidates import Candidate, SearchSpace
from kvpage.tuning.cost import Curve, MachineCost, StepCost
from kvpage.tuning.recommendation import Measured, Recommendation
from kvpage.tuning.search import Simulated
from kvpage.tuning.settings import TuningSettings
from kvpage.tuning.tuning import tune

__all__ = [
    "Candidate",
    "Curve",
    "MachineCost",
    "Measured",
    "Recommendation",
    "SearchSpace",
    "Simulated",
    "StepCost",
    "TuningSettings",
    "tune",
]
