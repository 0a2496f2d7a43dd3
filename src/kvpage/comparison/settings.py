"""What a comparison is asked: the candidates, the requests, the pool, how often."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpage.allocators.base import AllocatorFactory
from kvpage.config import KVMemory
from kvpage.errors import ConfigError
from kvpage.plugins import AllocatorSpec, check_allocator_spec
from kvpage.simulator import MOONCAKE_BLOCK, TraceRequest

DEFAULT_MAX_MODEL_LEN = 512
"""Short, so that a small model on two cores gets through a comparison in minutes."""

REQUESTS_PER_POOL = 4
"""The pool of a comparison holds this part of all its requests at once, unless asked otherwise."""

LONGEST_PER_POOL = 2
"""And at least so many of the longest: a strategy that reserves rows then runs two requests."""


def _whole(low: int) -> Any:
    def check(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if value is not None and (type(value) is not int or value < low):
            raise ConfigError(
                f"{attribute.name} must be a whole number of at least {low}, got {value!r}"
            )

    return check


def _positive(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise ConfigError(f"{attribute.name} must be a number above 0, got {value!r}")


def _not_in_blocks(_instance: object, _attribute: object, value: KVMemory | None) -> None:
    if value is not None and value.unit == "blocks":
        raise ConfigError(
            f"kv_memory of a comparison is in bytes or tokens, got {str(value)!r}: "
            f"blocks of different sizes would be different pools"
        )


def _sizes(_instance: object, _attribute: object, sizes: Sequence[Any]) -> None:
    wrong = [size for size in sizes if type(size) is not int or size < 1]
    if wrong:
        raise ConfigError(f"block_sizes must be whole numbers of at least 1, got {wrong[0]!r}")


def _memory(value: "int | str | KVMemory | None") -> KVMemory | None:
    return None if value is None else KVMemory.parse(value)


def _several(values: Any) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ConfigError(f"a list of at least one is due where {values!r} was given")
    return tuple(values)


@attrs.frozen
class Candidate:
    """A strategy with a block size.

    Attributes:
        allocator: the strategy.
        block_size: tokens per block.
    """

    allocator: AllocatorSpec
    block_size: int

    @property
    def strategy(self) -> str:
        """The strategy's name with its options."""
        return str(self.allocator)

    @property
    def label(self) -> str:
        """The strategy with the block size: `"fixed/16"`."""
        return f"{self.strategy}/{self.block_size}"


@attrs.frozen(kw_only=True)
class ComparisonSettings:
    """What a comparison measures. Refuses what cannot work.

    Attributes:
        allocators: strategies, each a name, `"name:key=value,..."`, or a factory. One with the key
            `block_size` is measured with that size only, the others with all of `block_sizes`.
        block_sizes: tokens per block.
        workload: the name of a workload (`"chat"`, `"code"`, `"summarise"`, `"reasoning"`,
            `"agent"`), the path of a trace as `kvpage simulate` reads it, or requests.
        hash_block_size: tokens that one hash id of a trace or of requests stands for.
        requests: how many of the workload's first requests to send; None takes as many as all
            rounds have time for by a first try, 6 to 40 of them, and 20 without a limit of time.
        scale: every length is multiplied by this; None takes what makes the mean request a quarter
            of `max_model_len` long, and never more than 1.
        rate: requests per second on average, their gaps as in the workload; None sends all at once.
        max_model_len: longest request in tokens; longer ones are left out and counted. None takes
            512, or what the model allows if that is less.
        kv_memory: bytes, `"512MiB"` or `"32768 tokens"` for K and V, the same for every candidate;
            None takes a quarter of what all requests would hold at once, and at least two of
            `max_model_len`, so that the strategies have to economise.
        max_num_seqs: sequences that run at once.
        max_batch_tokens: tokens that one step computes at most.
        prefix_cache: share the blocks of equal prefixes, where the strategy can share.
        rounds: how often each candidate is measured.
        seconds: no round is begun that would not end within this time, counted from the call; None
            measures every round.
        seed: of the drawn requests and of the tokens in their prompts.
        plugins: objects or modules with a `kvpage_allocators` hook, beside the installed ones.
    """

    allocators: tuple[str | AllocatorFactory | AllocatorSpec, ...] = attrs.field(
        default=("fixed", "dynamic", "contiguous"), converter=_several
    )
    block_sizes: tuple[int, ...] = attrs.field(
        default=(8, 16, 32, 64), converter=_several, validator=_sizes
    )
    workload: str | Path | Sequence[TraceRequest] = "chat"
    hash_block_size: int = attrs.field(default=MOONCAKE_BLOCK, validator=_whole(1))
    requests: int | None = attrs.field(default=None, validator=_whole(1))
    scale: float | None = attrs.field(default=None, validator=_positive)
    rate: float | None = attrs.field(default=None, validator=_positive)
    max_model_len: int | None = attrs.field(default=None, validator=_whole(2))
    kv_memory: KVMemory | None = attrs.field(
        default=None, converter=_memory, validator=_not_in_blocks
    )
    max_num_seqs: int = attrs.field(default=64, validator=_whole(1))
    max_batch_tokens: int = attrs.field(default=512, validator=_whole(1))
    prefix_cache: bool = True
    rounds: int = attrs.field(default=3, validator=_whole(1))
    seconds: float | None = attrs.field(default=None, validator=_positive)
    seed: int = attrs.field(default=0, validator=_whole(0))
    plugins: Sequence[object] = attrs.field(default=(), converter=tuple)

    def candidates(self) -> tuple[Candidate, ...]:
        """Every strategy with every block size it is to have.

        Raises:
            PluginError: no such strategy, or it does not have such an option.
            ConfigError: the same candidate twice.
        """
        found: dict[str, Candidate] = {}
        for allocator in self.allocators:
            spec = AllocatorSpec.parse(allocator)
            check_allocator_spec(spec, plugins=self.plugins)
            for size in [spec.block_size] if spec.block_size else self.block_sizes:
                candidate = Candidate(attrs.evolve(spec, block_size=None), size)
                if candidate.label in found:
                    raise ConfigError(f"{candidate.label} is asked for twice")
                found[candidate.label] = candidate
        return tuple(found.values())

    def longest_request(self, model_max_len: int) -> int:
        """The effective `max_model_len`.

        Raises:
            ConfigError: the model does not allow it.
        """
        if self.max_model_len is None:
            return min(model_max_len, DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > model_max_len:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but the model ends at {model_max_len}"
            )
        return self.max_model_len

    def slots(
        self, candidates: Sequence[Candidate], *, total_tokens: int, longest: int, token_bytes: int
    ) -> int:
        """Token slots in the pool: whole blocks of every size, the same for every candidate.

        Args:
            candidates: whose block sizes count.
            total_tokens: what all requests would hold at once.
            longest: the effective `max_model_len`.
            token_bytes: K and V of one token in all layers.

        Raises:
            ConfigError: the memory that was asked for does not hold the longest request.
        """
        unit = math.lcm(*(candidate.block_size for candidate in candidates))
        if self.kv_memory is None:
            wanted = max(total_tokens // REQUESTS_PER_POOL, LONGEST_PER_POOL * longest)
            return -(-wanted // unit) * unit
        slots = self.kv_memory.num_blocks(bytes_per_token=token_bytes, block_size=1)
        whole = slots - slots % unit if slots >= unit else slots
        if whole < longest:
            raise ConfigError(
                f"kv_memory of {self.kv_memory} holds {whole} tokens in whole blocks of every "
                f"size, and max_model_len is {longest}: raise the one or lower the other"
            )
        return whole
