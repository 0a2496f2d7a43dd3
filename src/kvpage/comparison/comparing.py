"""The comparison itself: candidates in turn, A B C, B C A, C A B."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import anyio.to_thread
import attrs

from kvpage.comparison.engines import EngineSource, open_source
from kvpage.comparison.machine import this_machine
from kvpage.comparison.measuring import Job, Progress, measure
from kvpage.comparison.records import CandidateResult, CandidateRun, Comparison, State
from kvpage.comparison.settings import Candidate, ComparisonSettings
from kvpage.comparison.workload import Workload, read_workload
from kvpage.engine import AsyncEngine
from kvpage.errors import sentence_of
from kvpage.stats import EngineStatistics

USUAL_REQUESTS = 20
FEWEST_REQUESTS, MOST_REQUESTS = 6, 40
SHARE_OF_TIME = 0.7
"""Some candidates are slower than the one that was tried."""

WARM_UP_REQUESTS = 4
WARM_UP_TOKENS = 8

OnProgress = Callable[[Progress], None]
OnResult = Callable[[Comparison], None]


def _ignore(_what: object) -> None:
    """Nobody asked to be told."""


async def compare(
    model: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    cache_dir: Any = None,
    on_progress: OnProgress = _ignore,
    on_result: OnResult = _ignore,
    **settings: Any,
) -> Comparison:
    """Measure the same requests, end to end, under several strategies and block sizes.

    The model is loaded once; each run has an engine of its own. Candidates take turns, and each
    round begins with another one. A candidate that fails keeps what it had measured, says why, and
    is not run again; the others go on.

    Args:
        model: a hub id, a local folder, a `.gguf` file, None for the embedded default, or a
            transformers model, which is not changed.
        dtype: of the weights, as in `AsyncEngine.from_pretrained`.
        device: where to compute, as there.
        cache_dir: where converted models are kept, as there.
        on_progress: called on the event loop every few steps.
        on_result: called on the event loop after each run, with everything so far.
        settings: see `ComparisonSettings`.

    Returns:
        What was measured; `kvpage.comparison.html_report` makes a page of it.

    Raises:
        ConfigError: a setting cannot work, or there is no such model.
        TraceError: the trace cannot be read, or no request of it is short enough.
        PluginError: no such strategy.
        UnsupportedModelError: the model's attention cannot be paged.
    """
    started = perf_counter()
    chosen = ComparisonSettings(**settings)
    chosen.candidates()
    most = chosen.requests or MOST_REQUESTS
    read = partial(
        read_workload, chosen.workload, most, chosen.seed, hash_block_size=chosen.hash_block_size
    )
    workload = await anyio.to_thread.run_sync(read)
    load = partial(open_source, model, dtype=dtype, device=device, cache_dir=cache_dir)
    source = await anyio.to_thread.run_sync(load, abandon_on_cancel=True)
    if chosen.requests is None:
        workload = await as_many_as_fit(source, chosen, workload, started=started)
    comparing = Comparing(source, chosen, workload, started=started)
    return await comparing.run(on_progress, on_result)


async def as_many_as_fit(
    source: EngineSource, settings: ComparisonSettings, workload: Workload, *, started: float
) -> Workload:
    """The first requests of a workload, as many as all rounds have time for, by a try of a few.

    Args:
        source: opens the engines.
        settings: what is asked.
        workload: as read, not scaled yet.
        started: when the comparison began, by `perf_counter`.
    """
    if settings.seconds is None:
        return workload.first(USUAL_REQUESTS)
    few = workload.first(FEWEST_REQUESTS)
    took_s = await Comparing(source, settings, few, started=started).one_run()
    if took_s is None:
        return few
    runs = len(settings.candidates()) * settings.rounds
    left_s = settings.seconds - (perf_counter() - started)
    fitting = int(SHARE_OF_TIME * left_s / runs * len(few.requests) / took_s)
    return workload.first(min(max(fitting, FEWEST_REQUESTS), MOST_REQUESTS))


@attrs.define(eq=False)
class _Entry:
    """A candidate, and what has been found of it so far."""

    candidate: Candidate
    runs: list[CandidateRun] = attrs.field(factory=list)
    failure: str | None = None


class Comparing:
    """A comparison under way.

    Args:
        source: opens the engines.
        settings: what is asked.
        workload: as read, not scaled yet.
        started: when the comparison began, by `perf_counter`.

    Raises:
        ConfigError: the settings do not fit the model.
        TraceError: no request is short enough.
    """

    def __init__(
        self,
        source: EngineSource,
        settings: ComparisonSettings,
        workload: Workload,
        *,
        started: float,
    ) -> None:
        candidates = settings.candidates()
        self._longest = settings.longest_request(source.max_len)
        self._workload = workload.scaled(settings.scale, self._longest)
        self._slots = settings.slots(
            candidates,
            total_tokens=self._workload.prompt_tokens + self._workload.output_tokens,
            longest=self._longest,
            token_bytes=source.bytes_per_token,
        )
        self._job = Job(
            self._workload.prompts(source.vocab_size, settings.seed),
            [request.output_tokens for request in self._workload.requests],
            self._workload.delays(settings.rate),
        )
        self._machine = this_machine(source.device)
        self._source = source
        self._settings = settings
        self._started = started
        self._entries = [_Entry(candidate) for candidate in candidates]

    async def run(self, on_progress: OnProgress, on_result: OnResult) -> Comparison:
        """Measure round by round, to the last one or as long as there is time."""
        await self._warm_up()
        round_began = perf_counter()
        for number in range(1, self._settings.rounds + 1):
            for entry in self._in_turn(number):
                if number == 1 and self._late(0.0):
                    return self._comparison("out of time")
                await self._measure(entry, number, on_progress)
                on_result(self._comparison("running"))
            now = perf_counter()
            if number < self._settings.rounds and self._late(now - round_began):
                return self._comparison("out of time")
            round_began = now
        return self._comparison("complete")

    async def one_run(self) -> float | None:
        """Seconds that the first candidate takes for the requests; None if it fails."""
        await self._warm_up()
        began = perf_counter()
        run = await self._attempt(self._entries[0], self._job, lambda _stats, _finished: None)
        return None if run is None else perf_counter() - began

    def _late(self, needed_s: float) -> bool:
        """Would something that takes `needed_s` end too late?"""
        limit_s = self._settings.seconds
        return limit_s is not None and perf_counter() - self._started + needed_s > limit_s

    def _in_turn(self, number: int) -> list[_Entry]:
        """The candidates of a round, beginning with another one in each."""
        first = (number - 1) * len(self._entries) // self._settings.rounds
        return self._entries[first:] + self._entries[:first]

    async def _warm_up(self) -> None:
        """What only the first run of a process would pay is paid here, and not measured."""
        few = self._job.first(WARM_UP_REQUESTS, max_tokens=WARM_UP_TOKENS)
        for entry in self._entries:
            await self._attempt(entry, few, lambda _stats, _finished: None)
            if entry.failure is None:
                return

    async def _measure(self, entry: _Entry, number: int, on_progress: OnProgress) -> None:
        began = perf_counter()

        def look(statistics: EngineStatistics, finished: int) -> None:
            progress = Progress(
                label=entry.candidate.label,
                round=number,
                rounds=self._settings.rounds,
                finished=finished,
                requests=len(self._job.prompts),
                output_tokens=statistics.output_tokens,
                seconds=perf_counter() - began,
                statistics=statistics,
            )
            on_progress(progress)

        run = await self._attempt(entry, self._job, look)
        if run is not None:
            entry.runs.append(run)

    async def _attempt(
        self, entry: _Entry, job: Job, look: Callable[[EngineStatistics, int], None]
    ) -> CandidateRun | None:
        """One run; None if the candidate fails in it or has failed before."""
        if entry.failure is not None:
            return None
        try:
            open_engine = partial(self._open, entry.candidate)
            async with await anyio.to_thread.run_sync(open_engine) as engine:
                return await measure(engine, job, look, token_bytes=self._source.bytes_per_token)
        except Exception as error:  # whatever a strategy raises, the others go on
            entry.failure = sentence_of(error)
            return None

    def _open(self, candidate: Candidate) -> AsyncEngine:
        settings = self._settings
        return self._source.open(
            allocator=candidate.allocator,
            block_size=candidate.block_size,
            kv_memory=f"{self._slots // candidate.block_size} blocks",
            max_model_len=self._longest,
            max_num_seqs=settings.max_num_seqs,
            max_batch_tokens=settings.max_batch_tokens,
            prefix_cache=settings.prefix_cache,
            plugins=settings.plugins,
        )

    def _comparison(self, state: State) -> Comparison:
        return Comparison(
            model=self._source.name,
            machine=self._machine,
            settings=self._settings,
            workload=self._workload,
            max_model_len=self._longest,
            slots=self._slots,
            token_bytes=self._source.bytes_per_token,
            results=tuple(
                CandidateResult(
                    entry.candidate,
                    self._slots // entry.candidate.block_size,
                    tuple(entry.runs),
                    entry.failure,
                )
                for entry in self._entries
            ),
            state=state,
            elapsed_s=perf_counter() - self._started,
        )
