"""From all candidates to a few finalists: the closed form narrows, the simulator decides.

The simulator runs the engine's own scheduler, block manager and allocator over the trace, all
requests waiting from the beginning, and a `MachineCost` says how long each of its steps takes. It
is asked for the neighbours of the best candidate, one setting changed at a time, until none is
better (coordinate ascent from the best in closed form); then the cheapest settings are taken that
lose less than `TOLERANCE`.
"""

from collections.abc import Callable, Iterator, Sequence

import attrs

from kvpage.errors import ConfigError, KvpageError
from kvpage.simulator import MOONCAKE_BLOCK, Replay, ReplaySettings
from kvpage.traffic import TraceRequest
from kvpage.tuning.candidates import Candidate, SearchSpace
from kvpage.tuning.cost import MachineCost
from kvpage.tuning.estimate import Lengths, estimate

TOLERANCE = 0.01
"""A difference in simulated throughput that is given up for less memory or smaller steps."""

THRIFT = ("kv_bytes", "max_batch_tokens", "max_num_seqs")
"""What is saved, in this order: memory, time between two tokens, rows."""

HOPELESS = 0.7
"""Below this share of the best estimate in closed form, a candidate is not worth a simulation."""

MAX_ROUNDS = 8


@attrs.frozen
class Simulated:
    """What the simulator says of a candidate.

    Attributes:
        candidate: the settings.
        tokens_s: output tokens a second; 0 if it cannot serve the requests.
        step_s: mean seconds of a step, so between two tokens of a request.
        running: mean sequences in the batch.
        utilisation: slots with a live token, of all slots.
        internal_waste: allocated slots without a token, of allocated slots.
        preemptions: how often a sequence lost its blocks.
        problem: why it cannot serve the requests; None if it can.
    """

    candidate: Candidate
    tokens_s: float
    step_s: float = 0.0
    running: float = 0.0
    utilisation: float = 0.0
    internal_waste: float = 0.0
    preemptions: int = 0
    problem: str | None = None


@attrs.frozen(eq=False)
class Demand:
    """The requests to tune for.

    Attributes:
        requests: in order; none longer than `max_model_len`.
        max_model_len: longest sequence that the engine is to serve, in tokens.
        hash_block_size: tokens that one hash id stands for.
    """

    requests: Sequence[TraceRequest]
    max_model_len: int
    hash_block_size: int = MOONCAKE_BLOCK

    def at_once(self) -> Iterator[TraceRequest]:
        """The same requests, all of them waiting from the beginning."""
        return (attrs.evolve(request, arrival_s=0.0) for request in self.requests)

    @property
    def shares(self) -> bool:
        """Does it say which prompts begin alike?"""
        return any(request.hash_ids for request in self.requests)


def simulate(candidate: Candidate, demand: Demand, cost: MachineCost) -> Simulated:
    """Replay the requests under the candidate; whatever goes wrong is its `problem`."""
    slots = candidate.num_slots(cost.bytes_per_token)
    if slots < demand.max_model_len:
        return _unfit(candidate, f"{slots} tokens of memory, less than max_model_len")
    settings = ReplaySettings(
        slots=slots,
        max_model_len=demand.max_model_len,
        max_num_seqs=candidate.max_num_seqs,
        max_batch_tokens=candidate.max_batch_tokens,
        prefix_cache=demand.shares,
        step_time=cost.at(candidate.block_size),
    )
    allocator = _with_block_size(candidate)
    try:
        replay = Replay(
            demand.at_once(), allocator, settings, hash_block_size=demand.hash_block_size
        )
        report = replay.run()
    except KvpageError as error:
        return _unfit(candidate, str(error))
    except Exception as error:  # a plugin's strategy raises whatever it likes
        return _unfit(candidate, f"{type(error).__name__}: {error}")
    if report.failed:
        return _unfit(candidate, f"{report.failed} of {report.requests} requests failed")
    assert report.simulated_s is not None, "there is a clock"
    return Simulated(
        candidate,
        tokens_s=report.output_tokens / report.simulated_s,
        step_s=report.simulated_s / report.steps,
        running=report.running or 0.0,
        utilisation=report.utilisation or 0.0,
        internal_waste=report.internal_waste or 0.0,
        preemptions=report.preemptions,
    )


def _unfit(candidate: Candidate, problem: str) -> Simulated:
    return Simulated(candidate, tokens_s=0.0, problem=problem)


def _with_block_size(candidate: Candidate) -> str:
    separator = "," if ":" in candidate.allocator else ":"
    return f"{candidate.allocator}{separator}block_size={candidate.block_size}"


class Search:
    """Simulates candidates, each at most once, and finds a good one.

    Attributes:
        simulated: everything that was simulated so far, in that order.
        num_candidates: those that were estimated in closed form.
    """

    def __init__(
        self,
        space: SearchSpace,
        demand: Demand,
        cost: MachineCost,
        *,
        budget_bytes: int,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Estimate every candidate in closed form.

        Raises:
            ConfigError: the memory does not hold the longest sequence.
        """
        self.simulated: dict[Candidate, Simulated] = {}
        self._axes = space.axes(budget_bytes)
        self._demand = demand
        self._cost = cost
        self._progress = progress
        self._estimates = _estimates(space, demand, cost, budget_bytes)
        self.num_candidates = len(self._estimates)

    def simulate(self, candidate: Candidate) -> Simulated:
        """What the simulator says; again, from memory."""
        if candidate not in self.simulated:
            self._progress(f"simulated {len(self.simulated)} candidates, now {candidate}")
            self.simulated[candidate] = simulate(candidate, self._demand, self._cost)
        return self.simulated[candidate]

    def best(self) -> Simulated:
        """The cheapest candidate within `TOLERANCE` of the best that was found.

        Raises:
            ConfigError: no candidate can serve the requests; says why one of them cannot.
        """
        peak = self._climb(max(self._estimates, key=self._estimates.__getitem__))
        if peak.problem is not None:
            raise ConfigError(f"no candidate can serve these requests: {peak.problem}")
        return self._save(peak)

    def best_of(self, allocator: str) -> Simulated | None:
        """The best candidate of a strategy that was simulated; None if it cannot serve."""
        found = [s for s in self.simulated.values() if s.candidate.allocator == allocator]
        best = max(found, key=_tokens_s, default=None)
        return best if best is not None and best.problem is None else None

    def neighbours(self, candidate: Candidate) -> dict[str, tuple[Simulated, ...]]:
        """For each setting, the candidates that differ in it alone, `candidate` among them."""
        return {
            name: tuple(self.simulate(other) for other in self._along(candidate, name))
            for name in self._axes
        }

    def _climb(self, start: Candidate) -> Simulated:
        """Change one setting at a time as long as that helps."""
        peak = self.simulate(start)
        for _ in range(MAX_ROUNDS):
            before = peak
            for name in self._axes:
                hopeful = filter(self._hopeful, self._along(peak.candidate, name))
                peak = max((peak, *map(self.simulate, hopeful)), key=_tokens_s)
            if peak is before:
                break
        return peak

    def _along(self, candidate: Candidate, name: str) -> list[Candidate]:
        return [attrs.evolve(candidate, **{name: value}) for value in self._axes[name]]

    def _hopeful(self, candidate: Candidate) -> bool:
        return self._estimates.get(candidate, 0.0) >= HOPELESS * max(self._estimates.values())

    def _save(self, peak: Simulated) -> Simulated:
        """Take the smallest value of each setting that stays within `TOLERANCE` of `peak`."""
        enough = (1 - TOLERANCE) * peak.tokens_s
        chosen = peak
        for name in THRIFT:
            hopeful = filter(self._hopeful, self._along(chosen.candidate, name))
            cheaper = (s for s in map(self.simulate, hopeful) if s.tokens_s >= enough)
            chosen = next(cheaper, chosen)
        return chosen


def _tokens_s(simulated: Simulated) -> float:
    return simulated.tokens_s


def _estimates(
    space: SearchSpace, demand: Demand, cost: MachineCost, budget_bytes: int
) -> dict[Candidate, float]:
    """Output tokens a second in closed form, of each candidate whose memory is enough."""
    lengths, max_model_len = Lengths.of(demand.requests), demand.max_model_len
    estimates = {
        candidate: estimate(candidate, lengths, cost, max_model_len=max_model_len).tokens_s
        for candidate in space.candidates(budget_bytes)
        if candidate.num_slots(cost.bytes_per_token) >= max_model_len
    }
    if not estimates:
        raise ConfigError(
            f"kv_memory of {budget_bytes} bytes holds fewer than max_model_len "
            f"({max_model_len}) tokens at {cost.bytes_per_token} bytes a token; raise kv_memory "
            f"or lower max_model_len"
        )
    return estimates
