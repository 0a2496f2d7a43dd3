"""The engine thread alone: what it tells, and in which order."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvpage.admission import AdmissionGate, Post
from kvpage.allocators.fixed import FixedAllocator
from kvpage.batch import RunningBatch
from kvpage.block_manager import BlockManager
from kvpage.blocks import SequenceId
from kvpage.engine_thread import Close, EngineThread, Submit, WhenIdle, _Wake
from kvpage.plan import Runner
from kvpage.request import OpenChoice, Request
from kvpage.scheduler import Scheduler
from kvpage.sequence import Sequence
from kvpage.stats import EngineStatistics
from kvpage.stream import End, Mailbox, SampledToken, Timings, Usage
from kvpage.testing import FakeRunner
from tests.engine.runners import GEOMETRY, PATIENCE_S


def engine_thread(runner: Runner) -> EngineThread:
    """A thread over 8 rows and the `fixed` strategy, not yet started."""
    blocks = BlockManager(GEOMETRY, FixedAllocator(GEOMETRY), max_num_seqs=8)
    batch = RunningBatch(8, GEOMETRY.max_model_len)
    scheduler = Scheduler(blocks, batch, max_batch_tokens=64)
    return EngineThread(scheduler, runner, AdmissionGate(8), GEOMETRY)


def request(number: int, post: Post, *, max_tokens: int = 3) -> Request:
    """A request for `max_tokens` tokens after a prompt of four, read through `post`."""
    prompt = np.arange(4, dtype=np.int32)
    sequence = Sequence(SequenceId(number), prompt, 4, 4 + max_tokens)
    return Request(str(number), (OpenChoice(0, sequence),), Mailbox(post), submitted_at=0.0)


def finish(thread: EngineThread) -> None:
    """Let the open requests end, and the thread with them."""
    thread.post(Close("drain"))
    thread.join(PATIENCE_S)


async def test_a_reader_is_woken_for_several_tokens_or_an_end() -> None:
    """Not for less, as `complete` reads; what it has read does not count any more."""
    end = End("length", Usage(1, 1, 0, 0), Timings(0, 0, 0))
    mailbox = Mailbox(lambda _: None, at_once=3)
    assert [mailbox.put(token) for token in range(3)] == [False, False, True]
    assert [await mailbox.get() for _ in range(3)] == [0, 1, 2]
    assert not mailbox.put(SampledToken(3))
    assert mailbox.put(SampledToken(4, end=end))
    assert [await mailbox.get() for _ in range(2)] == [SampledToken(3), SampledToken(4, end=end)]
    assert mailbox.put(ValueError())


def test_readers_wake_up_to_statistics_that_know_of_their_tokens() -> None:
    """Whoever has read a token finds it counted; after the last one, no block is used."""
    seen: list[EngineStatistics] = []

    def post(_callback: Callable[[], None]) -> None:
        seen.append(thread.statistics)

    thread = engine_thread(FakeRunner(GEOMETRY))
    thread.start()
    thread.post(Submit(request(0, post)))
    finish(thread)
    assert [stats.output_tokens for stats in seen] == [1, 2, 3]
    assert [stats.pool.used_blocks for stats in seen] == [1, 2, 0]
    assert seen[-1].requests_finished == 1


def test_who_waits_for_idle_finds_idle_statistics() -> None:
    """When `WhenIdle` calls back, the statistics have no request and no used block."""
    seen: list[EngineStatistics] = []
    thread = engine_thread(FakeRunner(GEOMETRY))
    thread.post(Submit(request(0, _nowhere)))
    thread.post(WhenIdle(lambda: seen.append(thread.statistics)))
    thread.start()
    finish(thread)
    assert (seen[0].num_running, seen[0].pool.used_blocks) == (0, 0)
    assert seen[0].requests_finished == 1


def test_each_event_loop_is_woken_once_a_step() -> None:
    """Tokens of one step for several readers of one loop travel in one wake-up."""
    wakeups: list[int] = []

    def post(_callback: Callable[[], None]) -> None:
        wakeups.append(thread.statistics.steps)

    thread = engine_thread(FakeRunner(GEOMETRY))
    for number in range(5):
        thread.post(Submit(request(number, post)))
    thread.start()
    finish(thread)
    assert wakeups == [1, 2, 3]


def test_many_readers_of_a_loop_wake_in_turns() -> None:
    """So that whatever else is in the loop runs between them."""
    posted: list[Callable[[], None]] = []
    awake: list[int] = []

    class Box(Mailbox):
        def wake(self) -> None:
            awake.append(1)

    posted.append(_Wake(posted.append, [Box(posted.append) for _ in range(40)]))
    counts = []
    while posted:
        posted.pop()()
        counts.append(len(awake))
    assert counts == [16, 32, 40]


def test_requests_of_an_ended_event_loop_are_cancelled() -> None:
    """A loop that refuses a wake-up loses its requests; those of other loops go on."""

    def ended(_callback: Callable[[], None]) -> None:
        raise RuntimeError("the event loop is closed")

    thread = engine_thread(FakeRunner(GEOMETRY))
    thread.post(Submit(request(0, ended, max_tokens=50)))
    thread.post(Submit(request(1, ended, max_tokens=50)))
    thread.post(Submit(request(2, _nowhere, max_tokens=50)))
    thread.start()
    finish(thread)
    stats = thread.statistics
    assert (stats.requests_cancelled, stats.requests_finished) == (2, 1)
    assert stats.output_tokens == 52


def test_a_runner_that_fails_to_close_does_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The thread ends in order, and the log has the reason."""

    class Clinging(FakeRunner):
        def close(self) -> None:
            raise RuntimeError("the device is gone")

    thread = engine_thread(Clinging(GEOMETRY))
    thread.start()
    finish(thread)
    assert "kvpage-engine" not in [other.name for other in threading.enumerate()]
    assert "the device is gone" in caplog.text


def _nowhere(_callback: Callable[[], None]) -> None:
    """Posts to nobody: a reader that never waits."""
