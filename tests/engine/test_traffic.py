"""`engine.traffic()`: what was served, as a trace that the simulator reads."""

from pathlib import Path

import pytest

from kvpage import SamplingParams, TraceRequest, Traffic
from kvpage.errors import TraceError
from kvpage.simulator import TraceFile
from kvpage.traffic import TrafficRecorder
from tests.engine.conftest import Run
from tests.engine.scenes import fake_engine


def lengths(traffic: Traffic) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in traffic.requests]


def test_finished_requests_are_in_it(run: Run) -> None:
    """Their lengths, in order of arrival."""

    async def main() -> None:
        async with fake_engine() as engine:
            for prompt, output in ((3, 5), (7, 2)):
                await engine.complete([1] * prompt, SamplingParams(max_tokens=output))
            traffic = engine.traffic()
            assert lengths(traffic) == [(3, 5), (7, 2)]
            first, second = traffic.requests
            assert 0 <= first.arrival_s <= second.arrival_s

    run(main)


def test_a_request_that_was_left_is_not_in_it(run: Run) -> None:
    """Its output would have been longer than what was seen of it."""

    async def main() -> None:
        async with fake_engine() as engine:
            async with engine.generate([1, 2, 3], SamplingParams(max_tokens=100)) as stream:
                await anext(stream)
            await engine.idle()
            assert engine.traffic() == Traffic((), 0)

    run(main)


def test_each_choice_counts(run: Run) -> None:
    """Three answers to a prompt take the room of three requests."""

    async def main() -> None:
        async with fake_engine() as engine:
            await engine.complete([1, 2], SamplingParams(max_tokens=4, n=3))
            assert lengths(engine.traffic()) == [(2, 4)] * 3

    run(main)


def test_the_oldest_are_forgotten() -> None:
    """Memory does not grow with time; how many there were is known."""
    recorder = TrafficRecorder(started_at=0.0, capacity=2)
    for output in (1, 2, 3):
        recorder.add(float(output), 10, output)
    traffic = recorder.snapshot()
    assert lengths(traffic) == [(10, 2), (10, 3)]
    assert traffic.seen == 3


def test_it_is_saved_in_order_of_arrival(tmp_path: Path) -> None:
    """A request that arrives first may finish last; traces are ordered."""
    path = tmp_path / "traffic.csv"
    requests = (TraceRequest(0.5, 9, 4), TraceRequest(1.25, 3, 2))
    recorder = TrafficRecorder(started_at=0.0)
    for request in reversed(requests):
        recorder.add(request.arrival_s, request.prompt_tokens, request.output_tokens)
    recorder.snapshot().write_csv(path)
    assert tuple(TraceFile(path)) == requests


def test_nothing_to_save_is_one_sentence(tmp_path: Path) -> None:
    """No file that the readers would refuse."""
    path = tmp_path / "traffic.csv"
    with pytest.raises(TraceError, match="no request has finished yet"):
        TrafficRecorder(started_at=0.0).snapshot().write_csv(path)
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """With its name."""
    traffic = Traffic((TraceRequest(0.0, 1, 1),), 1)
    with pytest.raises(TraceError, match="cannot be written: No such file"):
        traffic.write_csv(tmp_path / "no" / "traffic.csv")
