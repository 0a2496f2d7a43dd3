"""`torch.compile` for the layers of a model. Imported only by who asks for it.

Layers are compiled one by one, not the model whole: all have the same code, so that one compilation
serves them all, where a whole model of 30 layers takes minutes. Attention stays what it is: to the
compiler it is one operator that knows the shape of its result and nothing else.
"""

from typing import Any

import torch

from kvpage.attention import attend
from kvpage.errors import ConfigError
from kvpage.kernels import AttentionOptions
from kvpage.model import PagedModel
from kvpage.probe import Witness, differ

WATCHED_TOKENS = (8, 1)
"""One token has a compilation of its own; any other number shares one."""


@torch.library.custom_op("kvpage::attend", mutates_args=())
def attend_compiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`attention.attend` as an operator; it also stores K and V, which no compiler need know."""
    return attend(query, key, value, AttentionOptions(scale, window, softcap, sinks)).contiguous()


@attend_compiled.register_fake
def _(query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def compile_layers(model: PagedModel) -> None:
    """Compile the modules of each list of several, which in transformers are the layers.

    Takes about a minute for a new model, seconds once torch's own cache has it.

    Args:
        model: changed.

    Raises:
        ConfigError: there is no such list, or torch cannot compile them, or they compute something
            else then.
    """
    before = [_logits(model, tokens) for tokens in WATCHED_TOKENS]
    lists = (each for each in model.module.modules() if isinstance(each, torch.nn.ModuleList))
    layers = [layer for each in lists if len(each) > 1 for layer in each]
    if not layers:
        raise ConfigError("compile=True is for models with layers, and this one has none to see")
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        after = [_logits(model, tokens) for tokens in WATCHED_TOKENS]
    except torch._dynamo.exc.TorchDynamoException as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"torch cannot compile this model: {first_line}") from error
    if any(map(differ, before, after)):
        raise ConfigError("compiled, this model computes something else: leave compile out")


def _logits(model: PagedModel, num_tokens: int) -> torch.Tensor:
    tokens = torch.arange(1, num_tokens + 1, device=model.device)
    every = torch.arange(num_tokens, device=model.device)
    return model.logits(tokens % model.vocab_size, every, Witness(), every)
