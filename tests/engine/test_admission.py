"""The entrance: unique ids, a bounded queue, first come, first served."""

import asyncio
import gc
import threading

import anyio
import pytest

from kvpage.admission import AdmissionGate
from kvpage.errors import DuplicateRequest, EngineBusy
from tests.engine.conftest import Run
from tests.engine.runners import PATIENCE_S


def full_gate(max_waiting: int = 1) -> AdmissionGate:
    """A gate with no place left in its queue."""
    gate = AdmissionGate(max_waiting)
    for number in range(max_waiting):
        gate.try_enter(f"inside-{number}")
    return gate


def test_waiters_enter_first_come_first_served(run: Run) -> None:
    """Each place that falls free goes to whoever waits longest."""
    entered: list[str] = []
    gate = full_gate()

    async def enter(name: str) -> None:
        await gate.enter(name)
        entered.append(name)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for name in "abc":
                tasks.start_soon(enter, name)
                await anyio.wait_all_tasks_blocked()
            for count in (1, 2, 3):
                gate.scheduled()
                await anyio.wait_all_tasks_blocked()
                assert entered == list("abc"[:count])

    run(main)


def test_a_cancelled_waiter_leaves_its_turn_to_the_next(run: Run) -> None:
    """Cancelling a waiter frees its id, and the next place goes to the one behind it."""
    gate = full_gate()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            with anyio.move_on_after(None) as first:
                tasks.start_soon(cancel_once_blocked, first)
                await gate.enter("first")
            tasks.start_soon(gate.enter, "first")
            await anyio.wait_all_tasks_blocked()
            gate.scheduled()

    async def cancel_once_blocked(scope: anyio.CancelScope) -> None:
        await anyio.wait_all_tasks_blocked()
        scope.cancel()

    run(main)


def test_a_waiter_cancelled_with_its_place_granted_passes_it_on(run: Run) -> None:
    """A place granted to a task that is being cancelled is not lost."""
    gate = full_gate()

    async def main() -> None:
        async with anyio.create_task_group() as tasks, anyio.create_task_group() as doomed:
            doomed.start_soon(gate.enter, "doomed")
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(gate.enter, "next")
            await anyio.wait_all_tasks_blocked()
            gate.scheduled()
            doomed.cancel_scope.cancel()

    run(main)


def test_opening_wide_lets_all_waiters_in(run: Run) -> None:
    """When the engine closes, nobody waits any more."""
    gate = full_gate()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for name in "abc":
                tasks.start_soon(gate.enter, name)
            await anyio.wait_all_tasks_blocked()
            gate.open_wide()

    run(main)


def test_an_id_that_waits_is_taken(run: Run) -> None:
    """A request that waits at the entrance holds its id already."""
    gate = full_gate()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gate.enter, "same")
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(DuplicateRequest, match="'same' is still open"):
                await gate.enter("same")
            with pytest.raises(DuplicateRequest, match="'same' is still open"):
                gate.try_enter("same")
            gate.open_wide()

    run(main)


def test_a_refused_id_is_not_taken(run: Run) -> None:
    """After `EngineBusy` the same id can try again."""
    gate = full_gate(2)

    async def main() -> None:
        with pytest.raises(EngineBusy, match="2 requests are waiting already"):
            gate.try_enter("again")
        gate.scheduled()
        gate.try_enter("again")

    run(main)


def test_a_waiter_of_an_ended_loop_loses_its_turn(run: Run) -> None:
    """A place is not given to a task whose event loop is gone, and its id is free again."""
    gate = full_gate()
    left = [waiter_of_an_ended_loop(gate, "left")]

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gate.enter, "next")
            await anyio.wait_all_tasks_blocked()
            gate.scheduled()
        gate.scheduled()
        left.clear()
        gc.collect()
        await gate.enter("left")

    run(main)


def test_a_waiter_collected_inside_the_gate_does_not_lock_it() -> None:
    """Garbage collection may strike while the gate is locked, and find a waiter in a cycle."""

    class Collecting(str):
        """An id that has garbage collected when it is hashed, which happens inside the gate."""

        __slots__ = ()

        def __hash__(self) -> int:
            gc.collect()
            return super().__hash__()

    gate = full_gate()
    waiter_of_an_ended_loop(gate, "left")
    gate.scheduled()  # its turn comes, in vain: from now on it is garbage
    # A daemon, so that a gate that locks itself up fails this test and not the whole run.
    thread = threading.Thread(target=gate.try_enter, args=(Collecting("next"),), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def waiter_of_an_ended_loop(gate: AdmissionGate, request_id: str) -> "asyncio.Task[None]":
    """A task that waits at `gate` in an event loop that was closed without cancelling it."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(gate.enter(request_id))
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it will be, on purpose
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    return task
