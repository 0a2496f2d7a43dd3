"""A stream can be left in any way and at any time; nothing of it stays behind."""

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable

import anyio
import pytest

from kvpage import EngineClosed, SamplingParams, TokenStream
from kvpage.admission import post_to_current_loop
from kvpage.stream import Mailbox, OpenRequest
from tests.engine.conftest import Run
from tests.engine.scenes import BACKENDS, Scene, check_nothing_left, scene, until

LEFT = "the one that is left"
Arrive = Callable[[], Awaitable[None]]
MakeStream = Callable[[], TokenStream]
Leave = Callable[[Scene, MakeStream, Arrive], Awaitable[None]]
Situation = Callable[[Leave], Awaitable[None]]


# -- ways of leaving, while the reader waits for its next token ------------------------------------


async def read_to_end(stream: TokenStream) -> None:
    async for _ in stream:
        pass


async def cancel_the_task(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_to_end, make())
        await arrive()
        tasks.cancel_scope.cancel()


async def run_into_a_timeout(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    async def read() -> None:
        with timeout:
            await read_to_end(make())

    timeout = anyio.move_on_after(None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await arrive()
        timeout.deadline = anyio.current_time()
    assert timeout.cancelled_caught


async def close_from_another_task(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    stream = make()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_to_end, stream)
        await arrive()
        await stream.aclose()


async def close_the_engine(scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    async def read() -> None:
        with pytest.raises(EngineClosed):
            await read_to_end(make())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await arrive()
        tasks.start_soon(scene.engine.aclose)
        await anyio.wait_all_tasks_blocked()
        scene.let_go()


# -- ways of leaving, while nobody reads -----------------------------------------------------------


async def close_the_stream(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    stream = await make().__aenter__()
    await arrive()
    await stream.aclose()


async def end_the_with_block(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    async with make():
        await arrive()


async def raise_in_the_with_block(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with make():
            await arrive()
            raise ZeroDivisionError


async def drop_it(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    stream = await make().__aenter__()
    await arrive()
    del stream


async def collect_it_as_garbage(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    cycle: list[object] = [await make().__aenter__()]
    cycle.append(cycle)
    await arrive()
    del cycle
    gc.collect()


async def break_out(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    async for _ in make():
        await arrive()
        break


async def return_out_of_the_loop(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    async def first() -> int:
        async for token in make():
            await arrive()
            return token.id
        raise AssertionError("no token came")

    await first()


WHILE_READING = (
    cancel_the_task,
    run_into_a_timeout,
    close_from_another_task,
    close_the_engine,
)
WITHOUT_A_TOKEN = (
    *WHILE_READING,
    close_the_stream,
    end_the_with_block,
    raise_in_the_with_block,
    drop_it,
    collect_it_as_garbage,
)
WITH_A_TOKEN = (*WITHOUT_A_TOKEN, break_out, return_out_of_the_loop)


# -- situations in which it is left ----------------------------------------------------------------


async def while_its_prompt_is_encoded(leave: Leave) -> None:
    async with scene(free_prompts=0) as at:
        await leave(at, lambda: at.engine.generate("text", request_id=LEFT), at.tokenizer.gate.held)
        await check_left(at)


async def while_it_waits_for_admission(leave: Leave) -> None:
    async with scene(free_steps=0, max_num_seqs=1, max_waiting=1) as at:

        async def arrive() -> None:
            await until(lambda: len(at.engine._gate._waiters) == 1)

        async with at.engine.generate([1]), at.engine.generate([2]):
            await leave_beside_others(at, leave, arrive)
        await check_left(at, cancelled=2)


async def while_it_queues(leave: Leave) -> None:
    async with scene(free_steps=0, max_num_seqs=1) as at:

        async def arrive() -> None:
            await at.runner.gate.held()
            while (at.engine.stats().num_running, at.engine.stats().num_waiting) != (1, 1):
                at.runner.gate.allow()
                await at.runner.gate.held()

        async with at.engine.generate([1]):
            await leave_beside_others(at, leave, arrive)
        await check_left(at, cancelled=2)


async def leave_beside_others(at: Scene, leave: Leave, arrive: Arrive) -> None:
    await leave(at, lambda: at.engine.generate([3, 4], request_id=LEFT), arrive)


async def between_chunks_of_its_prompt(leave: Leave) -> None:
    async with scene(free_steps=1, max_batch_tokens=4) as at:
        prompt = list(range(12))
        await leave(at, lambda: at.engine.generate(prompt, request_id=LEFT), at.runner.gate.held)
        await check_left(at, cancelled=1)


async def while_it_decodes(leave: Leave) -> None:
    async with scene(free_steps=1) as at:
        await leave(at, lambda: at.engine.generate([1, 2, 3], request_id=LEFT), at.runner.gate.held)
        await check_left(at, cancelled=1)


async def in_the_step_that_finishes_it(leave: Leave) -> None:
    params = SamplingParams(max_tokens=2)
    async with scene(free_steps=1) as at:
        await leave(
            at,
            lambda: at.engine.generate([1, 2, 3], params, request_id=LEFT),
            at.runner.gate.held,
        )
        await check_left(at, finished=1)


async def after_it_finished_unread(leave: Leave) -> None:
    params = SamplingParams(max_tokens=3)
    async with scene() as at:

        async def arrive() -> None:
            await until(lambda: at.engine.stats().requests_finished == 1)

        await leave(at, lambda: at.engine.generate([1, 2, 3], params, request_id=LEFT), arrive)
        await check_left(at, finished=1)


async def check_left(at: Scene, *, cancelled: int = 0, finished: int = 0) -> None:
    """Nothing is left of the stream, and that is not because it ran to its end."""
    at.let_go()
    if not at.runner.closed:
        await at.engine.idle()
    stats = at.engine.stats()
    assert stats.pool.used_blocks == 0
    if not at.runner.closed:
        assert (stats.requests_cancelled, stats.requests_finished) == (cancelled, finished)
        await check_nothing_left(at.engine, LEFT)


async def cancel_the_asyncio_task(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    reader = asyncio.create_task(read_to_end(make()))
    await arrive()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


async def run_into_an_asyncio_timeout(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    async def read() -> None:
        with pytest.raises(TimeoutError):
            async with timeout:
                await read_to_end(make())

    timeout = asyncio.timeout(None)
    reader = asyncio.create_task(read())
    await arrive()
    timeout.reschedule(asyncio.get_running_loop().time())
    await reader


SITUATIONS_OF_A_READER = (
    while_its_prompt_is_encoded,
    while_it_waits_for_admission,
    while_it_queues,
    between_chunks_of_its_prompt,
    while_it_decodes,
    in_the_step_that_finishes_it,
)
CASES: list[tuple[Situation, Leave]] = [
    *((while_its_prompt_is_encoded, way) for way in WHILE_READING),
    *((while_it_waits_for_admission, way) for way in WHILE_READING),
    *((while_it_queues, way) for way in WITHOUT_A_TOKEN),
    *((between_chunks_of_its_prompt, way) for way in WITHOUT_A_TOKEN),
    *((while_it_decodes, way) for way in WITH_A_TOKEN),
    # Closing the engine lets the step end, and so the stream; test_closing.py has that.
    *((in_the_step_that_finishes_it, way) for way in WITH_A_TOKEN if way is not close_the_engine),
    *((after_it_finished_unread, way) for way in WITH_A_TOKEN if way not in WHILE_READING),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("situation", "leave"), CASES, ids=[f"{s.__name__}-{w.__name__}" for s, w in CASES]
)
def test_leaving_frees_everything(situation: Situation, leave: Leave, backend: str) -> None:
    """Blocks, rows, queue places and the id of a left request are free at once."""
    anyio.run(situation, leave, backend=backend)


@pytest.mark.parametrize("leave", [cancel_the_asyncio_task, run_into_an_asyncio_timeout])
@pytest.mark.parametrize("situation", SITUATIONS_OF_A_READER)
def test_asyncio_s_own_cancellation_frees_everything(situation: Situation, leave: Leave) -> None:
    """`Task.cancel` and `asyncio.timeout` end a request as anyio's scopes do."""
    anyio.run(situation, leave, backend="asyncio")


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
