"""Which candidate to take, as far as the measurements tell.

The noise of a comparison is the largest spread of any candidate: its fastest run less its slowest,
as a share of its median. Two candidates are told apart if their medians differ by a larger share.
With three runs each and nothing but normally distributed noise, somebody is called slower than the
best by mistake in 7 of 100 comparisons, whether of two candidates or of twelve; with five runs in
less than 1, with two in 30, so these give no verdict. Taking the larger spread of the two alone
would be wrong in 56 of 100 comparisons of twelve candidates: the best of many was lucky.
"""

from collections.abc import Sequence

import attrs

from kvpage.comparison.figures import throughput
from kvpage.comparison.records import CandidateResult, Comparison, fastest

LEAST_RUNS = 3


@attrs.frozen
class Verdict:
    """What the throughputs say.

    Attributes:
        best: the candidate with the highest median; None if there is no verdict.
        equals: candidates that cannot be told apart from it.
        noise: the largest spread of any candidate, as a share of its median.
        sentences: the same in words, one thought each.
    """

    best: str | None
    equals: tuple[str, ...]
    noise: float
    sentences: tuple[str, ...]


def verdict(comparison: Comparison) -> Verdict:
    """Judge by throughput, where there are runs enough to know the noise."""
    measured = comparison.measured
    best, noise = fastest(measured), noise_of(measured)
    missing = _what_is_missing(measured)
    if best is None or missing:
        return Verdict(None, (), noise, (missing,))
    others = [result for result in measured if result is not best]
    slower = [result for result in others if told_apart(best, result, noise)]
    equals = [result for result in others if result not in slower]
    sentences = (
        _of_best(best, equals, slower, noise),
        _of_strategies(best, slower, comparison),
        _of_waste(measured, best, slower),
    )
    labels = tuple(result.label for result in equals)
    return Verdict(best.label, labels, noise, tuple(filter(None, sentences)))


def noise_of(results: Sequence[CandidateResult]) -> float:
    """The largest spread of any of these, as a share of its median; 0 with single runs."""
    return max((_spread(result) / _median(result) for result in results), default=0.0)


def told_apart(one: CandidateResult, other: CandidateResult, noise: float) -> bool:
    """Do the medians differ by a larger share than `noise`?"""
    low, high = sorted((_median(one), _median(other)))
    return high - low > noise * high


def _what_is_missing(measured: Sequence[CandidateResult]) -> str:
    """Why there can be no verdict; empty if there can."""
    if not measured:
        return "Nothing was measured."
    if len(measured) < 2:
        return "No verdict: there is nothing to compare with."
    if min(len(result.runs) for result in measured) < LEAST_RUNS:
        return f"No verdict: it takes {LEAST_RUNS} runs of each to know the noise."
    return ""


def _of_best(
    best: CandidateResult,
    equals: Sequence[CandidateResult],
    slower: Sequence[CandidateResult],
    noise: float,
) -> str:
    if not slower:
        return f"No candidate is faster than another by more than the noise, {noise:.0%}."
    rate = f"{_median(best):.0f} tokens/s"
    if not equals:
        return f"{best.label} is the fastest, at {rate}."
    names = _names(best, equals, slower)
    return f"{best.label} is in front, at {rate}; not told apart from it: {names}."


def _names(
    best: CandidateResult, equals: Sequence[CandidateResult], slower: Sequence[CandidateResult]
) -> str:
    """Labels, or `every fixed` where they are all of a strategy and several."""
    names: list[str] = []
    for strategy in dict.fromkeys(result.candidate.strategy for result in equals):
        labels = [r.label for r in equals if r.candidate.strategy == strategy]
        others = any(r.candidate.strategy == strategy for r in slower)
        other = "other " if strategy == best.candidate.strategy else ""
        names += labels if others or len(labels) < 2 else [f"every {other}{strategy}"]
    return ", ".join(names)


def _of_strategies(
    best: CandidateResult, slower: Sequence[CandidateResult], comparison: Comparison
) -> str:
    """How far behind the other strategies are, each by its best block size."""
    rivals = (comparison.fastest_of(strategy) for strategy in comparison.strategies)
    behind = [
        f"{rival.label}, the best of {rival.candidate.strategy}, is {_lag(rival, best)} slower"
        for rival in rivals
        if rival is not None
        and rival in slower
        and rival.candidate.strategy != best.candidate.strategy
    ]
    return f"{'; '.join(behind)}." if behind else ""


def _of_waste(
    measured: Sequence[CandidateResult], best: CandidateResult, slower: Sequence[CandidateResult]
) -> str:
    """What one would have chosen by utilisation alone."""
    fullest = max(measured, key=_utilisation)
    if fullest is best:
        return f"{best.label} also fills its memory best: {_utilisation(best):.0%} utilisation."
    cost = f"{_lag(fullest, best)} slower" if fullest in slower else "no faster"
    return (
        f"By utilisation alone one would take {fullest.label} "
        f"({_utilisation(fullest):.0%} against {_utilisation(best):.0%}), which is {cost}."
    )


def _lag(result: CandidateResult, best: CandidateResult) -> str:
    return f"{1 - _median(result) / _median(best):.0%}"


def _median(result: CandidateResult) -> float:
    return result.median(throughput) or 0.0


def _spread(result: CandidateResult) -> float:
    return result.spread(throughput) or 0.0


def _utilisation(result: CandidateResult) -> float:
    return result.median(lambda run: run.utilisation) or 0.0
