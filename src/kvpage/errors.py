"""Every exception that kvpage raises.

A fault ends in `Error` (or says what failed); an expected signal does not::

    KvpageError
    ├── PluginError            an allocator plugin is unknown or breaks the rules of the door
    ├── ConfigError            an engine setting cannot work
    ├── TraceError             a request trace cannot be read, or a line of it makes no sense
    ├── UnsupportedModelError  the model's attention cannot be paged
    ├── RequestError           the request cannot be served; nothing was done for it
    │   ├── RequestTooLong     prompt and max_tokens do not fit max_model_len
    │   └── DuplicateRequest   a request of this id is still open
    ├── RequestFailed          the request was accepted and ended early
    │   ├── AllocatorFault     the allocator raised, or gave an answer that breaks the contract
    │   ├── OutgrewPool        alone in the pool, the sequence found no more room
    │   └── StepFailed         the model, or a logits processor, failed in a step of this request
    ├── EngineBusy             signal: `max_waiting` requests are queued already
    ├── EngineClosed           signal: the engine was closed
    ├── EngineBroken           the engine thread ended with an exception; `__cause__` has it
    └── LedgerError            the ledger of blocks contradicts itself: a bug, found by `checks`

    OutOfBlocks                signal between allocator and block manager: not now, nothing changed
"""


class KvpageError(Exception):
    """Base of all errors of kvpage."""


class PluginError(KvpageError):
    """An allocator plugin is unknown or breaks the rules of the plugin door."""


class ConfigError(KvpageError, ValueError):
    """An engine setting cannot work; the sentence has the numbers."""


class TraceError(KvpageError, ValueError):
    """A request trace cannot be read; the sentence names the file and, if it has one, the line."""


class UnsupportedModelError(KvpageError):
    """The model's attention cannot run over a paged KV cache; the sentence says why."""


class RequestError(KvpageError, ValueError):
    """The request cannot be served as it is. Raised in the caller's task, before any work."""


class RequestTooLong(RequestError):  # noqa: N818  (reads as the signal that it is)
    """Prompt and `max_tokens` together do not fit `max_model_len`."""


class DuplicateRequest(RequestError):  # noqa: N818
    """A request of the same id is still open."""


class RequestFailed(KvpageError):  # noqa: N818
    """An accepted request ended early; other requests go on."""


class AllocatorFault(RequestFailed):
    """The allocator plugin raised or broke its contract while it served this request."""

    def __init__(self, plugin: str, what: str) -> None:
        super().__init__(f"allocator {plugin!r} {what}")
        self.plugin = plugin


class OutgrewPool(RequestFailed):
    """The sequence had the whole pool to itself and still found no room for its next token."""


class StepFailed(RequestFailed):
    """The model or a logits processor raised in a step of this request, or left no token to choose.

    `__cause__` has the exception, if there was one.
    """


class EngineBusy(KvpageError):  # noqa: N818
    """`max_waiting` requests are queued already; try again later."""


class EngineClosed(KvpageError):  # noqa: N818
    """The engine was closed; make a new one."""


class EngineBroken(KvpageError):  # noqa: N818
    """The engine thread ended with an exception (see `__cause__`); make a new engine."""


class LedgerError(KvpageError):
    """The ledger of blocks contradicts itself: a bug of kvpage, or of the allocator that it names.

    Only an engine with `checks="everything"` looks for it, and breaks by it.
    """


class OutOfBlocks(Exception):  # noqa: N818
    """An allocator cannot grant what was asked now. Nothing observable has changed.

    Attributes:
        needed: blocks that the request needs.
        available: blocks that could be granted to it.
        missing: how many more would have to be free, at least 1.
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks needed, {available} available")
        self.needed = needed
        self.available = available
        self.missing = max(1, needed - available)


def sentence_of(error: BaseException) -> str:
    """The first thing that went wrong, in one line; with its type if it is not one of kvpage's."""
    if isinstance(error, BaseExceptionGroup):
        return sentence_of(error.exceptions[0])
    text = " ".join(str(error).split())
    return text if isinstance(error, KvpageError) and text else f"{type(error).__name__}: {text}"
