"""What happens to a request, told to the log and to the request's trace, if it has one.

Few events a request, none per token, and never a word of a prompt or of an output.
"""

import logging
from typing import Literal, Protocol

logger = logging.getLogger("kvpage")
logger.addHandler(logging.NullHandler())  # silent unless the host listens

Event = Literal[
    "queued", "scheduled", "first_token", "preempted", "finished", "cancelled", "failed"
]
"""The last three end a request."""

Facts = dict[str, str | int | list[str]]
"""What is known of an event, by name."""


class Trace(Protocol):
    """Writes down what happens to one request. Called from the engine thread."""

    def tell(self, event: Event, facts: Facts) -> None:
        """Something happened just now."""
        ...


def tell(trace: Trace | None, request_id: str, event: Event, facts: Facts) -> None:
    """Log an event (DEBUG) and add it to the trace, whose failure is logged and goes no further."""
    fields = {"event": event, "request_id": request_id, **facts}
    logger.debug("request %s: %s", request_id, event, extra=fields)
    if trace is None:
        return
    try:
        trace.tell(event, facts)
    except Exception:  # a span processor of the host's
        logger.warning("the trace of request %s could not be written", request_id, exc_info=True)
