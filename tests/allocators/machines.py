"""Runs a state machine of hypothesis over a strategy, the same histories each time."""

from collections.abc import Callable
from typing import cast

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kvpage.testing.conformance import AllocatorUnderTest


def run_machine(
    machine: Callable[[AllocatorUnderTest], RuleBasedStateMachine],
    factory: AllocatorUnderTest,
    *,
    max_examples: int,
    steps: int,
) -> None:
    """Play `max_examples` histories of up to `steps` calls.

    Raises:
        AssertionError: a history broke a rule; hypothesis prints the shortest one that does.
    """
    run_state_machine_as_test(
        cast("type[RuleBasedStateMachine]", lambda: machine(factory)),  # any maker will do
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
