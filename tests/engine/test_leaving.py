"""A stream can be left in any way and at any time; nothing of it stays behind."""

import gc
import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvpage import RequestTooLong, SamplingParams, TokenStream
from kvpage.admission import post_to_current_loop
from kvpage.allocators.contiguous import ContiguousAllocator
from kvpage.allocators.dynamic import DynamicAllocator
from kvpage.stream import Mailbox, OpenRequest
from tests.engine import leaving
from tests.engine.conftest import Run
from tests.engine.leaving import LEFT, Leave, Setting, State, read_to_end
from tests.engine.scenes import BACKENDS, check_nothing_left, scene

SLAB = Path(__file__).parents[2] / "examples/kvpage-slab/src/kvpage_slab/__init__.py"


def slab_allocator() -> Any:
    """The allocator of the example plugin, which need not be installed."""
    spec = importlib.util.spec_from_file_location("kvpage_slab", SLAB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SlabAllocator


WAYS_BY_STATE: dict[State, tuple[Leave, ...]] = {
    # Nobody has the stream yet but the task that submits it.
    leaving.while_its_prompt_is_encoded: leaving.WHILE_READING,
    leaving.while_it_waits_for_admission: leaving.WHILE_READING,
    # No token has come that a loop could be left at.
    leaving.while_it_queues: leaving.WITHOUT_A_TOKEN,
    leaving.while_its_prompt_is_computed: leaving.WITHOUT_A_TOKEN,
    leaving.between_chunks_of_its_prompt: leaving.WITHOUT_A_TOKEN,
    leaving.while_its_other_choices_queue: leaving.WITH_A_TOKEN,
    leaving.while_it_decodes: leaving.WITH_A_TOKEN,
    # Closing the engine lets the step end, and so the stream; test_closing.py has that.
    leaving.in_the_step_that_finishes_it: tuple(
        way for way in leaving.WITH_A_TOKEN if way is not leaving.close_the_engine
    ),
    # Its tokens are there already: whoever reads would not wait for any.
    leaving.after_it_finished_unread: tuple(
        way for way in leaving.WITH_A_TOKEN if way not in leaving.WHILE_READING
    ),
}
STATES_OF_A_READER = [
    state for state in WAYS_BY_STATE if state is not leaving.after_it_finished_unread
]


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """What was there before these tests is no garbage of theirs, and need not be searched."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def cases(ways_by_state: dict[State, tuple[Leave, ...]]) -> list[Any]:
    """Every way in every state where there is one."""
    return [
        pytest.param(state, way, id=f"{way.__name__}-{state.__name__}")
        for state, ways in ways_by_state.items()
        for way in ways
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("state", "leave"), cases(WAYS_BY_STATE))
def test_leaving_frees_everything(state: State, leave: Leave, n: int, backend: str) -> None:
    """Blocks, rows, queue places and the id are free at once, and the request beside it goes on."""
    anyio.run(state, Setting(n=n), leave, backend=backend)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "allocator",
    [
        pytest.param(DynamicAllocator, id="dynamic"),
        pytest.param(partial(ContiguousAllocator, reserve="request"), id="contiguous"),
        pytest.param(slab_allocator(), id="slab"),
    ],
)
@pytest.mark.parametrize(
    ("state", "leave"),
    cases(
        {
            state: tuple(way for way in ways if way in leaving.ONE_OF_EACH_KIND)
            for state, ways in WAYS_BY_STATE.items()
        }
    ),
)
def test_leaving_frees_everything_of_every_strategy(
    state: State, leave: Leave, allocator: Any, n: int
) -> None:
    """The same where blocks are chosen otherwise, shared or not."""
    anyio.run(state, Setting(allocator, n), leave)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("state", "leave"), cases(dict.fromkeys(STATES_OF_A_READER, leaving.ON_ASYNCIO))
)
def test_asyncio_s_own_cancellation_frees_everything(state: State, leave: Leave, n: int) -> None:
    """`Task.cancel` and `asyncio.timeout` end a request as anyio's scopes do."""
    anyio.run(state, Setting(n=n), leave, backend="asyncio")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("state", [leaving.while_it_decodes, leaving.in_the_step_that_finishes_it])
def test_an_abandoned_response_frees_everything(state: State, n: int) -> None:
    """A client that goes while the server waits for it, under a framework that closes nothing."""
    # On trio, an abandoned generator is an error of the framework, and warned of.
    anyio.run(state, Setting(n=n), leaving.disconnect_while_it_sends, backend="asyncio")


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaving_before_the_first_await_is_free(backend: str) -> None:
    """A stream that was never awaited submitted nothing, and gives nothing once closed."""

    async def main() -> None:
        async with scene() as at:
            stream = at.engine.generate([1, 2], request_id=LEFT)
            await stream.aclose()
            assert [token async for token in stream] == []
            at.engine.generate([1, 2], request_id=LEFT)
            await check_nothing_left(at.engine, LEFT)
            assert at.engine.stats().requests_cancelled == 0

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaving_what_was_refused_is_a_no_op(backend: str) -> None:
    """A request that the engine never knew of cannot be cancelled, however often."""

    async def main() -> None:
        async with scene() as at:
            stream = at.engine.generate([1] * 1000, request_id=LEFT)
            with pytest.raises(RequestTooLong):
                await anext(stream)
            await stream.aclose()
            await stream.aclose()
            del stream
            await check_nothing_left(at.engine, LEFT)
            assert at.engine.stats().requests_cancelled == 0

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaving_again_is_a_no_op(backend: str) -> None:
    """`aclose` after `break`, after `aclose`, after the end: one request, one cancellation."""

    async def main() -> None:
        async with scene() as at:
            async with at.engine.generate([1, 2]) as stream:
                async for _ in stream:
                    break
                await stream.aclose()
                await stream.aclose()
            assert [token async for token in stream] == []
            await at.engine.idle()
            assert at.engine.stats().requests_cancelled == 1

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_reader_is_refused(backend: str) -> None:
    """Two tasks cannot read one stream; the first one reads on undisturbed."""

    async def main() -> None:
        async with scene(free_steps=0) as at:
            stream = at.engine.generate([1, 2], SamplingParams(max_tokens=2))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read_to_end, stream)
                await at.runner.gate.held()
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(anyio.BusyResourceError):
                    await anext(stream)
                at.let_go()
            assert at.engine.stats().requests_cancelled == 0

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_is_submitted_once(backend: str) -> None:
    """A second task that awaits a stream which is being submitted is refused."""

    async def main() -> None:
        async with scene(free_prompts=0) as at:
            stream = at.engine.generate("text", SamplingParams(max_tokens=2))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read_to_end, stream)
                await at.tokenizer.gate.held()
                with pytest.raises(anyio.BusyResourceError):
                    await stream.__aenter__()
                at.let_go()
            await at.engine.idle()
            assert at.engine.stats().requests_finished == 1

    anyio.run(main, backend=backend)


def test_closing_too_late_to_stop_the_submission_cancels_it(run: Run) -> None:
    """A stream that is closed in the very moment that its request is accepted ends the request."""
    cancelled: list[bool] = []

    async def main() -> None:
        accepted = anyio.Event()

        async def submit() -> OpenRequest:
            await accepted.wait()
            return OpenRequest(Mailbox(post_to_current_loop()), lambda: cancelled.append(True))

        stream = TokenStream(submit, lambda: None)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_to_end, stream)
            await anyio.wait_all_tasks_blocked()
            accepted.set()
            await stream.aclose()

    run(main)
    assert cancelled == [True]
