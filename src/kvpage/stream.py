"""Tokens on their way from the engine thread to a task."""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
        index: 0 for the first generated token of its choice.
        choice: which of the request's `n` outputs it belongs to.
        logprob: its log-probability, if the request asked.
        top_logprobs: `(token id, log-probability)` of the likeliest tokens, if the request asked.
        prompt_logprobs: on the first token, if the request asked: one for each token of the prompt,
            None for its first.
        finish_reason: on the last token of a choice `"stop"` or `"length"`, else None.
        usage: of the choice, on its last token.
        timings: of the choice, on its last token.
    """

    text: str
    id: int
    index: int
    choice: int = 0
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@attrs.frozen
class Choice:
    """One finished output of a request.

    Attributes:
        text: the decoded output, special tokens skipped.
        token_ids: all generated tokens.
        finish_reason: `"stop"` or `"length"`.
        usage: token counts of this output.
        timings: seconds of this output.
        logprobs: one for each generated token, if the request asked.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[Logprobs, ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[Token]) -> Self:
        """Put together the tokens of one choice; the last one must be the end."""
        last = tokens[-1]
        if last.finish_reason is None or last.usage is None or last.timings is None:
            raise ValueError("the last token does not end the choice")
        return cls(
            text="".join(token.text for token in tokens),
            token_ids=tuple(token.id for token in tokens),
            finish_reason=last.finish_reason,
            usage=last.usage,
            timings=last.timings,
            logprobs=tuple(
                Logprobs(token.logprob, token.top_logprobs)
                for token in tokens
                if token.logprob is not None
            ),
        )


@attrs.frozen
class Completion:
    """A finished request. What it says of one output is said of the first choice.

    Attributes:
        choices: the outputs, `n` of them.
        prompt_logprobs: one for each token of the prompt, None for its first, if the request asked.
    """

    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[Logprobs | None, ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[Token]) -> Self:
        """Put together all the tokens of a stream."""
        num_choices = 1 + max(token.choice for token in tokens)
        by_choice: list[list[Token]] = [[] for _ in range(num_choices)]
        for token in tokens:
            by_choice[token.choice].append(token)
        choices = tuple(Choice.of(of_choice) for of_choice in by_choice)
        return cls(choices, by_choice[0][0].prompt_logprobs)

    @property
    def text(self) -> str:
        """The decoded output of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """How the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Token counts of the first choice."""
        return self.choices[0].usage

    @property
    def timings(self) -> Timings:
        """Seconds of the first choice."""
        return self.choices[0].timings

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        """One for each generated token of the first choice, if the request asked."""
        return self.choices[0].logprobs


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
        choice: which of the request's outputs it belongs to.
        text: its text, where the engine had to decode it to look for stop strings.
        logprobs: where the request asked.
        prompt_logprobs: on the first token, where the request asked.
        end: on the last token of a choice.
    """

    id: int
    choice: int = 0
    text: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    end: End | None = None


MailItem = int | SampledToken | BaseException
"""A token id, a token with more to say, or what the request failed by."""


class Mailbox:
    """One request's tokens, from the engine thread to the one task that reads them.

    Args:
        post: reaches the reader's event loop.
        at_once: how many tokens, unless one ends an output, are worth waking the reader for.

    Attributes:
        post: as given.
    """

    def __init__(self, post: Post, at_once: int = 1) -> None:
        self.post = post
        self._at_once = at_once
        self._items: deque[MailItem] = deque()
        self._waiter: anyio.Event | None = None
        self._closed = False

    def put(self, item: MailItem) -> bool:
        """Add an item, from any thread; True if the reader wants `wake` on its loop."""
        self._items.append(item)
        ends = not isinstance(item, int) and (isinstance(item, BaseException) or item.end)
        return bool(ends) or len(self._items) >= self._at_once

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
        self,
        submit: Callable[[], Awaitable[OpenRequest]],
        new_detokenizer: Callable[[], Detokenizer | None],
        num_choices: int = 1,
    ) -> None:
        self._submit = submit
        self._choices = [_Choice(new_detokenizer()) for _ in range(num_choices)]
        self._num_open = num_choices
        self._request: OpenRequest | None = None
        self._starting: anyio.CancelScope | None = None
        self._reading = False
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
            self._over = True
            raise item
        sampled = SampledToken(item) if isinstance(item, int) else item
        if sampled.end is not None:
            self._num_open -= 1
            self._over = self._num_open == 0
        return self._choices[sampled.choice].next_token(sampled)


class _Choice:
    """One output of a request, on the reader's side."""

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self._detokenizer = detokenizer
        self._num_tokens = 0

    def next_token(self, sampled: SampledToken) -> Token:
        index, self._num_tokens = self._num_tokens, self._num_tokens + 1
        logprobs, end = sampled.logprobs, sampled.end
        return Token(
            text=self._text(sampled),
            id=sampled.id,
            index=index,
            choice=sampled.choice,
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
