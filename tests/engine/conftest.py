"""Event loops for the engine's tests: asyncio and trio, each with a deadline."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

from tests.engine.runners import PATIENCE_S
from tests.engine.scenes import BACKENDS

Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Run:
    """Runs an async function in a new event loop, once on asyncio and once on trio.

    The tests themselves are synchronous, since pytest's plugin would run them on asyncio only.
    """

    def run_in_time(main: Callable[[], Awaitable[None]]) -> None:
        async def in_time() -> None:
            with anyio.fail_after(PATIENCE_S):
                await main()

        anyio.run(in_time, backend=request.param)

    return run_in_time
