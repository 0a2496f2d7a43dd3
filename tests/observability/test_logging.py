"""What goes to the logger `kvpage`, at which level, and what never does."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvpage import (
    AllocatorFault,
    EngineBroken,
    PoolGeometry,
    RequestError,
    RequestFailed,
    SamplingParams,
    StepFailed,
)
from kvpage.plan import StepPlan
from tests.engine.runners import CharacterTokenizer, GatedRunner
from tests.engine.scenes import fake_engine
from tests.engine.test_faults import FickleTokenizer, Raising, TalkativeRunner

PROMPT = [1, 2, 3]
SECRET = "a secret of the prompt"


class Listener(logging.Handler):
    """Keeps what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """Everything that is logged, at any level."""
    logger, listener = logging.getLogger("kvpage"), Listener()
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    yield listener.heard
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(listener)


def fields(record: logging.LogRecord, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in names)


def of_level(records: Sequence[logging.LogRecord], level: int) -> list[logging.LogRecord]:
    return [record for record in records if record.levelno == level]


async def test_the_life_of_an_engine_is_told_at_info(records: list[logging.LogRecord]) -> None:
    """Its effective settings as fields, and its end."""
    async with fake_engine(max_num_seqs=5):
        pass
    started, closed = of_level(records, logging.INFO)
    assert fields(started, "event", "model", "num_blocks", "block_size", "max_num_seqs") == (
        "engine_started",
        "fake",
        64,
        4,
        5,
    )
    assert started.getMessage().startswith("engine started: model=fake, num_blocks=64, allocator=")
    assert closed.getMessage() == "engine closed"


async def test_a_request_is_told_at_debug(records: list[logging.LogRecord]) -> None:
    """Each of its events once, with its id and its numbers; nothing per token."""
    async with fake_engine() as engine:
        await engine.complete(PROMPT, SamplingParams(max_tokens=30), request_id="mine")
        await engine.idle()
    told = of_level(records, logging.DEBUG)
    assert [record.getMessage() for record in told] == [
        "request mine: queued",
        "request mine: scheduled",
        "request mine: first_token",
        "request mine: finished",
    ]
    names = ("event", "request_id", "prompt_tokens", "output_tokens", "finish_reasons")
    assert fields(told[-1], *names) == ("finished", "mine", 3, 30, ["length"])


async def test_a_request_that_is_left_is_told_at_debug(records: list[logging.LogRecord]) -> None:
    """Leaving is no fault."""
    async with fake_engine() as engine:
        async with engine.generate(PROMPT) as stream:
            await anext(stream)
        await engine.idle()
    assert of_level(records, logging.DEBUG)[-1].getMessage().endswith(": cancelled")
    assert of_level(records, logging.WARNING) == []


async def test_a_faulty_plugin_is_told_at_warning(records: list[logging.LogRecord]) -> None:
    """With the request that it cost, and the plugin's name."""

    def raising(geometry: PoolGeometry) -> Raising:
        return Raising(geometry, method="extend")

    async with fake_engine(allocator=raising) as engine:
        await engine.complete(PROMPT, SamplingParams(max_tokens=1))
        with pytest.raises(AllocatorFault):
            await engine.complete(PROMPT, request_id="mine")
    (record,) = of_level(records, logging.WARNING)
    assert record.getMessage() == (
        "request mine failed by AllocatorFault: allocator 'raising' raised LookupError in extend: "
        "lost a block"
    )
    assert fields(record, "event", "request_id", "error") == (
        "request_failed",
        "mine",
        "AllocatorFault",
    )


async def test_a_failed_step_is_told_at_warning(records: list[logging.LogRecord]) -> None:
    """Once with its traceback, and once for each request."""

    def fail(_plan: StepPlan) -> None:
        raise ArithmeticError("the model overflowed")

    async with fake_engine(GatedRunner(watch=fail)) as engine:
        with pytest.raises(StepFailed):
            await engine.complete(PROMPT)
    step, request = of_level(records, logging.WARNING)
    assert (step.getMessage(), step.exc_info is not None) == ("a step failed", True)
    assert request.error == "StepFailed"  # type: ignore[attr-defined]
    assert of_level(records, logging.ERROR) == []


async def test_a_broken_engine_is_told_at_error(records: list[logging.LogRecord]) -> None:
    """With its traceback."""
    async with fake_engine(TalkativeRunner()) as engine:
        with pytest.raises(EngineBroken):
            await engine.complete(PROMPT)
    (record,) = of_level(records, logging.ERROR)
    assert (record.getMessage(), record.exc_info is not None) == ("the engine broke", True)


async def test_no_record_has_a_word_of_prompt_or_output(
    records: list[logging.LogRecord],
) -> None:
    """Of requests that finish, that are refused, that are left, and that cannot be decoded."""
    written: list[str] = []
    async with fake_engine(tokenizer=CharacterTokenizer()) as engine:
        params = SamplingParams(max_tokens=4, stop=(SECRET,))
        written += [(await engine.complete(SECRET, params)).text]
        with pytest.raises(RequestError):
            await engine.complete(SECRET * 20)
        async for token in engine.generate(SECRET):
            written += [token.text]
            break
        await engine.idle()
    async with fake_engine(tokenizer=FickleTokenizer()) as engine:
        for stop in ((), ("never",)):
            with pytest.raises(RequestFailed):
                await engine.complete(PROMPT, SamplingParams(stop=stop))
        await engine.idle()
    assert records
    logged = " ".join(f"{record.__dict__}" for record in records)
    for text in (SECRET, *written, "no such character"):
        assert text not in logged


def test_the_logger_has_a_null_handler_and_no_other() -> None:
    """Handlers are the host's."""
    logger = logging.getLogger("kvpage")
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
    assert logger.level == logging.NOTSET
