"""The whole of a tuning over a machine that is known, and measurements that are made up."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest

from kvpage import ConfigError, RequestFailed
from kvpage.comparison import Workload
from kvpage.tuning import Recommendation, TuningSettings
from kvpage.tuning.candidates import Candidate
from kvpage.tuning.recommendation import Measured, choose
from kvpage.tuning.tuning import About, Tuning
from tests.tuning.scenes import COST, SPACE, workload

ABOUT = About("fake", None, max_len=512, kv_bytes=4 * 2**20)
SETTINGS = TuningSettings(space=SPACE, seconds=1e6)
REQUESTS = workload(160, prompt=3.0)


class Bench:
    """Measures what a test says.

    Attributes:
        order: the candidates' strategies as they were measured, the warm-up left out.
    """

    def __init__(self, tokens_s: Mapping[str, float | Exception], *, jitter: float = 0.0) -> None:
        self.order: list[str] = []
        self._tokens_s = tokens_s
        self._jitter = jitter
        self._warm = False

    async def __call__(self, candidate: Candidate, requests: Workload) -> float:
        tokens_s = self._tokens_s[candidate.allocator]
        if self._warm:
            self.order.append(candidate.allocator)
        self._warm = True
        if isinstance(tokens_s, Exception):
            raise tokens_s
        return tokens_s + self._jitter * (len(self.order) // 3 % 3)


def tuning(settings: TuningSettings = SETTINGS, requests: Workload = REQUESTS) -> Tuning:
    return Tuning(ABOUT, settings, requests, COST)


def finalists(found: Recommendation) -> list[str]:
    return [measured.candidate.allocator for measured in found.measured]


async def test_without_seconds_nothing_is_measured() -> None:
    """The simulator decides, and the reasons say so."""
    bench = Bench({})
    found = await tuning(attrs.evolve(SETTINGS, seconds=0.0)).run(bench)
    assert found.measured == ()
    assert found.chosen == found.best
    assert found.state == "simulated"
    assert "Nothing was measured end to end" in " ".join(found.reasons())


async def test_finalists_are_the_best_the_other_strategies_and_the_defaults() -> None:
    """Strategies far behind are left out: rows of 512 cannot compete."""
    found = await tuning().run(Bench({"fixed": 100.0, "dynamic": 100.0}))
    assert finalists(found)[0] == found.best.candidate.allocator
    assert set(finalists(found)) == {"fixed", "dynamic"}
    defaults = Candidate("fixed", 16, ABOUT.kv_bytes, 64, 512)
    assert defaults in [measured.candidate for measured in found.measured]
    assert found.state == "complete"


async def test_finalists_take_turns() -> None:
    """Each round begins with another one, and all have as many rounds."""
    bench = Bench({"fixed": 100.0, "dynamic": 100.0})
    found = await tuning().run(bench)
    assert {len(measured.tokens_s) for measured in found.measured} == {SETTINGS.rounds}
    first, second = bench.order[:3], bench.order[3:6]
    assert second == first[1:] + first[:1]


@pytest.mark.parametrize(("lead", "wins"), [(1.3, True), (1.01, False)])
async def test_a_finalist_wins_beyond_the_spread_of_rounds_only(lead: float, wins: bool) -> None:
    """Rounds differ by up to four tokens a second."""
    _, (first, *_) = tuning().search()
    rival = next(name for name in ("fixed", "dynamic") if name != first.allocator)
    bench = Bench({first.allocator: 100.0, rival: 100.0 * lead}, jitter=2.0)
    found = await tuning().run(bench)
    assert (found.chosen.candidate.allocator == rival) == wins


async def test_a_finalist_that_fails_keeps_its_sentence_and_the_others_go_on() -> None:
    """What was measured before is kept; it is not run again."""
    _, (first, *_) = tuning().search()
    rival = next(name for name in ("fixed", "dynamic") if name != first.allocator)
    bench = Bench({first.allocator: 100.0, rival: RequestFailed("it broke")})
    found = await tuning().run(bench)
    (failed,) = [m for m in found.measured if m.candidate.allocator == rival]
    assert failed.problem == "it broke"
    assert bench.order.count(rival) == 1
    assert found.chosen == found.best


async def test_tells_of_each_result() -> None:
    """After the search and after each measurement, so that an interruption loses little."""
    told: list[Recommendation] = []
    await tuning().run(Bench({"fixed": 9.0, "dynamic": 8.0}), on_result=told.append)
    assert told[0].measured == ()
    runs = [sum(len(m.tokens_s) for m in found.measured) for found in told]
    assert runs == list(range(len(runs)))


async def test_begins_no_round_that_there_is_no_time_for() -> None:
    """Two rounds are measured in any case: one says nothing of the spread."""
    hurried = attrs.evolve(SETTINGS, seconds=1e-9)
    found = await tuning(hurried).run(Bench({"fixed": 9.0, "dynamic": 8.0}))
    assert found.state == "out of time"
    assert {len(measured.tokens_s) for measured in found.measured} == {2}
    assert "too few to keep" in " ".join(found.reasons())


async def test_the_call_can_be_pasted() -> None:
    """It is Python, with the settings that were simulated and measured."""
    found = await tuning(attrs.evolve(SETTINGS, seconds=0.0)).run(Bench({}))
    settings = _called(found.call)
    assert settings == found.settings
    assert settings["max_model_len"] == 512
    assert settings["kv_memory"].endswith("MiB")


def _called(text: str) -> dict[str, Any]:
    class Engine:
        from_pretrained: Callable[..., dict[str, Any]] = dict

    class Kvpage:
        AsyncEngine = Engine

    called: dict[str, Any] = eval(text, {"kvpage": Kvpage})
    return called


async def test_everything_is_json() -> None:
    """Evidence included."""
    found = await tuning().run(Bench({"fixed": 9.0, "dynamic": 8.0}))
    document = json.loads(json.dumps(found.as_dict()))
    assert document["settings"] == found.settings
    assert document["measured"][0]["tokens_s"] == list(found.measured[0].tokens_s)


async def test_says_how_much_is_asked_for() -> None:
    """Output tokens of the trace by its duration."""
    found = await tuning(attrs.evolve(SETTINGS, seconds=0.0)).run(Bench({}))
    assert found.demand_tokens_s == REQUESTS.output_tokens / 159


def test_long_traces_are_thinned_evenly() -> None:
    """Not cut: the beginning of a day is not the day."""
    long = workload(5000)
    asked = tuning(requests=long).demand.requests
    assert sum(r.output_tokens for r in asked) == pytest.approx(40_000, rel=0.05)
    assert asked[-1].arrival_s > 4900


def test_a_trace_that_shares_prefixes_is_cut() -> None:
    """A request whose prefix was left out would find nothing in the cache."""
    long = workload(5000)
    named = [attrs.evolve(r, hash_ids=(number,)) for number, r in enumerate(long.requests)]
    asked = tuning(requests=attrs.evolve(long, requests=tuple(named))).demand.requests
    assert [r.hash_ids for r in asked] == [(number,) for number in range(len(asked))]


def test_the_first_finalist_stays_without_evidence_against_it() -> None:
    """A tie, a spread wider than the lead, a failure; and nothing at all."""
    candidate = Candidate("fixed", 8, 1, 1, 1)
    first, level, noisy, clear, broken = (
        Measured(attrs.evolve(candidate, block_size=size), 1.0, tokens_s, problem)
        for size, tokens_s, problem in [
            (1, (10.0, 10.0), None),
            (2, (10.0, 10.0), None),
            (3, (10.0, 12.0), None),
            (4, (11.0, 11.1), None),
            (5, (20.0, 20.0), "it broke"),
        ]
    )
    assert choose([first, level, noisy, broken]) == first
    assert choose([first, level, clear]) == clear
    assert choose([broken]) is None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"seconds": float("nan")}, "seconds must be a number above 0, got nan"),
        ({"scale": 0.0}, "scale must be a number above 0, got 0"),
        ({"rounds": 1}, "rounds must be a whole number of at least 2, got 1"),
        ({"requests": 0}, "requests must be a whole number of at least 1, got 0"),
        ({"kv_memory": "5 blocks"}, "kv_memory in blocks"),
        ({"kv_memory": "-3"}, "kv_memory must be a number of bytes"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, Any], sentence: str) -> None:
    """In one sentence, before anything is loaded."""
    with pytest.raises(ConfigError, match=sentence):
        TuningSettings(**values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"max_model_len": 600}, "max_model_len is 600, but the model ends at 512"),
        (
            {"max_model_len": 512, "kv_memory": "100 tokens"},
            "max_model_len is 512, but kv_memory holds only 100 tokens",
        ),
    ],
)
def test_settings_that_contradict_the_model_are_refused(
    values: dict[str, Any], sentence: str
) -> None:
    """With both numbers."""
    with pytest.raises(ConfigError, match=sentence):
        tuning(TuningSettings(**values))
