"""Which candidate to take, as far as the measurements tell.

Two candidates are told apart if their medians differ by more than the larger of their spreads, the
spread being the largest run less the smallest. With three runs each and nothing but noise between
them that happens about once in twenty times, with two runs about once in nine.
"""

import attrs

from kvpage.comparison.records import CandidateResult, CandidateRun, Comparison, fastest


@attrs.frozen
class Verdict:
    """What the throughputs say.

    Attributes:
        best: the candidate with the highest median; None if there is no verdict.
        equals: candidates that cannot be told apart from it.
        sentences: the same in words, one thought each.
    """

    best: str | None
    equals: tuple[str, ...]
    sentences: tuple[str, ...]


def verdict(comparison: Comparison) -> Verdict:
    """Judge by throughput; without two runs of each candidate there is nothing to judge by."""
    measured = comparison.measured
    best = fastest(measured)
    if best is None:
        return Verdict(None, (), ("Nothing was measured.",))
    if min(len(result.runs) for result in measured) < 2:
        return Verdict(None, (), ("No verdict: it takes two runs of each to know their spread.",))
    if len(measured) < 2:
        return Verdict(None, (), ("No verdict: nothing to compare with.",))
    others = [result for result in measured if result is not best]
    equals = tuple(result.label for result in others if not told_apart(best, result))
    sentences = (
        _of_best(best, equals, others),
        _of_the_rest(best, others),
        _of_waste(measured, best),
    )
    return Verdict(best.label, equals, tuple(sentence for sentence in sentences if sentence))


def told_apart(one: CandidateResult, other: CandidateResult) -> bool:
    """Do the median throughputs differ by more than the larger spread?"""
    difference = abs(_median(one) - _median(other))
    return difference > max(_spread(one), _spread(other))


def _of_best(best: CandidateResult, equals: tuple[str, ...], others: list[CandidateResult]) -> str:
    if len(equals) == len(others):
        return "No candidate is faster than the others by more than the spread of their runs."
    rate = f"{_median(best):.0f} tokens/s"
    if not equals:
        return f"{best.label} is the fastest, at {rate}."
    return f"{best.label} is in front, at {rate}; not told apart from it: {', '.join(equals)}."


def _of_the_rest(best: CandidateResult, others: list[CandidateResult]) -> str:
    """How far behind the other strategies are, each by its best block size."""
    strategies = dict.fromkeys(result.candidate.strategy for result in others)
    behind = []
    for strategy in strategies:
        rival = fastest([r for r in others if r.candidate.strategy == strategy])
        if rival and strategy != best.candidate.strategy and told_apart(best, rival):
            lead = 1 - _median(rival) / _median(best)
            behind.append(f"{rival.label}, the best of {strategy}, is {lead:.0%} slower")
    return f"{'; '.join(behind)}." if behind else ""


def _of_waste(measured: tuple[CandidateResult, ...], best: CandidateResult) -> str:
    """What one would have chosen by utilisation alone."""
    fullest = max(measured, key=_utilisation)
    if fullest is best:
        return f"{best.label} also fills its memory best: {_utilisation(best):.0%} utilisation."
    loss = 1 - _median(fullest) / _median(best)
    cost = f"{loss:.0%} slower" if told_apart(best, fullest) else "no faster"
    return (
        f"By utilisation alone one would take {fullest.label} "
        f"({_utilisation(fullest):.0%} against {_utilisation(best):.0%}), which is {cost}."
    )


def _throughput(run: CandidateRun) -> float:
    return run.throughput


def _median(result: CandidateResult) -> float:
    return result.median(_throughput) or 0.0


def _spread(result: CandidateResult) -> float:
    return result.spread(_throughput) or 0.0


def _utilisation(result: CandidateResult) -> float:
    return result.median(lambda run: run.utilisation) or 0.0
