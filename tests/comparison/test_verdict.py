"""What a comparison concludes, and when it does not."""

from kvpage import CandidateResult
from kvpage.comparison import Verdict, verdict
from kvpage.comparison.verdict import told_apart
from tests.comparison.found import comparison, result


def judged(*results: CandidateResult) -> Verdict:
    return verdict(comparison(results))


def test_candidates_are_told_apart_by_more_than_the_larger_spread() -> None:
    """Medians of 100 and 90 differ by 10: more than spreads of 9, not more than one of 10."""
    steady, other = result("fixed/8", 95, 100, 104), result("fixed/16", 90, 90, 90)
    assert told_apart(steady, other)
    assert not told_apart(result("fixed/8", 95, 100, 105), other)
    assert not told_apart(other, result("fixed/8", 95, 100, 105))


def test_the_fastest_is_named_with_those_it_is_not_told_apart_from() -> None:
    """And the other strategies with how far they are behind."""
    found = judged(
        result("fixed/8", 99, 100, 101),
        result("fixed/16", 98, 99, 100),
        result("contiguous/8", 40, 41, 42),
        result("contiguous/16", 49, 50, 51),
    )
    assert (found.best, found.equals) == ("fixed/8", ("fixed/16",))
    assert found.sentences[:2] == (
        "fixed/8 is in front, at 100 tokens/s; not told apart from it: fixed/16.",
        "contiguous/16, the best of contiguous, is 50% slower.",
    )


def test_a_single_winner_has_no_equals() -> None:
    """Its sentence is short."""
    found = judged(result("fixed/8", 99, 100, 101), result("fixed/16", 50, 51, 52))
    assert found.sentences[0] == "fixed/8 is the fastest, at 100 tokens/s."


def test_noise_alone_has_no_winner() -> None:
    """The spreads are larger than every difference."""
    found = judged(result("fixed/8", 80, 100, 120), result("fixed/16", 85, 99, 120))
    assert found.sentences[0] == (
        "No candidate is faster than the others by more than the spread of their runs."
    )


def test_one_run_each_is_no_verdict() -> None:
    """However far apart they are."""
    found = judged(result("fixed/8", 100), result("fixed/16", 10, 10))
    assert (found.best, found.sentences) == (
        None,
        ("No verdict: it takes two runs of each to know their spread.",),
    )


def test_nothing_measured_is_no_verdict() -> None:
    """Nor is a single candidate."""
    assert judged(result("fixed/8")).sentences == ("Nothing was measured.",)
    assert judged(result("fixed/8", 1, 2)).sentences == ("No verdict: nothing to compare with.",)


def test_a_failed_candidate_is_not_judged() -> None:
    """Though it was the fastest before it failed."""
    found = judged(
        result("fixed/8", 99, 100, failure="it broke"),
        result("fixed/16", 50, 51),
        result("fixed/32", 20, 21),
    )
    assert found.best == "fixed/16"


def test_utilisation_alone_would_have_chosen_another() -> None:
    """The fullest memory is not always the fastest."""
    found = judged(
        result("fixed/8", 99, 100, 101, utilisation=0.8),
        result("fixed/16", 50, 50, 51, utilisation=0.9),
    )
    assert found.sentences[-1] == (
        "By utilisation alone one would take fixed/16 (90% against 80%), which is 50% slower."
    )


def test_the_fullest_may_be_the_fastest() -> None:
    """Then that is said."""
    found = judged(
        result("fixed/8", 99, 100, 101, utilisation=0.95),
        result("fixed/16", 50, 50, 51, utilisation=0.9),
    )
    assert found.sentences[-1] == "fixed/8 also fills its memory best: 95% utilisation."


def test_the_middle_run_of_two_is_the_slower() -> None:
    """So that pictures do not flatter."""
    middle = result("fixed/8", 30, 20).middle_run
    assert middle is not None
    assert middle.throughput == 20
