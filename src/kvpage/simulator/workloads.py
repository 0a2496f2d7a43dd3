"""Named workloads for those without a trace: lengths and gaps drawn from quantiles of public ones.

A number is drawn by inverting the distribution function (Devroye, Non-Uniform Random Variate
Generation, 1986, section II.2), which between the quantiles below is a straight line in log(1 + x):
with plain lines the sparse upper tails of these traces come out twice as heavy. Prompt,
output and gap of a request are drawn independently. `benchmarks/workload_fit.py` makes the
quantiles from the traces, and the table of the fit; `docs/reference/simulator.md` has that table
and the traces' sources and licences.
"""

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import count as count_from
from itertools import islice
from types import MappingProxyType

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.errors import ConfigError
from kvpage.traffic import TraceRequest

PERCENTILES = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.9, 100)
"""The percentages of a distribution that `Quantiles` gives values for."""

SESSION_BLOCK = 64
"""Tokens per hash id of the requests of `Sessions`."""

_BLOCK_BITS = 32
_DRAWN_AT_ONCE = 1024


@attrs.frozen
class Quantiles:
    """A distribution by its quantiles at `PERCENTILES`."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, numbers: str) -> "Quantiles":
        """Read one number for each of `PERCENTILES`, separated by spaces."""
        return cls(tuple(map(float, numbers.split())))

    def draw(self, random: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        """`float64[count]` independent numbers."""
        percentages = random.uniform(0, 100, count)
        return np.expm1(np.interp(percentages, PERCENTILES, np.log1p(self.values)))

    def lengths(self, random: np.random.Generator, count: int) -> list[int]:
        """`count` independent numbers of tokens, at least 1."""
        lengths: list[int] = np.rint(self.draw(random, count)).astype(np.int64).clip(1).tolist()
        return lengths


@attrs.frozen
class Requests:
    """Requests that know nothing of each other.

    Attributes:
        source: the trace that the quantiles are from.
        prompt: tokens of the prompt.
        output: tokens of the output.
        gap_s: seconds from a request to the next.
    """

    source: str
    prompt: Quantiles
    output: Quantiles
    gap_s: Quantiles

    def endless(self, random: np.random.Generator) -> Iterator[TraceRequest]:
        """Requests in order of arrival, without end."""
        now_s = 0.0
        while True:
            gaps = self.gap_s.draw(random, _DRAWN_AT_ONCE).tolist()
            prompts = self.prompt.lengths(random, _DRAWN_AT_ONCE)
            outputs = self.output.lengths(random, _DRAWN_AT_ONCE)
            for gap_s, prompt, output in zip(gaps, prompts, outputs, strict=True):
                now_s += gap_s
                yield TraceRequest(now_s, prompt, output)


@attrs.frozen
class Sessions:
    """Sessions of calls whose prompts repeat all that was said before, and grow.

    Attributes:
        source: the trace that the quantiles are from.
        calls: calls of a session.
        first_prompt: tokens of a session's first prompt.
        growth: tokens that a prompt is longer than the one before.
        output: tokens of the output of a call.
        pause_s: seconds from a call to the next of the session.
        session_gap_s: mean seconds from the start of a session to the start of the next; these
            gaps are exponential, since the trace does not tell.
    """

    source: str
    calls: Quantiles
    first_prompt: Quantiles
    growth: Quantiles
    output: Quantiles
    pause_s: Quantiles
    session_gap_s: float = 60.0

    def endless(self, random: np.random.Generator) -> Iterator[TraceRequest]:
        """Requests of all sessions in order of arrival, without end."""
        upcoming: list[_Upcoming] = []
        start_s = 0.0
        for number in count_from():
            _enter(upcoming, number, self._session(number, start_s, random))
            start_s += random.exponential(self.session_gap_s)
            while upcoming and upcoming[0][0] < start_s:
                _, owner, request, rest = heappop(upcoming)
                yield request
                _enter(upcoming, owner, rest)

    def _session(
        self, number: int, start_s: float, random: np.random.Generator
    ) -> Iterator[TraceRequest]:
        """The calls of one session."""
        calls = self.calls.lengths(random, 1)[0]
        prompts = np.rint(self.growth.draw(random, calls)).astype(np.int64)
        prompts[0] = self.first_prompt.lengths(random, 1)[0]
        pauses = self.pause_s.draw(random, calls)
        pauses[0] = start_s
        rows = zip(
            pauses.cumsum().tolist(),
            prompts.cumsum().tolist(),
            self.output.lengths(random, calls),
            strict=True,
        )
        first_id = number << _BLOCK_BITS
        for arrival_s, prompt, output in rows:
            ids = range(first_id, first_id + -(-prompt // SESSION_BLOCK))
            yield TraceRequest(arrival_s, prompt, output, tuple(ids))


_Upcoming = tuple[float, int, TraceRequest, Iterator[TraceRequest]]
"""Arrival of a session's next call, the session's number, the call, the calls after it."""


def _enter(upcoming: list[_Upcoming], number: int, session: Iterator[TraceRequest]) -> None:
    """Put the next call of a session in the heap, if it has one."""
    request = next(session, None)
    if request is not None:
        heappush(upcoming, (request.arrival_s, number, request, session))


class DrawnTrace:
    """A trace of a named workload. Iterating draws the same requests every time.

    Args:
        name: a key of `WORKLOADS`.
        num_requests: how many to draw.
        seed: other seeds, other requests.

    Raises:
        ConfigError: no workload of this name.
    """

    def __init__(self, name: str, *, num_requests: int, seed: int = 0) -> None:
        if name not in WORKLOADS:
            raise ConfigError(f"no workload named {name!r}; there are: {', '.join(WORKLOADS)}")
        self.name = name
        self.hash_block_size = SESSION_BLOCK
        self._num_requests = num_requests
        self._seed = seed
        self._drawn = 0

    @property
    def share_read(self) -> float:
        """How much of the trace the running iteration has drawn, from 0 to 1."""
        return self._drawn / self._num_requests

    def __iter__(self) -> Iterator[TraceRequest]:
        endless = WORKLOADS[self.name].endless(np.random.default_rng(self._seed))
        for drawn, request in enumerate(islice(endless, self._num_requests), start=1):
            self._drawn = drawn
            yield request


WORKLOADS: Mapping[str, Requests | Sessions] = MappingProxyType(
    {
        "chat": Requests(
            source="azure_conv_2023",
            prompt=Quantiles.of(
                "2 29 181 207 387 403 703 1020 1070 1130 1320 2730 4080 4100 4140 6180 14000"
            ),
            output=Quantiles.of("7 16 41 54 77 91 103 129 177 384 400 424 451 540 601 954 1000"),
            gap_s=Quantiles.of(
                "0 0.001 0.006 0.016 0.037 0.061 0.087 0.119 0.159 0.214 "
                "0.289 0.421 0.565 0.749 0.89 1.41 4.32"
            ),
        ),
        "code": Requests(
            source="azure_code_2023",
            prompt=Quantiles.of(
                "3 17 75 147 386 770 1080 1470 1910 2430 3190 5190 7300 7440 7440 7440 7440"
            ),
            output=Quantiles.of("6 6 6 7 8 9 11 13 16 20 29 55 90 171 252 825 1900"),
            gap_s=Quantiles.of(
                "0 0 0 0 0.001 0.003 0.015 0.064 0.095 0.1 0.16 0.273 0.401 0.799 2.21 79.2 217"
            ),
        ),
        "summarise": Requests(
            source="lengths_arxiv_summ",
            prompt=Quantiles.of(
                "1 77 745 1240 1790 2140 2440 2710 2980 3240 3480 3700 3820 3890 3940 4000 4050"
            ),
            output=Quantiles.of(
                "10 36 61 78 104 125 145 166 192 223 268 374 765 2760 3210 3840 4060"
            ),
            gap_s=Quantiles.of(
                "0 0.01 0.053 0.109 0.225 0.362 0.51 0.687 0.915 1.19 1.59 2.31 3 3.87 4.7 7.25 11"
            ),
        ),
        "reasoning": Requests(
            source="servegen_deepseek_r1",
            prompt=Quantiles.of(
                "4 9 25 27 50 204 208 276 389 460 578 922 1900 5040 12500 28000 36200"
            ),
            output=Quantiles.of(
                "66 147 223 274 352 408 462 524 599 757 1270 1490 1650 2040 4860 17200 26600"
            ),
            gap_s=Quantiles.of(
                "0 0 0.003 0.01 0.037 0.072 0.119 0.177 0.248 0.344 0.488 "
                "0.747 1.02 1.41 1.71 2.63 4.34"
            ),
        ),
        "agent": Sessions(
            source="claude_code_sessions",
            calls=Quantiles.of(
                "21 21.6 24 27 35 60 68 86 102 139 196 306 1160 1650 1810 1960 1970"
            ),
            first_prompt=Quantiles.of(
                "9590 11900 21300 23400 25200 26700 27500 28200 29000 30400 "
                "40800 54100 61400 120000 140000 157000 159000"
            ),
            growth=Quantiles.of(
                "0 0 26.7 86.7 146 212 289 386 515 697 1010 1750 2830 4600 6830 47000 474000"
            ),
            output=Quantiles.of(
                "1 10 58.9 91 122 148 185 248 345 510 820 1480 2520 4350 6100 13500 24400"
            ),
            pause_s=Quantiles.of(
                "0 0.869 3.33 4.3 5.72 7.36 9.35 11.9 16.1 23.1 38.5 112 226 822 3080 147000 633000"
            ),
        ),
    }
)
