"""The same requests, end to end, through several strategies and block sizes on a real model.

`compare` is the door. What it gives is a `Comparison`; `html_report` and `json_document` write it
down.
"""

from kvpage.comparison.comparing import compare
from kvpage.comparison.documents import json_document
from kvpage.comparison.measuring import Progress
from kvpage.comparison.records import (
    CandidateResult,
    CandidateRun,
    Comparison,
    Distribution,
    Machine,
    MemoryFilm,
)
from kvpage.comparison.report import html_report
from kvpage.comparison.settings import Candidate, ComparisonSettings
from kvpage.comparison.verdict import Verdict, verdict
from kvpage.comparison.workload import Workload

__all__ = [
    "Candidate",
    "CandidateResult",
    "CandidateRun",
    "Comparison",
    "ComparisonSettings",
    "Distribution",
    "Machine",
    "MemoryFilm",
    "Progress",
    "Verdict",
    "Workload",
    "compare",
    "html_report",
    "json_document",
    "verdict",
]
