"""The tuning itself: read, calibrate, search, measure, decide."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import anyio.from_thread
import anyio.to_thread
import attrs

from kvpage.comparison.engines import open_source
from kvpage.comparison.workload import Workload, read_workload
from kvpage.config import DEFAULT_BLOCK_SIZE, EngineConfig
from kvpage.errors import sentence_of
from kvpage.plugins import check_allocator_spec
from kvpage.traffic import TraceRequest
from kvpage.tuning.candidates import Candidate
from kvpage.tuning.cost import MachineCost
from kvpage.tuning.measuring import EndToEnd, Measure, default_kv_bytes, measured_cost
from kvpage.tuning.recommendation import Measured, Recommendation, State, choose
from kvpage.tuning.search import HOPELESS, Demand, Search, Simulated, simulate
from kvpage.tuning.settings import TuningSettings

SIMULATED_OUTPUT_TOKENS = 40_000
"""Enough that the beginning and the end of a replay weigh little, few enough for a second each."""

FEWEST_REQUESTS = 64

OnProgress = Callable[[str], None]
OnResult = Callable[[Recommendation], None]


def _ignore(_what: object) -> None:
    """Nobody asked to be told."""


def _from_thread(on_progress: OnProgress) -> OnProgress:
    """The same, callable in a thread that the event loop has started."""
    return lambda what: anyio.from_thread.run_sync(on_progress, what)


async def tune(
    model: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    cache_dir: Any = None,
    on_progress: OnProgress = _ignore,
    on_result: OnResult = _ignore,
    **settings: Any,
) -> Recommendation:
    """Recommend an engine's settings for a workload, on a model, on this machine.

    Measures what steps of the model cost here, estimates every candidate in closed form, simulates
    the promising ones, and measures the finalists end to end, in turn. What is sought is the
    highest throughput of a queue that is never empty, with no more memory than that needs.

    Args:
        model: a hub id, a local folder, a `.gguf` file, None for the embedded default, or a
            transformers model, which is not changed.
        dtype: of the weights, as in `AsyncEngine.from_pretrained`.
        device: where to compute, as there.
        cache_dir: where converted models are kept, as there.
        on_progress: called on the event loop with a few words on what is done now.
        on_result: called on the event loop with all that is known after the search, and after each
            measurement.
        settings: see `kvpage.tuning.TuningSettings`.

    Returns:
        The settings, the evidence, and what other settings would cost.

    Raises:
        ConfigError: a setting cannot work, there is no such model, or no candidate can serve the
            workload.
        TraceError: the trace cannot be read, or no request of it is short enough.
        PluginError: no such strategy.
        UnsupportedModelError: the model's attention cannot be paged.
    """
    chosen = TuningSettings(**settings)
    for allocator in chosen.space.allocators:
        check_allocator_spec(allocator)
    on_progress("reading the workload")
    read = partial(
        read_workload,
        chosen.source,
        chosen.requests,
        chosen.seed,
        hash_block_size=chosen.hash_block_size,
    )
    workload = await anyio.to_thread.run_sync(read)
    on_progress("loading the model")
    load = partial(open_source, model, dtype=dtype, device=device, cache_dir=cache_dir)
    source = await anyio.to_thread.run_sync(load, abandon_on_cancel=True)
    largest = partial(
        default_kv_bytes,
        source,
        max_batch_tokens=max(chosen.space.max_batch_tokens),
        max_num_seqs=max(chosen.space.max_num_seqs),
    )
    about = About(
        source.name,
        os.fspath(model) if isinstance(model, str | os.PathLike) else None,
        source.max_len,
        await anyio.to_thread.run_sync(largest),
    )
    find_cost = partial(
        measured_cost,
        source,
        chosen.space.block_sizes,
        _from_thread(on_progress),
        kv_bytes=about.kv_bytes,
    )
    cost = await anyio.to_thread.run_sync(find_cost, abandon_on_cancel=True)
    tuning = Tuning(about, chosen, workload, cost)
    measure = EndToEnd(source, tuning.demand.max_model_len, chosen.seed)
    return await tuning.run(measure, on_progress, on_result)


@attrs.frozen
class About:
    """What a tuning must know of the model.

    Attributes:
        name: its name.
        argument: how `AsyncEngine.from_pretrained` knows it; None is its default.
        max_len: longest sequence that it allows, in tokens.
        kv_bytes: memory for K and V if the settings say nothing.
    """

    name: str
    argument: str | None
    max_len: int
    kv_bytes: int


class Tuning:
    """One tuning, over any model whose costs are known. Made for one `run`.

    Attributes:
        demand: the requests that candidates are simulated with.
        budget_bytes: the most that K and V may take.
    """

    def __init__(
        self, about: About, settings: TuningSettings, workload: Workload, cost: MachineCost
    ) -> None:
        """Scale the workload and choose the requests to simulate.

        Raises:
            ConfigError: the memory and `max_model_len` contradict each other.
            TraceError: no request is short enough.
        """
        self.budget_bytes = settings.budget_bytes(
            about.kv_bytes, bytes_per_token=cost.bytes_per_token
        )
        longest = settings.longest_request(about.max_len, self.budget_bytes // cost.bytes_per_token)
        self._about = about
        self._settings = settings
        self._cost = cost
        self._workload = workload.scaled(settings.scale, longest)
        self.demand = _demand(self._workload, longest, SIMULATED_OUTPUT_TOKENS)

    async def run(
        self, measure: Measure, on_progress: OnProgress = _ignore, on_result: OnResult = _ignore
    ) -> Recommendation:
        """Search, then measure the finalists with `measure`.

        Raises:
            ConfigError: no candidate can serve the workload.
        """
        search_all = partial(self.search, _from_thread(on_progress))
        found, finalists = await anyio.to_thread.run_sync(search_all, abandon_on_cancel=True)
        on_result(found)
        if self._settings.seconds == 0 or len(finalists) < 2:
            return found
        rounds = _Rounds(self._settings, self._sample(found, len(finalists)), self._cost)
        return await rounds.run(found, finalists, measure, on_progress, on_result)

    def search(self, progress: OnProgress = _ignore) -> tuple[Recommendation, list[Candidate]]:
        """The best simulated candidate, and the finalists, it the first. Blocks.

        Raises:
            ConfigError: no candidate can serve the workload.
        """
        search = Search(
            self._settings.space,
            self.demand,
            self._cost,
            budget_bytes=self.budget_bytes,
            progress=progress,
        )
        best = search.best()
        alternatives = search.neighbours(best.candidate)
        finalists = self._finalists(search, best)
        return Recommendation(
            model=self._about.name,
            argument=self._about.argument,
            workload=self._workload.name,
            requests=len(self.demand.requests),
            left_out=self._workload.left_out,
            max_model_len=self.demand.max_model_len,
            demand_tokens_s=_demand_tokens_s(self._workload.requests),
            cost=self._cost,
            num_candidates=search.num_candidates,
            simulated=tuple(search.simulated.values()),
            best=best,
            chosen=best,
            alternatives=alternatives,
        ), finalists

    def _finalists(self, search: Search, best: Simulated) -> list[Candidate]:
        """The best, the best of each other strategy, and what an engine does by itself."""
        defaults = EngineConfig()
        default = Candidate(
            "fixed",
            DEFAULT_BLOCK_SIZE,
            self.budget_bytes,
            defaults.max_num_seqs,
            defaults.max_batch_tokens,
        )
        rivals = [search.best_of(name) for name in self._settings.space.allocators]
        rivals = [r for r in rivals if r and r.candidate.allocator != best.candidate.allocator]
        enough = HOPELESS * best.tokens_s
        found = [best, *(r for r in rivals if r), search.simulate(default)]
        return list(dict.fromkeys(f.candidate for f in found if f.tokens_s >= enough))

    def _sample(self, found: Recommendation, num_finalists: int) -> Workload:
        """As many requests as there is time for."""
        runs = num_finalists * self._settings.rounds + 1
        output_tokens = self._settings.seconds / runs * found.chosen.tokens_s
        return attrs.evolve(self._workload, requests=_thinned(self._workload, output_tokens, 2))


class _Rounds:
    """Measures finalists in turn, each round beginning with another one."""

    def __init__(self, settings: TuningSettings, sample: Workload, cost: MachineCost) -> None:
        self._settings = settings
        self._sample = sample
        self._cost = cost
        self._started = perf_counter()

    async def run(
        self,
        found: Recommendation,
        finalists: Sequence[Candidate],
        measure: Measure,
        on_progress: OnProgress,
        on_result: OnResult,
    ) -> Recommendation:
        demand = Demand(self._sample.requests, found.max_model_len, self._sample.hash_block_size)
        expect = [partial(simulate, finalist, demand, self._cost) for finalist in finalists]
        results = [
            Measured(finalist, (await anyio.to_thread.run_sync(ask)).tokens_s)
            for finalist, ask in zip(finalists, expect, strict=True)
        ]
        await self._warm_up(results, measure, on_progress)
        longest_round_s = 0.0
        for number in range(self._settings.rounds):
            began = perf_counter()
            if number > 1 and self._late(longest_round_s):
                return _decided(found, results, len(self._sample.requests), "out of time")
            for place in _rotated(len(results), number):
                one = results[place]
                on_progress(f"measuring, round {number + 1}: {one.candidate}")
                results[place] = await _measured(one, measure, self._sample)
                found = _decided(found, results, len(self._sample.requests), "measuring")
                on_result(found)
            longest_round_s = max(longest_round_s, perf_counter() - began)
        return _decided(found, results, len(self._sample.requests), "complete")

    async def _warm_up(
        self, results: list[Measured], measure: Measure, on_progress: OnProgress
    ) -> None:
        """What only the first run of a process pays is not measured."""
        on_progress("warming up")
        few = attrs.evolve(
            self._sample,
            requests=tuple(
                attrs.evolve(request, output_tokens=1) for request in self._sample.requests[:2]
            ),
        )
        results[0] = attrs.evolve(await _measured(results[0], measure, few), tokens_s=())

    def _late(self, needed_s: float) -> bool:
        return perf_counter() - self._started + needed_s > self._settings.seconds


async def _measured(before: Measured, measure: Measure, workload: Workload) -> Measured:
    """One more round of a finalist; one that has failed is not run again."""
    if before.problem is not None:
        return before
    try:
        tokens_s = await measure(before.candidate, workload)
    except Exception as error:  # whatever a strategy raises, the others go on
        return attrs.evolve(before, problem=sentence_of(error))
    return attrs.evolve(before, tokens_s=(*before.tokens_s, tokens_s))


def _decided(
    found: Recommendation, results: Sequence[Measured], num_requests: int, state: State
) -> Recommendation:
    """The recommendation with what was measured so far; a winner beyond the spread is chosen."""
    winner = choose(results)
    chosen = found.chosen
    if winner is not None:
        of_candidate = {s.candidate: s for s in found.simulated}
        chosen = of_candidate[winner.candidate]
    return attrs.evolve(
        found,
        chosen=chosen,
        measured=tuple(results),
        measured_requests=num_requests,
        state=state,
    )


def _rotated(count: int, number: int) -> list[int]:
    return [(place + number) % count for place in range(count)]


def _demand(workload: Workload, longest: int, output_tokens: float) -> Demand:
    requests = _thinned(workload, output_tokens, FEWEST_REQUESTS)
    return Demand(requests, longest, workload.hash_block_size)


def _thinned(workload: Workload, output_tokens: float, fewest: int) -> tuple[TraceRequest, ...]:
    """Every so many-th request, for about so many output tokens; the first ones where they share.

    Requests that share prefixes with earlier ones would find nothing if these were left out.
    """
    requests = workload.requests
    wanted = int(len(requests) * output_tokens / workload.output_tokens)
    count = min(len(requests), max(fewest, wanted))
    if any(request.hash_ids for request in requests):
        return requests[:count]
    return tuple(requests[place * len(requests) // count] for place in range(count))


def _demand_tokens_s(requests: Sequence[TraceRequest]) -> float | None:
    duration_s = requests[-1].arrival_s - requests[0].arrival_s
    if duration_s <= 0:
        return None
    return sum(request.output_tokens for request in requests) / duration_s
