"""An engine that says back what the user said, and a server over it on loopback."""

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import anyio
import numpy as np
import numpy.typing as npt
import uvicorn
from starlette.types import ASGIApp

from kvpage import AsyncEngine
from kvpage.blocks import PoolGeometry
from kvpage.plan import StepPlan, StepResult
from kvpage.request import EngineModel
from kvpage.testing import FakeRunner
from tests.engine.runners import PATIENCE_S, Gate

GEOMETRY = PoolGeometry(num_blocks=256, block_size=16, max_model_len=512)
VOCAB_SIZE = 128
END, SPEAKS, SAYS, SAID = 0, 1, 2, 3
"""Tokens: the end; the model is to speak; the user's words begin; they have ended."""


class AsciiTokenizer:
    """A token is an ASCII character; others are question marks.

    Attributes:
        chat_template: names the form of tool calls that it teaches.
    """

    def __init__(self, chat_template: str | None = "tools <tool_call>") -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, **_options: bool) -> dict[str, list[int]]:
        return {"input_ids": [*text.encode("ascii", "replace")]}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **_options: Any,
    ) -> dict[str, list[int]]:
        """Tools, roles and contents in a row."""
        text = "".join(
            f"{message['role']}{chr(SAYS)}{message['content']}{message.get('tool_calls', '')}"
            f"{chr(SAID)}"
            for message in messages
        )
        return self(f"{tools or ''}{text}{chr(SPEAKS)}")

    def convert_tokens_to_ids(self, _token: str) -> None:
        """No token has the name of a byte."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: bool) -> str:
        return "".join(chr(token) for token in ids if token > SAID or not skip_special_tokens)


def echo(tokens: npt.NDArray[np.int64]) -> int:
    """In a chat what the user said last, and then the end; else the alphabet, over and over."""
    spoken = np.flatnonzero(tokens == SPEAKS)
    if not all(mark in tokens for mark in (SPEAKS, SAYS, SAID)):
        return ord("a") + (int(tokens[-1]) - ord("a") + 1) % 26
    begins, ends = (np.flatnonzero(tokens == mark)[-1] for mark in (SAYS, SAID))
    words = tokens[begins + 1 : ends]
    place = len(tokens) - int(spoken[-1]) - 1
    return int(words[place]) if place < len(words) else END


class EchoRunner:
    """Computes `echo`; each step comes to a gate first.

    Attributes:
        gate: open unless a test holds it.
        adapters: numbers of the adapters that sequences came with.
    """

    def __init__(self, geometry: PoolGeometry = GEOMETRY, *, free_steps: int | None = None) -> None:
        self.gate = Gate(free_steps)
        self.adapters: set[int] = set()
        self._fake = FakeRunner(geometry, next_token=echo)

    def execute(self, plan: StepPlan) -> StepResult:
        self.gate.pass_through()
        self.adapters.update(() if plan.adapters is None else plan.adapters.tolist())
        return self._fake.execute(plan)

    def close(self) -> None:
        self._fake.close()


def echo_engine(
    runner: EchoRunner | None = None,
    tokenizer: Any = None,
    geometry: PoolGeometry = GEOMETRY,
    adapters: tuple[str, ...] = (),
    **settings: Any,
) -> AsyncEngine:
    """An engine over `echo`."""
    model = EngineModel(
        "echo", VOCAB_SIZE, (END,), tokenizer or AsciiTokenizer(), adapters=adapters
    )
    return AsyncEngine.from_runner(runner or EchoRunner(geometry), geometry, model, **settings)


@contextmanager
def serving(app: ASGIApp, lifespan: Literal["on", "off"] = "off") -> Iterator[str]:
    """Serve `app` by uvicorn in a thread; yields its address."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:  # queues from here on
        config = uvicorn.Config(
            app, lifespan=lifespan, ws="none", log_config=None, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(3 * PATIENCE_S)
            assert not thread.is_alive()


async def cancelled(engine: AsyncEngine, runner: EchoRunner) -> None:
    """Wait, step by step, until the one open request is cancelled; then let all steps pass."""
    for _ in range(200):
        if engine.stats().requests_cancelled:
            break
        runner.gate.allow()
        await anyio.sleep(0.01)
    runner.gate.open()
    await engine.idle()
    assert engine.stats().requests_cancelled == 1
