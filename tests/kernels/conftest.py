"""Threads for the tests of kernels on a CPU."""

from collections.abc import Iterator

import pytest
import torch

from kvpage.kernels import cpu_rows


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def one_and_two_threads(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Every pass on one thread, then every pass on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(cpu_rows, "THREADED_BYTES", 0)
    yield
    torch.set_num_threads(before)
