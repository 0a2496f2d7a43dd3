"""What a comparison concludes, and when it does not."""

import pytest

from kvpage import CandidateResult
from kvpage.comparison import Verdict, verdict
from kvpage.comparison.verdict import noise_of, told_apart
from tests.comparison.found import comparison, result


def judged(*results: CandidateResult) -> Verdict:
    return verdict(comparison(results))


def test_the_noise_is_the_largest_spread_of_any_candidate() -> None:
    """As a share of its median: 10 of 100, 8 of 40."""
    results = [result("fixed/8", 95, 100, 105), result("fixed/16", 36, 40, 44)]
    assert noise_of(results) == pytest.approx(0.2)
    assert noise_of([result("fixed/8", 100)]) == 0
    assert noise_of([]) == 0


def test_candidates_are_told_apart_by_more_than_the_noise() -> None:
    """Medians of 100 and 89 are 11 % apart, whichever comes first."""
    one, other = result("fixed/8", 100, 100, 100), result("fixed/16", 89, 89, 89)
    assert told_apart(one, other, 0.10)
    assert told_apart(other, one, 0.10)
    assert not told_apart(one, other, 0.12)


def test_the_fastest_is_named_with_those_it_is_not_told_apart_from() -> None:
    """And the other strategies with how far they are behind."""
    found = judged(
        result("fixed/8", 99, 100, 101),
        result("fixed/16", 98, 99, 100),
        result("contiguous/8", 41, 41, 41),
        result("contiguous/16", 50, 50, 50),
    )
    assert (found.best, found.equals) == ("fixed/8", ("fixed/16",))
    assert found.sentences[:2] == (
        "fixed/8 is in front, at 100 tokens/s; not told apart from it: fixed/16.",
        "contiguous/16, the best of contiguous, is 50% slower.",
    )


def test_equals_of_a_whole_strategy_are_named_together() -> None:
    """All the other sizes of the best one's, all of another's, some of a third's."""
    alike, slow = (100, 100, 100), (50, 50, 50)
    found = judged(
        result("fixed/8", 99, 100, 103),
        *(result(f"{name}/{size}", *alike) for name in ("fixed", "dynamic") for size in (16, 32)),
        result("contiguous/8", *alike),
        result("contiguous/16", *slow),
    )
    assert found.sentences[0] == (
        "fixed/8 is in front, at 100 tokens/s; not told apart from it: "
        "every other fixed, every dynamic, contiguous/8."
    )


def test_one_noisy_candidate_makes_all_of_them_doubtful() -> None:
    """They ran on the same machine: 50 % of noise, where 20 % lie between the others."""
    quiet = (result("fixed/8", 100, 100, 100), result("fixed/16", 80, 80, 80))
    assert judged(*quiet).equals == ()
    assert judged(*quiet, result("fixed/32", 60, 80, 100)).equals == ("fixed/16", "fixed/32")


def test_a_single_winner_has_no_equals() -> None:
    """Its sentence is short."""
    found = judged(result("fixed/8", 99, 100, 101), result("fixed/16", 50, 51, 52))
    assert found.sentences[0] == "fixed/8 is the fastest, at 100 tokens/s."


def test_noise_alone_has_no_winner() -> None:
    """The spreads are larger than every difference."""
    found = judged(result("fixed/8", 80, 100, 120), result("fixed/16", 85, 99, 120))
    assert found.sentences[0] == "No candidate is faster than another by more than the noise, 40%."


def test_two_runs_are_no_verdict() -> None:
    """However far apart the candidates are."""
    found = judged(result("fixed/8", 100, 100, 100), result("fixed/16", 10, 10))
    assert (found.best, found.sentences) == (
        None,
        ("No verdict: it takes 3 runs of each to know the noise.",),
    )


def test_nothing_measured_is_no_verdict() -> None:
    """Nor is a single candidate."""
    assert judged(result("fixed/8")).sentences == ("Nothing was measured.",)
    alone = judged(result("fixed/8", 1, 2, 3))
    assert alone.sentences == ("No verdict: there is nothing to compare with.",)


def test_a_failed_candidate_is_not_judged() -> None:
    """Though it was the fastest before it failed."""
    found = judged(
        result("fixed/8", 99, 100, 101, failure="it broke"),
        result("fixed/16", 50, 51, 51),
        result("fixed/32", 20, 21, 21),
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
