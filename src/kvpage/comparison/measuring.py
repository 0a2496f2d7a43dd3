"""One pass of the requests through one engine, watched from the event loop.

The readers of the requests take the latencies, as a caller's own program would see them. One more
task looks at the pool between two steps, every 20 ms at most: that costs each candidate the same, a
fraction of a millisecond for each look.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import anyio
import attrs
import numpy as np

from kvpage.comparison.records import CandidateRun, Distribution, MemoryFilm
from kvpage.engine import AsyncEngine
from kvpage.errors import KvpageError
from kvpage.latencies import HistogramSnapshot
from kvpage.sampling import SamplingParams
from kvpage.simulator.instruments import Sample, Series
from kvpage.stats import BlockMap, EngineStatistics

LOOK_S = 0.02
FILM_COLUMNS = 320
FILM_ROWS = 256
OWNER_COLOURS = 8
TABLE_ENTRY_BYTES = 4

FREE, CACHED, FIRST_OWNER = 0, 1, 2
"""Bytes of a film's columns."""


@attrs.frozen(eq=False)
class Job:
    """What to send: for each request its prompt, its number of output tokens and its delay."""

    prompts: Sequence[Sequence[int]]
    output_tokens: Sequence[int]
    delays_s: Sequence[float]

    def first(self, count: int, *, max_tokens: int) -> "Job":
        """The first few, at once and cut short: to warm up."""
        few = [min(tokens, max_tokens) for tokens in self.output_tokens[:count]]
        return Job(self.prompts[:count], few, [0.0] * len(few))


@attrs.frozen(kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        label: the candidate.
        round: from 1.
        rounds: how many there will be at most.
        finished: requests of this run that have ended.
        requests: requests of a run.
        output_tokens: of this run so far.
        seconds: since this run began.
        statistics: the engine's, of this moment.
    """

    label: str
    round: int
    rounds: int
    finished: int
    requests: int
    output_tokens: int
    seconds: float
    statistics: EngineStatistics


class RunFailed(KvpageError):  # noqa: N818  (becomes a result's `failure`)
    """A request did not finish; its run says nothing of the candidate's speed."""


Look = Callable[[EngineStatistics, int], None]
"""Told the engine's statistics and how many requests have ended."""


async def measure(engine: AsyncEngine, job: Job, look: Look, *, token_bytes: int) -> CandidateRun:
    """Send the requests of `job` through `engine`, which has served none yet.

    Args:
        engine: not closed here.
        job: what to send.
        look: called every few steps, on the event loop.
        token_bytes: K and V of one token in all layers.

    Raises:
        RunFailed: a request ended by an error; the sentence is that of the first.
    """
    readers = _Readers(engine, job)
    observer = _Observer(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(observer.watch, lambda stats: look(stats, readers.finished))
        await readers.read_all()
        tasks.cancel_scope.cancel()
    if readers.failure is not None:
        raise RunFailed(readers.failure)
    await engine.idle()  # so that the last step is counted whole
    return _run(engine, readers, observer, token_bytes)


class _Readers:
    """Submits requests and reads their tokens, one task each.

    Attributes:
        first_token_s: of each request, from its submission.
        inter_token_s: between the tokens of each.
        finished: requests that have ended.
        failure: what the first request that failed ended by.
        duration_s: from the first submission to the last token.
    """

    def __init__(self, engine: AsyncEngine, job: Job) -> None:
        self.first_token_s: list[float] = []
        self.inter_token_s: list[float] = []
        self.finished = 0
        self.failure: str | None = None
        self.duration_s = 0.0
        self._engine = engine
        self._job = job

    async def read_all(self) -> None:
        started = perf_counter()
        async with anyio.create_task_group() as tasks:
            for number in range(len(self._job.prompts)):
                tasks.start_soon(self._read, number, tasks.cancel_scope)
        self.duration_s = perf_counter() - started

    async def _read(self, number: int, scope: anyio.CancelScope) -> None:
        delay_s = self._job.delays_s[number]
        if delay_s:
            await anyio.sleep(delay_s)
        try:
            await self._read_tokens(number)
        except KvpageError as error:
            self.failure = self.failure or str(error)
            scope.cancel()

    async def _read_tokens(self, number: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=self._job.output_tokens[number], ignore_eos=True
        )
        seconds, before = self.first_token_s, perf_counter()
        # The number as the priority keeps the queue in the requests' order in every run, whichever
        # prompt is prepared first.
        stream = self._engine.generate(
            self._job.prompts[number], params, request_id=str(number), priority=number
        )
        async with stream:
            async for _ in stream:
                now = perf_counter()
                seconds.append(now - before)
                seconds, before = self.inter_token_s, now
        self.finished += 1


class _Observer:
    """Looks at the pool until it is cancelled.

    Attributes:
        series: of the whole run.
        pressed: the same while requests waited.
        film: who held which block.
        peak_blocks: blocks in use at most.
        peak_entries: entries of block tables at most.
        peak_process_bytes: resident memory at most.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        import psutil

        self.series = Series(capacity=256)
        self.pressed = Series(capacity=2)
        self.film = _FilmRoll(engine.geometry.num_blocks)
        self.peak_blocks = 0
        self.peak_entries = 0
        self.peak_process_bytes = 0
        self._engine = engine
        self._process = psutil.Process()
        self._started = self._last = perf_counter()

    async def watch(self, look: Callable[[EngineStatistics], None]) -> None:
        while True:
            block_map = await self._engine.block_map()
            stats = self._engine.stats()
            self._note(stats, block_map)
            look(stats)
            await anyio.sleep(LOOK_S)

    def _note(self, stats: EngineStatistics, block_map: BlockMap) -> None:
        now = perf_counter()
        weight, time = now - self._last, now - self._started
        self._last = now
        sample = _sample(stats)
        self.series.add(weight, time, sample)
        if stats.num_waiting:
            self.pressed.add(weight, time, sample)
        self.film.add(time, block_map)
        entries = sum(len(sequence.blocks) for sequence in block_map.sequences)
        self.peak_entries = max(self.peak_entries, entries)
        self.peak_blocks = max(self.peak_blocks, stats.pool.used_blocks)
        self.peak_process_bytes = max(self.peak_process_bytes, self._process.memory_info().rss)


def _sample(stats: EngineStatistics) -> Sample:
    pool = stats.pool
    allocated = pool.used_blocks * pool.block_size
    return Sample(
        live_slots=stats.live_tokens,
        allocated_slots=allocated,
        unused_slots=allocated - stats.live_tokens,
        blocked_slots=pool.free_blocks * pool.block_size if stats.head_blocked else 0,
        running=stats.num_running,
        waiting=stats.num_waiting,
        output_tokens=stats.output_tokens,
    )


class _FilmRoll:
    """Block maps as columns of bytes. When all columns are in use, every other one is dropped."""

    def __init__(self, num_blocks: int) -> None:
        self._stride = -(-num_blocks // FILM_ROWS)
        self._times: list[float] = []
        self._columns: list[bytes] = []
        self._every = 1
        self._seen = 0

    def add(self, time: float, block_map: BlockMap) -> None:
        self._seen += 1
        if (self._seen - 1) % self._every:
            return
        self._times.append(time)
        self._columns.append(column(block_map)[:: self._stride].tobytes())
        if len(self._times) > FILM_COLUMNS:
            del self._times[1::2], self._columns[1::2]
            self._every *= 2
            self._seen = 1  # the last column, at an even place, was kept

    def developed(self) -> MemoryFilm:
        return MemoryFilm(tuple(self._times), tuple(self._columns), self._stride)


def column(block_map: BlockMap) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """`uint8[num_blocks]`: who holds each block; see `MemoryFilm`. Request ids are numbers."""
    codes = np.full(block_map.geometry.num_blocks, FREE, np.uint8)
    codes[list(block_map.cached)] = CACHED
    for sequence in reversed(block_map.sequences):
        code = FIRST_OWNER + 2 * (int(sequence.request_id) % OWNER_COLOURS)
        filled = block_map.geometry.blocks_for(sequence.num_tokens)
        codes[list(sequence.blocks)] = code + 1
        codes[list(sequence.blocks[:filled])] = code
    return codes


def _run(
    engine: AsyncEngine, readers: _Readers, observer: _Observer, token_bytes: int
) -> CandidateRun:
    stats, latencies, slots = engine.stats(), engine.latencies(), engine.geometry.num_slots
    mean = observer.pressed.mean() or observer.series.mean() or _sample(stats)
    return CandidateRun(
        duration_s=readers.duration_s,
        output_tokens=stats.output_tokens,
        first_token=Distribution(readers.first_token_s),
        inter_token=Distribution(readers.inter_token_s),
        utilisation=mean.live_slots / slots,
        internal_waste=mean.unused_slots / mean.allocated_slots if mean.allocated_slots else 0.0,
        external_waste=mean.blocked_slots / slots,
        running=mean.running,
        steps=stats.steps,
        step_s=_mean(latencies.step.snapshot()),
        host_s=_mean(latencies.host.snapshot()),
        preemptions=stats.preemptions,
        recomputed_tokens=stats.recomputed_tokens,
        cached_prompt_tokens=stats.cached_prompt_tokens,
        peak_kv_bytes=observer.peak_blocks * engine.geometry.block_size * token_bytes,
        peak_table_bytes=observer.peak_entries * TABLE_ENTRY_BYTES,
        peak_process_bytes=observer.peak_process_bytes,
        series=tuple(observer.series.points()),
        film=observer.film.developed(),
    )


def _mean(histogram: HistogramSnapshot) -> float:
    return histogram.total / max(1, histogram.num_observations)
