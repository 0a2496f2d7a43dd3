"""Tokens on their way from the engine thread to a task."""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel
import attrs

from kvpage.admission import Post
from kvpage.detokenizer import Detokenizer
from kvpage.sampling import Logprobs
from kvpage.sequence import FinishReason


@attrs.frozen
class Usage:
    """Tokens of one request.

    Attributes:
        prompt_tokens: length of the prompt.
        output_tokens: tokens generated.
        cached_tokens: prompt tokens that the prefix cache gave.
        preemptions: how often the request lost its blocks and was computed again.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int


@attrs.frozen
class Timings:
    """Seconds of one request, counted from its submission.

    Attributes:
        scheduled_s: until its first step began.
        first_token_s: until its first token was sampled.
        total_s: until its last token was sampled.
    """

    scheduled_s: float
    first_token_s: float
    total_s: float


@attrs.frozen
class Token:
    """One generated token.

    Attributes:
        text: what can be shown now; the joined texts of a stream equal the full decoding.
        id: the token id.
        index: 0 for the first generated token.
        logprob: its log-probability, if the request asked.
        top_logprobs: `(token id, log-probability)` of the likeliest tokens, if the request asked.
        prompt_logprobs: on the first token, if the request asked: one for each token of the prompt,
            None for its first.
        finish_reason: on the last token `"stop"` or `"length"`, else None.
        usage: on the last token.
        timings: on the last token.
    """

    text: str
    id: int
    index: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@attrs.frozen
class Completion:
    """A finished request.

    Attributes:
        text: the decoded output, special tokens skipped.
        token_ids: all generated tokens.
        finish_reason: `"stop"` or `"length"`.
        usage: token counts.
        timings: seconds.
        logprobs: one for each generated token, if the request asked.
        prompt_logprobs: one for each token of the prompt, None for its first, if the request asked.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] = ()


@attrs.frozen
class End:
    """How a request ended."""

    finish_reason: FinishReason
    usage: Usage
    timings: Timings


@attrs.frozen
class SampledToken:
    """A token of which there is more to say than its id, as the engine thread sends it.

    Attributes:
        id: the token.
        text: its text, where the engine had to decode it to look for stop strings.
        logprobs: where the request asked.
        prompt_logprobs: on the first token, where the request asked.
        end: on the last token.
    """

    id: int
    text: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    end: End | None = None


MailItem = int | SampledToken | BaseException
"""A token id, a token with more to say, or what the request failed by."""


class Mailbox:
    """One request's tokens, from the engine thread to the one task that reads them.

    Attributes:
        post: reaches the reader's event loop.
    """

    def __init__(self, post: Post) -> None:
        self.post = post
        self._items: deque[MailItem] = deque()
        self._waiter: anyio.Event | None = None
        self._closed = False

    def put(self, item: MailItem) -> bool:
        """Add an item, from any thread; True if the reader waits and wants `wake` on its loop."""
        self._items.append(item)
        return self._waiter is not None

    def wake(self) -> None:
        """Let the reader look again. On the reader's event loop only."""
        if self._waiter is not None:
            self._waiter.set()

    def close(self) -> None:
        """Let the reader go; nothing comes out any more. On the reader's event loop only."""
        self._closed = True
        self.wake()

    async def get(self) -> MailItem | None:
        """The next item, or None once closed; yields to the event loop once in any case."""
        if self._items:
            await anyio.lowlevel.checkpoint()
        while not self._items and not self._closed:
            self._waiter = anyio.Event()
            if not self._items:  # the engine thread may have put one before it saw the waiter
                await self._waiter.wait()
            self._waiter = None
        return None if self._closed else self._items.popleft()


@attrs.frozen
class OpenRequest:
    """The reader's end of a submitted request.

    Attributes:
        mailbox: where its tokens arrive.
        cancel: ends it; may be called from any thread, any number of times, and at any time.
    """

    mailbox: Mailbox
    cancel: Callable[[], None]


class TokenStream(AsyncIterator[Token]):
    """The tokens of one request: an async iterator and an async context manager.

    The request is submitted when the stream is first awaited (entered or iterated). Leaving it in
    any way ends it and frees its blocks before the next step: `aclose`, the end of `async with`,
    `break` out of a loop that holds the only reference, cancellation of the task that reads,
    garbage collection. A stream has one reader at a time; another task of the same event loop may
    close it under the reader's feet, which ends the reader's loop.
    """

    def __init__(
        self, submit: Callable[[], Awaitable[OpenRequest]], detokenizer: Detokenizer | None
    ) -> None:
        self._submit = submit
        self._detokenizer = detokenizer
        self._request: OpenRequest | None = None
        self._starting: anyio.CancelScope | None = None
        self._reading = False
        self._index = 0
        self._over = False

    async def __aenter__(self) -> Self:
        """Submit the request.

        Raises:
            RequestError: it cannot be served.
            EngineBusy: the queue is full, and the engine was told to raise.
            EngineClosed: the engine was closed.
        """
        await self._start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """The next token.

        Raises:
            RequestError: see `__aenter__`; the first token submits the request.
            RequestFailed: the request ended by an error.
            EngineClosed: the engine was closed.
        """
        if self._reading:
            raise anyio.BusyResourceError("reading from")
        await self._start()
        if self._over or self._request is None:
            raise StopAsyncIteration
        item = await self._next_item(self._request.mailbox)
        if item is None:
            raise StopAsyncIteration
        try:
            return self._token(item)
        except BaseException:  # it failed, or it cannot be decoded
            self._leave()
            raise

    async def aclose(self) -> None:
        """End the request. Again is a no-op; it never waits for the engine."""
        self._leave()
        if self._starting is not None:
            self._starting.cancel()
        if self._request is not None:
            self._request.mailbox.close()
        await anyio.lowlevel.cancel_shielded_checkpoint()

    def __del__(self) -> None:
        self._leave()

    async def _start(self) -> None:
        """Submit, once; without effect if another task closes the stream meanwhile."""
        if self._over or self._request is not None:
            return
        if self._starting is not None:
            raise anyio.BusyResourceError("reading from")
        with anyio.CancelScope() as self._starting:
            await self._submit_or_end()
        self._starting = None

    async def _submit_or_end(self) -> None:
        try:
            self._request = await self._submit()
        except BaseException:
            self._over = True
            raise
        if self._over:  # closed while it was submitted, too late to stop that
            self._request.cancel()

    async def _next_item(self, mailbox: Mailbox) -> MailItem | None:
        self._reading = True
        try:
            return await mailbox.get()
        except BaseException:  # the reading task was cancelled: nobody will read on
            self._leave()
            raise
        finally:
            self._reading = False

    def _leave(self) -> None:
        if not self._over and self._request is not None:
            self._request.cancel()
        self._over = True

    def _token(self, item: MailItem) -> Token:
        if isinstance(item, BaseException):
            raise item
        sampled = SampledToken(item) if isinstance(item, int) else item
        index, self._index = self._index, self._index + 1
        logprobs, end = sampled.logprobs, sampled.end
        self._over = end is not None
        return Token(
            text=self._text(sampled),
            id=sampled.id,
            index=index,
            logprob=logprobs.own if logprobs else None,
            top_logprobs=logprobs.top if logprobs else (),
            prompt_logprobs=sampled.prompt_logprobs,
            finish_reason=end.finish_reason if end else None,
            usage=end.usage if end else None,
            timings=end.timings if end else None,
        )

    def _text(self, sampled: SampledToken) -> str:
        if sampled.text is not None:
            return sampled.text
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(sampled.id)
        return text + self._detokenizer.finish() if sampled.end else text
