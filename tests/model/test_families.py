"""Every causal-LM family of transformers is served right, or refused by name and reason."""

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import transformers

from kvpage import UnsupportedModelError
from kvpage.kernels import AttentionOptions
from kvpage.model import PagedModel, check_supported, model_class_of, share_model
from tests.model.families import (
    MODEL_TYPES,
    PROMPTS,
    TARGET,
    Served,
    WholeSequence,
    config_of,
    family_model,
    generate,
    logits_of,
    outcome,
    page,
    served_by_page,
    unchanged,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SERVED = served_by_page()

WITHOUT: dict[str, Callable[[AttentionOptions], AttentionOptions]] = {
    "sliding window": lambda options: attrs.evolve(options, window=0),
    "softcap": lambda options: attrs.evolve(options, softcap=0.0),
    "sinks": lambda options: attrs.evolve(options, sinks=None),
    "earlier tokens": lambda options: attrs.evolve(options, window=1),
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_family_equals_generate_or_is_refused(model_type: str) -> None:
    """In company, in chunks and preempted all the time; or not at all."""
    result = outcome(model_type)
    if isinstance(result, Served):
        assert result.actual == result.expected
        assert result.preemptions > 0
        return
    config = config_of(model_type)
    with pytest.raises(UnsupportedModelError) as refused:
        check_supported(config, model_class_of(config))
    sentence = f"model type {config.model_type!r} is not supported: {result.reason}"
    assert str(refused.value) == sentence
    assert "\n" not in sentence


def test_at_least_eighty_families_are_served() -> None:
    """Of all kinds of attention that the kernels know."""
    served = [each for each in map(outcome, MODEL_TYPES) if isinstance(each, Served)]
    assert len(served) >= 80
    features = {feature for each in served for feature in each.features}
    assert features >= {"GQA", "MQA", "sliding window", "softcap", "sinks", "MoE"}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SERVED)
def test_what_a_layer_asks_for_decides_the_output(model_type: str) -> None:
    """The comparison with `generate` can fail: without the window, the sinks, ... logits differ."""
    features = outcome(model_type).features
    model = share_model(family_model(model_type))
    asked = _logits(model, unchanged)
    for feature, change in WITHOUT.items():
        if feature in (*features, "earlier tokens"):
            assert float((_logits(model, change) - asked).abs().max()) > 0.01


def _logits(model: PagedModel, change: Callable[[AttentionOptions], AttentionOptions]) -> Any:
    """`[prompts, vocabulary]`, of size 1 at most."""
    logits = [logits_of(model, prompt, WholeSequence(change)) for prompt in PROMPTS]
    return torch.stack([each / each.abs().max() for each in logits])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SERVED)
@pytest.mark.parametrize(("block_size", "budget"), [(4, 512), (16, 1), (3, 16)])
async def test_a_family_equals_generate_in_other_settings(
    model_type: str, block_size: int, budget: int
) -> None:
    """Whole prompts in one step, one token a step, odd blocks; prefixes shared."""
    result = outcome(model_type)
    assert isinstance(result, Served)
    outputs, _ = await generate(
        family_model(model_type),
        block_size=block_size,
        max_batch_tokens=budget,
        kv_memory="512 tokens",
        prefix_cache=True,
    )
    assert outputs == result.expected


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SERVED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_not_mistaken_for_a_fault(model_type: str, dtype: torch.dtype) -> None:
    """Rounding, and tokens that it sends to another expert, are no reason to refuse a model."""
    in_float32 = share_model(family_model(model_type)).layers
    assert share_model(family_model(model_type).to(dtype)).layers == in_float32


def test_the_page_is_up_to_date() -> None:
    """`docs/reference/models.md` says what this version of transformers shows."""
    committed = TARGET.read_text()
    [version] = re.findall(r"transformers (\S+) maps", committed)
    if version != transformers.__version__:
        pytest.skip(f"the page is of transformers {version}, {transformers.__version__} is here")
    assert page() == committed
