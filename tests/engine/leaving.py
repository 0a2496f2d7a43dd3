"""The ways in which a stream is left, and the states of its request in which that happens.

A *way* gets a stream, waits until the request is in the state that the test is about, and leaves. A
*state* makes the stream, holds the engine there, and checks that nothing of the request is left and
that the request beside it did not notice.
"""

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from kvpage import EngineClosed, SamplingParams, TokenStream
from kvpage.allocators.fixed import FixedAllocator
from kvpage.plan import StepPlan
from kvpage.testing import undisturbed
from tests.engine.runners import GatedRunner
from tests.engine.scenes import (
    Scene,
    check_full_house,
    check_ledger,
    check_nothing_left,
    scene,
    until,
)

LEFT = "the one that is left"
Arrive = Callable[[], Awaitable[None]]
MakeStream = Callable[[], TokenStream]
Leave = Callable[[Scene, MakeStream, Arrive], Awaitable[None]]

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


async def disconnect_while_it_waits(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    """The client goes, and the server cancels the tasks that serve it."""

    async def send() -> None:
        """The client takes everything at once."""

    async with anyio.create_task_group() as serving:
        serving.start_soon(respond, make(), send)
        await arrive()
        serving.cancel_scope.cancel()


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


async def disconnect_while_it_sends(_scene: Scene, make: MakeStream, arrive: Arrive) -> None:
    """The client goes while the server waits for it to take a token that was read already.

    So the task is cancelled outside of the stream, and the generator of the response's body is
    abandoned where it yielded: on asyncio, another task closes it some time later.
    """
    blocked = anyio.Event()

    async def send() -> None:
        blocked.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as serving:
        serving.start_soon(respond, make(), send)
        await blocked.wait()
        await arrive()
        serving.cancel_scope.cancel()
    gc.collect()  # the traceback of the cancellation may hold on to the generator
    await anyio.lowlevel.checkpoint()
    await anyio.wait_all_tasks_blocked()


async def respond(stream: TokenStream, send: Callable[[], Awaitable[None]]) -> None:
    """What a web framework does with a streaming response."""

    async def body() -> AsyncGenerator[str]:
        async for token in stream:
            yield token.text

    async for _ in body():
        await send()


WHILE_READING = (
    cancel_the_task,
    run_into_a_timeout,
    close_from_another_task,
    disconnect_while_it_waits,
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
ON_ASYNCIO = (cancel_the_asyncio_task, run_into_an_asyncio_timeout)
"""Asyncio's own ways, for a task that reads."""

ONE_OF_EACH_KIND = (
    break_out,
    close_the_stream,
    close_from_another_task,
    cancel_the_task,
    run_into_a_timeout,
    collect_it_as_garbage,
    disconnect_while_it_waits,
    close_the_engine,
)
"""The others are variants of these."""


# -- states in which it is left --------------------------------------------------------------------

OTHER = [9, 8, 7, 6, 5]
"""The prompt of the request beside the one that is left."""
OTHER_TOKENS = 40
OTHER_ROW = 0
PROMPT = list(range(100, 112))
PROMPT_CHUNK = 8
"""Tokens that a step computes at most, where the prompt is to be computed in two steps."""
MAX_TOKENS = 6


@attrs.frozen
class Setting:
    """What a case is about, beside the way and the state.

    Attributes:
        allocator: the strategy.
        n: outputs of the request that is left.
    """

    allocator: Any = FixedAllocator
    n: int = 1

    @property
    def params(self) -> SamplingParams:
        """Of the request that is left."""
        return SamplingParams(n=self.n, max_tokens=MAX_TOKENS)


State = Callable[[Setting, Leave], Awaitable[None]]
Wanted = Callable[[StepPlan], bool]


def first_step(plan: StepPlan) -> bool:
    """The prompt of the other request is computed, and nothing else."""
    lens = [len(OTHER)]
    return bool(plan.kv_lens.tolist() == lens and plan.query_lens.tolist() == lens)


async def while_its_prompt_is_encoded(setting: Setting, leave: Leave) -> None:
    async with beside_another(setting, free_prompts=0) as at:
        await leave(at, unsubmitted(at, setting, "text"), at.tokenizer.gate.held)


async def while_it_waits_for_admission(setting: Setting, leave: Leave) -> None:
    async with (
        beside_another(setting, cancelled=1, max_num_seqs=1, max_waiting=1) as at,
        at.engine.generate([2]),
    ):

        async def arrive() -> None:
            await until(lambda: len(at.engine._gate._waiters) == 1)

        await leave(at, unsubmitted(at, setting, PROMPT), arrive)


async def while_it_queues(setting: Setting, leave: Leave) -> None:
    def other_decodes(plan: StepPlan) -> bool:
        return bool(plan.kv_lens.tolist() == [len(OTHER) + 3])

    await leave_when(other_decodes, setting, leave, max_num_seqs=1)


async def while_its_other_choices_queue(setting: Setting, leave: Leave) -> None:
    def first_decodes(plan: StepPlan) -> bool:
        return len(PROMPT) + 2 in plan.kv_lens.tolist()

    await leave_when(first_decodes, setting, leave, max_num_seqs=2)


async def between_chunks_of_its_prompt(setting: Setting, leave: Leave) -> None:
    def in_first_chunk(plan: StepPlan) -> bool:
        computed = plan.kv_lens[plan.query_lens > 1]
        return bool(((computed > len(OTHER)) & (computed < len(PROMPT))).any())

    await leave_when(in_first_chunk, setting, leave, max_batch_tokens=PROMPT_CHUNK)


async def while_its_prompt_is_computed(setting: Setting, leave: Leave) -> None:
    def in_its_prompt(plan: StepPlan) -> bool:
        return bool((plan.query_lens == len(PROMPT)).any())

    await leave_when(in_its_prompt, setting, leave)


async def while_it_decodes(setting: Setting, leave: Leave) -> None:
    def all_decode(plan: StepPlan) -> bool:
        lens = lengths_of_its_choices(plan)
        return len(lens) == setting.n and bool((lens > len(PROMPT)).all())

    await leave_when(all_decode, setting, leave)


async def in_the_step_that_finishes_it(setting: Setting, leave: Leave) -> None:
    def all_end(plan: StepPlan) -> bool:
        lens = lengths_of_its_choices(plan)
        return len(lens) > 0 and bool((lens == len(PROMPT) + MAX_TOKENS - 1).all())

    await leave_when(all_end, setting, leave, cancelled=0)


async def after_it_finished_unread(setting: Setting, leave: Leave) -> None:
    def is_alone_again(plan: StepPlan) -> bool:
        return bool(plan.kv_lens.tolist() == [len(OTHER) + OTHER_TOKENS // 2])

    await leave_when(is_alone_again, setting, leave, cancelled=0)


def lengths_of_its_choices(plan: StepPlan) -> Any:
    """Tokens of each sequence of the step but the other request's."""
    return plan.kv_lens[plan.rows != OTHER_ROW]


def unsubmitted(at: Scene, setting: Setting, prompt: str | list[int]) -> MakeStream:
    """Gives the stream that is left, for the way itself to submit."""
    return lambda: at.engine.generate(prompt, setting.params, request_id=LEFT)


async def leave_when(
    wanted: Wanted, setting: Setting, leave: Leave, *, cancelled: int = 1, **settings: Any
) -> None:
    """Leave a submitted stream while the engine is held in the first step that is `wanted`."""
    async with beside_another(setting, cancelled, wanted, **settings) as at:
        streams = [await unsubmitted(at, setting, PROMPT)().__aenter__()]
        at.runner.gate.allow()
        await leave(at, streams.pop, at.runner.gate.held)


@asynccontextmanager
async def beside_another(
    setting: Setting, cancelled: int = 0, wanted: Wanted | None = None, **settings: Any
) -> AsyncIterator[Scene]:
    """A scene with another request, held in its first step and in the one that is `wanted`.

    From the next step on, the other request is alone. At the end it has all its tokens, and nothing
    is left of any.
    """
    rows_of_steps: list[list[int]] = []

    def hold_at(plan: StepPlan) -> bool:
        rows_of_steps.append(plan.rows.tolist())
        return first_step(plan) or (wanted is not None and wanted(plan))

    tasks = len(anyio.get_running_tasks())
    runner = GatedRunner(free_steps=0, hold_at=hold_at)
    settings = {"max_num_seqs": 4, **settings}
    async with scene(runner, allocator=setting.allocator, **settings) as at:
        params = SamplingParams(max_tokens=OTHER_TOKENS)
        other = await at.engine.generate(OTHER, params).__aenter__()
        await at.runner.gate.held()
        yield at
        steps_so_far = len(rows_of_steps)
        at.let_go()
        await check_undisturbed(at, other)
        assert all(rows == [OTHER_ROW] for rows in rows_of_steps[steps_so_far:])
        await until(lambda: len(anyio.get_running_tasks()) == tasks)
        await check_left(at, cancelled)


async def check_undisturbed(at: Scene, other: TokenStream) -> None:
    """The other request did not notice, unless the engine was closed under its feet."""
    ids: list[int] = []
    expected = undisturbed(OTHER, OTHER_TOKENS)
    try:
        while len(ids) < OTHER_TOKENS:
            ids += [(await anext(other)).id]
    except EngineClosed:
        assert at.runner.closed
        expected = expected[: len(ids)]
    assert ids == expected


async def check_left(at: Scene, cancelled: int) -> None:
    """Blocks, rows and the id are free, and that is not because the request ran to its end."""
    if at.runner.closed:
        assert at.engine.stats().pool.used_blocks == 0
        check_ledger(at.engine)
        return
    await at.engine.idle()
    assert at.engine.stats().requests_cancelled == cancelled
    await check_nothing_left(at.engine, LEFT)
    await check_full_house(at.engine)
    check_ledger(at.engine)
