"""Naps where threads meet, to find tests that depend on who comes first.

    python -m pytest -p tests.jitter -m "not slow and not cuda" -n 2

The engine thread naps before and after its steps and before it delivers tokens, whoever sends it a
message before sending, and asyncio's loop before each round. `KVPAGE_JITTER_SEED` draws other naps.
"""

import asyncio
import functools
import os
import time
from collections.abc import Callable
from random import Random
from typing import Any

from kvpage.engine_thread import EngineThread

SHORT_S, LONG_S = (0.0, 0.004), (0.01, 0.06)
SHORT_SHARE, LONG_SHARE = 0.25, 0.02

_random = Random(os.environ.get("KVPAGE_JITTER_SEED", "0"))


def nap() -> None:
    """Sleep not at all, mostly."""
    drawn = _random.random()
    if drawn < LONG_SHARE:
        time.sleep(_random.uniform(*LONG_S))
    elif drawn < LONG_SHARE + SHORT_SHARE:
        time.sleep(_random.uniform(*SHORT_S))


def napping(function: Callable[..., Any]) -> Callable[..., Any]:
    """Nap before each call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nap()
        return function(*args, **kwargs)

    return call


def pytest_configure() -> None:
    """Let them nap."""
    places = [(EngineThread, ("_read_inbox", "_step", "_deliver", "post"))]
    for owner, names in [*places, (asyncio.BaseEventLoop, ("_run_once",))]:
        for name in names:
            setattr(owner, name, napping(getattr(owner, name)))
