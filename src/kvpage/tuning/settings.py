"""What is to be tuned, for what, and how long that may take."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpage.config import KVMemory
from kvpage.errors import ConfigError
from kvpage.simulator import MOONCAKE_BLOCK
from kvpage.traffic import TraceRequest, Traffic
from kvpage.tuning.candidates import SearchSpace


def _at_least(low: int) -> Any:
    def check(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if value is not None and (type(value) is not int or value < low):
            raise ConfigError(
                f"{attribute.name} must be a whole number of at least {low}, got {value!r}"
            )

    return check


def _number(_instance: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    zero_is_fine = attribute.name == "seconds"
    if not 0 <= value < math.inf or (value == 0 and not zero_is_fine):
        raise ConfigError(f"{attribute.name} must be a number above 0, got {value!r}")


def _memory(value: "int | str | KVMemory | None") -> KVMemory | None:
    memory = None if value is None else KVMemory.parse(value)
    if memory is not None and memory.unit == "blocks":
        raise ConfigError("kv_memory in blocks says nothing before there is a block size")
    return memory


@attrs.frozen(kw_only=True)
class TuningSettings:
    """What `tune` does. Refuses what cannot work.

    Attributes:
        workload: the name of a workload (`"chat"`, `"code"`, `"summarise"`, `"reasoning"`,
            `"agent"`), the path of a trace as `kvpage simulate` reads it, the `Traffic` of an
            engine, or requests.
        hash_block_size: tokens that one hash id of a trace or of requests stands for.
        requests: how many of the workload's first requests to look at.
        scale: every length is multiplied by this.
        kv_memory: the most that K and V may take: bytes, `"512MiB"` or `"32768 tokens"`; None takes
            what an engine would take by itself.
        max_model_len: longest request in tokens; longer ones are left out and counted. None takes
            what the model and the memory allow.
        space: the values to try.
        seconds: that measuring the finalists may take; 0 leaves it out.
        rounds: how often each finalist is measured.
        seed: of drawn requests and of the tokens in their prompts.
    """

    workload: str | Path | Traffic | Sequence[TraceRequest] = "chat"
    hash_block_size: int = attrs.field(default=MOONCAKE_BLOCK, validator=_at_least(1))
    requests: int = attrs.field(default=20_000, validator=_at_least(1))
    scale: float = attrs.field(default=1.0, validator=_number)
    kv_memory: KVMemory | None = attrs.field(default=None, converter=_memory)
    max_model_len: int | None = attrs.field(default=None, validator=_at_least(2))
    space: SearchSpace = attrs.field(factory=SearchSpace)
    seconds: float = attrs.field(default=300.0, validator=_number)
    rounds: int = attrs.field(default=3, validator=_at_least(2))
    seed: int = attrs.field(default=0, validator=_at_least(0))

    @property
    def source(self) -> str | Path | Sequence[TraceRequest]:
        """The workload as a comparison reads it."""
        return self.workload.requests if isinstance(self.workload, Traffic) else self.workload

    def budget_bytes(self, default_bytes: int, *, bytes_per_token: int) -> int:
        """The most that K and V may take."""
        if self.kv_memory is None:
            return default_bytes
        amount = self.kv_memory.amount
        return amount if self.kv_memory.unit == "bytes" else amount * bytes_per_token

    def longest_request(self, model_max_len: int, budget_tokens: int) -> int:
        """The effective `max_model_len`.

        Raises:
            ConfigError: the model or the memory does not allow it.
        """
        if self.max_model_len is None:
            return min(model_max_len, budget_tokens)
        if self.max_model_len > model_max_len:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but the model ends at {model_max_len}"
            )
        if self.max_model_len > budget_tokens:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but kv_memory holds only {budget_tokens} "
                f"tokens; raise kv_memory or lower max_model_len"
            )
        return self.max_model_len
