"""The engine thread: the one owner of scheduler, block manager, allocator and runner.

Everything else talks to it by messages. It never waits for an event loop: tokens of a step are put
into the readers' mailboxes, and each event loop with waiting readers is woken once a step.
"""

import atexit
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Literal

import attrs

from kvpage.admission import AdmissionGate, Post
from kvpage.blocks import PoolGeometry, SequenceId
from kvpage.errors import EngineBroken, EngineClosed, RequestFailed, StepFailed
from kvpage.latencies import Latencies
from kvpage.plan import Runner, StepPlan
from kvpage.request import OpenChoice, Request
from kvpage.scheduler import Schedule, Scheduler, StepOutcome
from kvpage.sequence import FinishReason
from kvpage.stats import (
    BlockImage,
    EngineHealth,
    EngineStatistics,
    HealthState,
    SequenceImage,
    SwapStatistics,
)
from kvpage.stream import End, Mailbox, MailItem, SampledToken, Timings, Usage
from kvpage.traffic import TrafficRecorder

logger = logging.getLogger("kvpage")

WOKEN_AT_ONCE = 16
"""Readers that an event loop wakes in one round; all else in it waits for them."""

EXIT_GRACE_S = 5.0
"""How long the end of the process waits for the engine to finish its step."""


@attrs.frozen
class Submit:
    """Queue this request."""

    request: Request


@attrs.frozen
class Cancel:
    """End the request of this number if it has not ended."""

    number: SequenceId


@attrs.frozen
class Close:
    """Take no more requests; finish the open ones first, or fail them at once."""

    mode: Literal["drain", "now"]


@attrs.frozen
class WhenIdle:
    """Call back, from the engine thread, once no request is open."""

    callback: Callable[[], None]


@attrs.frozen
class MapBlocks:
    """Call back, from the engine thread, with an image of the pool."""

    callback: Callable[[BlockImage], None]


Message = Submit | Cancel | Close | WhenIdle | MapBlocks


class EngineThread:
    """Steps the engine while there is work. Construct, `start`, `post`.

    Attributes:
        statistics: the snapshot after the last step or message.
        latencies: how long things took so far.
        traffic: the lengths of what has finished.
        broken_by: the exception that ended the thread, if one did.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        gate: AdmissionGate,
        geometry: PoolGeometry,
        latencies: Latencies | None = None,
    ) -> None:
        self.broken_by: BaseException | None = None
        self.latencies = latencies or Latencies()
        self.traffic = TrafficRecorder(started_at=time.perf_counter())
        self._ended = False
        self._progress_at: float | None = None  # None while there is no work
        self._scheduler = scheduler
        self._runner = runner
        self._gate = gate
        self._geometry = geometry
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._open: dict[SequenceId, Request] = {}
        self._when_idle: list[Callable[[], None]] = []
        self._closing: Literal["drain", "now"] | None = None
        self._to_wake: dict[Post, list[Mailbox]] = {}
        self._steps = 0
        self._output_tokens = 0
        self._finished = 0
        self._cancelled = 0
        self._failed = 0
        self.statistics = self._statistics()
        # A daemon, so that a host which forgets to close can still exit; see AsyncEngine.
        self._thread = threading.Thread(target=self._run, name="kvpage-engine", daemon=True)

    def start(self) -> None:
        """Begin. Once."""
        atexit.register(self._exit)
        self._thread.start()

    def post(self, message: Message) -> None:
        """Send a message; from any thread or a finaliser. Never blocks; lost after the end."""
        self._inbox.put(message)

    def check_alive(self) -> None:
        """Raise what a request would get if the engine has ended; see `end_error`.

        A message posted before a call that returns is handled. (`_end` sets the flag before it
        empties the inbox for the last time.)
        """
        if self._ended:
            raise self.end_error()

    def health(self) -> EngineHealth:
        """How it is doing; from any thread, even while a step hangs."""
        progress_at = self._progress_at
        return EngineHealth(
            self._health_state(),
            self._gate.num_open,
            0.0 if progress_at is None else time.perf_counter() - progress_at,
            self.broken_by,
        )

    def _health_state(self) -> HealthState:
        if self.broken_by is not None:
            return "broken"
        if self._ended:
            return "closed"
        return "running" if self._closing is None else "draining"

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end that a `Close` brings."""
        self._thread.join(timeout)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._step()
        except BaseException as error:
            self.broken_by = error
            logger.exception("the engine broke", extra={"event": "engine_broken"})
        self._end()

    def _read_inbox(self) -> bool:
        """Handle messages; sleeps while there is no work. False when the engine is to end."""
        while self._closing != "now":
            idle = not self._open
            if idle:
                self._progress_at = None
                self._tell_idle()
                if self._closing == "drain":
                    return False
            try:
                self._handle(self._inbox.get(block=idle))
            except Empty:
                return True
            if idle and self._open:
                self._progress_at = time.perf_counter()
            self.statistics = self._statistics()
        return False

    def _handle(self, message: Message) -> None:
        match message:
            case Submit(request) if self._closing is None:
                self._open[request.number] = request
                self._scheduler.add(request.choices[0].sequence)
                request.tell("queued")
            case Submit(request):
                self._refuse(request)
            case Cancel(number):
                self._cancel(number)
            case Close(mode):
                self._closing = mode
                self._gate.open_wide()
            case WhenIdle(callback):
                self._when_idle.append(callback)
            case MapBlocks(callback):
                self._call_back(lambda: callback(self._block_image()))

    def _cancel(self, number: SequenceId) -> None:
        request = self._open.get(number)
        if request is not None:
            self._cancelled += 1
            self._forget(request)
            request.tell("cancelled")

    def _step(self) -> None:
        started, computing_s = time.perf_counter(), 0.0
        schedule = self._scheduler.schedule()
        self._note(schedule)
        if schedule.plan is not None:
            computing_s = self._execute(schedule.plan)
        self.statistics = self._statistics()  # before anybody wakes up and looks at it
        self._wake_readers()
        if schedule.plan is not None:
            self.latencies.host.observe(time.perf_counter() - started - computing_s)

    def _execute(self, plan: StepPlan) -> float:
        """Compute a step and deliver its tokens; returns the seconds that the runner took."""
        started = time.perf_counter()
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            self._fail_step(plan, error)
            return time.perf_counter() - started
        computing_s = time.perf_counter() - started
        self._steps += 1
        self._progress_at = started + computing_s
        self.latencies.step.observe(computing_s)
        self._deliver(self._scheduler.update(plan, result))
        return computing_s

    def _note(self, schedule: Schedule) -> None:
        now = time.perf_counter()
        for sequence in schedule.preempted:
            sequence.request.request.tell("preempted")
        for sequence in schedule.admitted:
            request: Request = sequence.request.request
            if request.scheduled_at is None:
                request.scheduled_at = now
                self.latencies.queue.observe(now - request.submitted_at)
                self._gate.scheduled()
                request.tell("scheduled")
        for sequence, error in schedule.failures:
            self._fail(sequence.request.request, error)

    def _deliver(self, outcome: StepOutcome) -> None:
        """Put each new token into its reader's mailbox."""
        now = time.perf_counter()
        self._output_tokens += len(outcome.token_ids)
        logprobs = outcome.logprobs or [None] * len(outcome.token_ids)
        for sequence, token_id, reason, logprob in zip(
            outcome.sequences, outcome.token_ids, outcome.finish_reasons, logprobs, strict=True
        ):
            choice: OpenChoice = sequence.request
            if choice.first_token_at is None:
                token = self._first_token(choice, SampledToken(token_id, logprobs=logprob), now)
                self._deliver_more(choice, token, reason, now)
                continue
            self.latencies.inter_token.observe(now - choice.last_token_at)
            choice.last_token_at = now
            if reason is None and logprob is None and choice.stops is None and choice.index == 0:
                self._put(choice.request.mailbox, token_id)
            else:
                token = SampledToken(token_id, logprobs=logprob)
                self._deliver_more(choice, token, reason, now)
        for sequence, error in outcome.failures:
            self._fail(sequence.request.request, error)

    def _first_token(self, choice: OpenChoice, token: SampledToken, now: float) -> SampledToken:
        """The prompt is computed: the other choices continue from it."""
        choice.first_token_at = choice.last_token_at = now
        if choice.index > 0:
            return token
        self.latencies.first_token.observe(now - choice.request.submitted_at)
        choice.request.tell("first_token")
        for other in choice.request.choices[1:]:
            self._scheduler.add(other.sequence)
        if choice.sequence.params.prompt_logprobs is None:
            return token
        return attrs.evolve(token, prompt_logprobs=(None, *choice.sequence.prompt_logprobs))

    def _deliver_more(
        self, choice: OpenChoice, token: SampledToken, reason: FinishReason | None, now: float
    ) -> None:
        """A token of which there is more to say than its id."""
        request = choice.request
        if request.number not in self._open:  # another choice has failed in this step
            return
        text = None
        if choice.stops is not None:
            try:
                text, stopped = choice.stops.push(token.id, last=reason is not None)
            except RequestFailed as failure:
                self._fail(request, failure)
                return
            if stopped:
                self._scheduler.cancel(choice.sequence)  # unless it has ended by itself
                reason = "stop"
        choice.finish_reason = reason
        end = _end(choice, reason, now) if reason is not None else None
        self._put(request.mailbox, attrs.evolve(token, choice=choice.index, text=text, end=end))
        if end is not None:
            self._choice_ended(request, end)

    def _choice_ended(self, request: Request, end: End) -> None:
        request.num_ended += 1
        usage = end.usage
        self.traffic.add(request.submitted_at, usage.prompt_tokens, usage.output_tokens)
        if request.num_ended == len(request.choices):
            self._finished += 1
            self.latencies.request.observe(end.timings.total_s)
            self._forget(request)
            request.tell("finished")

    def _put(self, mailbox: Mailbox, item: MailItem) -> None:
        if mailbox.put(item):
            self._to_wake.setdefault(mailbox.post, []).append(mailbox)

    def _wake_readers(self) -> None:
        """One wake-up for each event loop, even if none of its readers waits: it may have ended."""
        wake, self._to_wake = self._to_wake, {}
        for post, mailboxes in wake.items():
            try:
                post(_Wake(post, mailboxes))
            except RuntimeError:  # that event loop has ended, and its readers with it
                self._cancel_readers(post)

    def _cancel_readers(self, post: Post) -> None:
        for request in list(self._open.values()):
            if request.mailbox.post == post:
                self._cancel(request.number)
        self.statistics = self._statistics()

    def _fail_step(self, plan: StepPlan, cause: Exception) -> None:
        logger.warning("a step failed", exc_info=cause, extra={"event": "step_failed"})
        for sequence in self._scheduler.abandon(plan):
            error = StepFailed(f"a step failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            self._fail(sequence.request.request, error)

    def _fail(self, request: Request, error: RequestFailed) -> None:
        """End the whole request; again, for another of its choices, is a no-op."""
        if request.number in self._open:
            self._failed += 1
            self._put(request.mailbox, error)
            self._forget(request)
            _tell_failure(request, error)

    def _forget(self, request: Request) -> None:
        """The request is over: its blocks, its id and its place in the queue are free."""
        del self._open[request.number]
        for choice in request.choices:
            self._scheduler.cancel(choice.sequence)
        if request.scheduled_at is None:
            self._gate.scheduled()
        self._gate.leave(request.id)

    # -- the end -------------------------------------------------------------------------------

    def _end(self) -> None:
        """Nobody waits for ever: every open or late request learns that the engine is gone."""
        self._ended = True
        self._progress_at = None
        self._gate.open_wide()
        self._attempt(self._scheduler.cancel_all)
        for request in list(self._open.values()):
            self._put(request.mailbox, self.end_error())
            self._forget(request)
            request.tell("failed", error=type(self.end_error()).__name__)
        while not self._inbox.empty():
            self._handle_late(self._inbox.get())
        self.statistics = self._statistics()
        self._wake_readers()
        self._tell_idle()
        self._attempt(self._runner.close)
        logger.info("engine closed", extra={"event": "engine_closed"})
        atexit.unregister(self._exit)

    def _attempt(self, release: Callable[[], None]) -> None:
        """Release something; what ended the engine may well get in the way, and stops here."""
        try:
            release()
        except Exception:
            logger.warning("the engine ended, but could not release everything", exc_info=True)

    def _exit(self) -> None:
        """The process ends: stop between two steps, not inside the model."""
        self.post(Close("now"))
        self.join(EXIT_GRACE_S)

    def _handle_late(self, message: Message) -> None:
        match message:
            case Submit(request):
                self._refuse(request)
            case WhenIdle(callback):
                self._when_idle.append(callback)
            case MapBlocks(callback):
                self._call_back(lambda: callback(self._block_image()))
            case _:
                pass

    def _refuse(self, request: Request) -> None:
        """The engine is closing, or has ended: this request comes too late."""
        self._put(request.mailbox, self.end_error())
        self._gate.scheduled()
        self._gate.leave(request.id)
        request.tell("failed", error=type(self.end_error()).__name__)

    def end_error(self) -> EngineBroken | EngineClosed:
        """What a request gets from an engine that has ended."""
        if self.broken_by is None:
            return EngineClosed("the engine was closed")
        cause = self.broken_by
        error = EngineBroken(f"the engine ended by {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    def _tell_idle(self) -> None:
        callbacks, self._when_idle = self._when_idle, []
        for callback in callbacks:
            self._call_back(callback)

    @staticmethod
    def _call_back(callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop of who asked has ended
            callback()

    def _block_image(self) -> BlockImage:
        scheduler = self._scheduler
        return BlockImage(
            geometry=self._geometry,
            statistics=self.statistics,
            sequences=tuple(
                SequenceImage(_name(sequence.request), sequence.id, first, blocks, num_tokens)
                for sequence, first, blocks, num_tokens in scheduler.block_tables()
            ),
            preempted=scheduler.waiting_preempted,
            cached_flags=scheduler.cached_flags,
        )

    def _statistics(self) -> EngineStatistics:
        scheduler = self._scheduler
        swap = scheduler.swap
        return EngineStatistics(
            pool=scheduler.pool_statistics(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            live_tokens=scheduler.live_tokens,
            head_blocked=scheduler.blocked,
            steps=self._steps,
            prompt_tokens=scheduler.prompt_tokens,
            cached_prompt_tokens=scheduler.cached_prompt_tokens,
            output_tokens=self._output_tokens,
            preemptions=scheduler.num_preemptions,
            swapped_preemptions=scheduler.num_swapped,
            swap_full=swap.num_full,
            swap=SwapStatistics(
                num_blocks=swap.num_blocks,
                used_blocks=swap.used_blocks,
                swapped_out_blocks=swap.swapped_out_blocks,
                swapped_in_blocks=swap.swapped_in_blocks,
            ),
            recomputed_tokens=scheduler.recomputed_tokens,
            requests_finished=self._finished,
            requests_cancelled=self._cancelled,
            requests_failed=self._failed,
        )


class _Wake:
    """Wakes the readers of one event loop, a few in each of its rounds: others wait there too."""

    def __init__(self, post: Post, mailboxes: list[Mailbox]) -> None:
        self._post = post
        self._mailboxes = mailboxes

    def __call__(self) -> None:
        for mailbox in self._mailboxes[:WOKEN_AT_ONCE]:
            mailbox.wake()
        rest = self._mailboxes[WOKEN_AT_ONCE:]
        if rest:
            with suppress(RuntimeError):  # the event loop is about to end
                self._post(_Wake(self._post, rest))


def _tell_failure(request: Request, error: RequestFailed) -> None:
    name = type(error).__name__
    request.tell("failed", error=name)
    # An error without a name of its own quotes a tokenizer, and that may quote the output.
    reason = name if type(error) is RequestFailed else f"{name}: {error}"
    logger.warning(
        "request %s failed by %s",
        request.id,
        reason,
        extra={"event": "request_failed", "request_id": request.id, "error": name},
    )


def _name(choice: OpenChoice) -> str:
    """The request's id, with the number of the choice where there are several."""
    several = len(choice.request.choices) > 1
    return f"{choice.request.id}[{choice.index}]" if several else choice.request.id


def _end(choice: OpenChoice, reason: FinishReason, now: float) -> End:
    sequence, request = choice.sequence, choice.request
    scheduled = request.scheduled_at or now
    first = choice.first_token_at or now
    return End(
        reason,
        Usage(
            prompt_tokens=sequence.prompt_tokens,
            output_tokens=len(sequence.tokens) - sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            preemptions=sequence.num_preemptions,
        ),
        Timings(
            scheduled_s=scheduled - request.submitted_at,
            first_token_s=first - request.submitted_at,
            total_s=now - request.submitted_at,
        ),
    )
