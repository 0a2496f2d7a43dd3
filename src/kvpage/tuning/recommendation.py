"""What a tuning found: the settings, the evidence, and what it would cost to be wrong."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

from kvpage.tuning.candidates import Candidate
from kvpage.tuning.cost import MachineCost
from kvpage.tuning.search import Simulated

State = Literal["simulated", "measuring", "complete", "out of time", "interrupted"]


@attrs.frozen
class Measured:
    """What was measured of a finalist, end to end.

    Attributes:
        candidate: the settings.
        simulated_tokens_s: what the simulator said of the requests that were measured.
        tokens_s: output tokens a second, one for each round.
        problem: what ended it, in one sentence; None if nothing did.
    """

    candidate: Candidate
    simulated_tokens_s: float
    tokens_s: tuple[float, ...] = ()
    problem: str | None = None

    @property
    def median(self) -> float:
        """The middle round; 0 of none."""
        return statistics.median(self.tokens_s) if self.tokens_s else 0.0

    @property
    def spread(self) -> float:
        """The fastest round less the slowest."""
        return max(self.tokens_s) - min(self.tokens_s) if self.tokens_s else 0.0

    @property
    def usable(self) -> bool:
        """Was it measured, without a problem?"""
        return self.problem is None and bool(self.tokens_s)


@attrs.frozen(kw_only=True, eq=False)
class Recommendation:
    """Settings for a workload on a model and a machine, and why.

    Attributes:
        model: its name.
        argument: how `AsyncEngine.from_pretrained` knows it; None is its default.
        workload: its name.
        requests: requests that were simulated.
        left_out: requests longer than `max_model_len`.
        max_model_len: longest request, in tokens.
        demand_tokens_s: output tokens a second that the workload asks for, by its arrivals; None if
            they say nothing.
        cost: what steps cost.
        num_candidates: candidates that were estimated in closed form.
        simulated: those that were simulated too.
        best: what the simulator recommends.
        chosen: what is recommended: `best`, unless another finalist was measured to be faster.
        alternatives: by setting, the candidates that differ from `best` in it alone.
        measured: the finalists, the best simulated one first; empty if nothing was measured.
        measured_requests: requests of each round.
        state: how far it came.
    """

    model: str
    argument: str | None
    workload: str
    requests: int
    left_out: int
    max_model_len: int
    demand_tokens_s: float | None
    cost: MachineCost
    num_candidates: int
    simulated: tuple[Simulated, ...] = attrs.field(repr=False)
    best: Simulated
    chosen: Simulated
    alternatives: Mapping[str, tuple[Simulated, ...]] = attrs.field(repr=False)
    measured: tuple[Measured, ...] = ()
    measured_requests: int = 0
    state: State = "simulated"

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `AsyncEngine.from_pretrained`."""
        return self.chosen.candidate.settings() | {"max_model_len": self.max_model_len}

    @property
    def call(self) -> str:
        """The same as Python, to paste."""
        model = [] if self.argument is None else [repr(self.argument)]
        arguments = [*model, *(f"{name}={value!r}" for name, value in self.settings.items())]
        lines = "".join(f"    {argument},\n" for argument in arguments)
        return f"kvpage.AsyncEngine.from_pretrained(\n{lines})"

    @property
    def model_error(self) -> float | None:
        """How far apart finalists are in truth and in simulation, at worst, as a share.

        A ratio of two throughputs is what a choice rests on; that all are slower than simulated
        changes none. None with fewer than two measured finalists.
        """
        ratios = [m.median / m.simulated_tokens_s for m in self.measured if m.usable]
        return max(ratios) / min(ratios) - 1 if len(ratios) > 1 else None

    def losses(self) -> Iterator[tuple[str, list[tuple[Simulated, float]]]]:
        """By setting, each alternative with the share of `best`'s throughput that it loses."""
        for name, others in self.alternatives.items():
            yield name, [(other, 1 - other.tokens_s / self.best.tokens_s) for other in others]

    def reasons(self) -> list[str]:
        """The case for it, a sentence each."""
        return [
            f"{self.num_candidates} candidates were estimated in closed form, "
            f"{len(self.simulated)} simulated, {sum(m.usable for m in self.measured)} measured.",
            *self._measured_reasons(),
            *self._demand_reason(),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return attrs.asdict(self) | {
            "settings": self.settings,
            "call": self.call,
            "reasons": self.reasons(),
            "model_error": self.model_error,
        }

    def _measured_reasons(self) -> Iterator[str]:
        if not any(m.usable for m in self.measured):
            yield "Nothing was measured end to end: all of it rests on the model of this machine."
            return
        yield verdict(self.measured, self.chosen.candidate)
        if self.model_error is not None:
            yield (
                f"The ratio of two finalists differs by up to {self.model_error:.1%} between "
                f"simulation and measurement; smaller simulated differences say nothing."
            )
        running = self.chosen.running
        if self.measured_requests < 2 * running:
            yield (
                f"{self.measured_requests} requests were measured, too few to keep "
                f"{running:.0f} running: give it more seconds for a surer answer."
            )

    def _demand_reason(self) -> Iterator[str]:
        if self.demand_tokens_s is not None:
            load = self.demand_tokens_s / self.chosen.tokens_s
            yield (
                f"The workload asks for {self.demand_tokens_s:.1f} tokens/s, {load:.0%} of what "
                f"these settings are simulated to give."
            )


def verdict(measured: Sequence[Measured], chosen: Candidate) -> str:
    """What the measurements say for `chosen`, in a sentence."""
    usable = [m for m in measured if m.usable]
    own = next((m for m in usable if m.candidate == chosen), None)
    if own is None:
        return "The recommended settings were not measured, or failed; the simulator chose them."
    others = [m for m in usable if m is not own]
    beaten = [m for m in others if told_apart(own, m) and own.median > m.median]
    if not others:
        return f"Measured alone: {own.median:.1f} tokens/s."
    if len(beaten) == len(others):
        return (
            f"Measured faster than each of the {len(others)} others, beyond the spread of rounds."
        )
    return (
        f"Measured at {own.median:.1f} tokens/s; {len(others) - len(beaten)} of {len(others)} "
        f"others cannot be told from it by more than the spread of rounds."
    )


def told_apart(one: Measured, other: Measured) -> bool:
    """Do the medians differ by more than the larger spread?"""
    return abs(one.median - other.median) > max(one.spread, other.spread)


def choose(measured: Sequence[Measured]) -> Measured | None:
    """The first that was measured, unless another is faster beyond the spread; None of none."""
    usable = [m for m in measured if m.usable]
    if not usable:
        return None
    first, fastest = usable[0], max(usable, key=lambda m: m.median)
    return fastest if told_apart(first, fastest) else first
