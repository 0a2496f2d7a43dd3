"""What an engine held is given back when it is closed."""

import gc

import pytest
import torch

from kvpage import AsyncEngine, SamplingParams
from kvpage.model import share_model
from tests.model.test_shapes import Shape
from tests.model.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def bytes_of_live_tensors() -> int:
    """Of all storages that any tensor object refers to, each counted once."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if issubclass(type(tensor), torch.Tensor)  # unlike `isinstance`, asks no proxy
    }
    return sum(storages.values())


async def test_five_engines_one_after_another_give_their_memory_back() -> None:
    """The pools of a closed engine are gone, even while the engine itself is still referred to."""
    model = tiny_model("llama")
    closed: list[AsyncEngine] = []

    before = bytes_of_live_tensors()
    for _ in range(5):
        async with AsyncEngine(model=model, kv_memory="8MiB") as engine:
            await engine.complete([1, 2, 3], SamplingParams(max_tokens=4))
            in_use = bytes_of_live_tensors()
            closed.append(engine)
    assert before + (7 << 20) <= in_use <= before + (9 << 20)
    assert bytes_of_live_tensors() <= before + (1 << 20)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_shared_not_copied(tied: bool) -> None:
    """Those of the caller's model are all that an engine's model has, tied or not."""
    model = Shape(tied=tied, vocab_size=4099).model()
    before = bytes_of_live_tensors()
    shared = share_model(model)
    assert bytes_of_live_tensors() <= before + (64 << 10)
    assert shared.vocab_size == 4099
