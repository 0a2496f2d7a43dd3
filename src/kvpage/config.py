"""Settings of an engine: what was asked, and the effective values that follow from it."""

import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import attrs

from kvpage.allocators.base import AllocatorFactory
from kvpage.blocks import PoolGeometry
from kvpage.errors import ConfigError
from kvpage.plugins import AllocatorSpec

DEFAULT_BLOCK_SIZE = 16
"""Tokens per block: the usual middle between tail waste and table length."""

DEFAULT_CPU_KV_BYTES = 2**30
CPU_KV_SHARE = 0.25
GPU_KV_SHARE = 0.9

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}

DEFAULT_SWAP_SHARE = 0.25
"""Share of the available host memory that swap space takes at most unless it is asked for."""

Preempt = Literal["recompute", "swap"]
Adapters = Mapping[str, str | PathLike[str]]
"""A folder or hub id for the name of each adapter."""

NO_ADAPTERS: Adapters = MappingProxyType({})

WhenBusy = Literal["wait", "raise"]
Checks = Literal["grants", "everything"]
KVDtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "numba", "triton", "reference"]


def _at_least_one(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{attribute.name} must be a whole number of at least 1, got {value!r}")


def _one_of(choices: tuple[str, ...]) -> Any:
    def check(_instance: object, attribute: "attrs.Attribute[str]", value: str) -> None:
        if value not in choices:
            raise ConfigError(
                f"{attribute.name} must be one of {', '.join(choices)}, got {value!r}"
            )

    return check


def _tracer_provider(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value is not None and not hasattr(value, "get_tracer"):
        raise ConfigError(
            f"{attribute.name} must be an OpenTelemetry TracerProvider, got {value!r}"
        )


@attrs.frozen
class KVMemory:
    """How much memory the KV cache takes.

    Attributes:
        amount: how many.
        unit: of what.
    """

    amount: int
    unit: Literal["bytes", "blocks", "tokens"]

    @classmethod
    def parse(cls, value: "int | str | KVMemory", name: str = "kv_memory") -> "KVMemory":
        """Read bytes (`536870912`, `"512MiB"`), `"2048 blocks"` or `"32768 tokens"`.

        Args:
            value: what was written.
            name: the setting that it was written for, for messages.

        Raises:
            ConfigError: it is none of these, or not above zero.
        """
        if isinstance(value, KVMemory):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
        number, unit = (float(match[1]), match[2]) if match else (0.0, "")
        if unit.rstrip("s") in ("block", "token") and number >= 1 and number.is_integer():
            return cls(int(number), "blocks" if unit.startswith("block") else "tokens")
        scale = _UNITS.get(unit or "b")
        if scale is None or number * scale < 1:
            raise ConfigError(
                f"{name} must be a number of bytes, or like '512MiB', '2048 blocks' or "
                f"'32768 tokens', got {value!r}"
            )
        return cls(int(number * scale), "bytes")

    def __str__(self) -> str:
        return f"{self.amount} {self.unit}"

    def num_blocks(self, *, bytes_per_token: int, block_size: int) -> int:
        """Whole blocks of `block_size` tokens that this memory holds."""
        if self.unit == "blocks":
            return self.amount
        if self.unit == "tokens":
            return self.amount // block_size
        return self.amount // (bytes_per_token * block_size)


def _memory(value: "int | str | KVMemory | None") -> KVMemory | None:
    return None if value is None else KVMemory.parse(value)


def _swap_memory(value: "int | str | KVMemory | None") -> KVMemory | None:
    return None if value is None else KVMemory.parse(value, "swap_memory")


def _only_to_swap(
    instance: "EngineConfig", _attribute: "attrs.Attribute[Any]", value: KVMemory | None
) -> None:
    if value is not None and instance.preempt != "swap":
        raise ConfigError(
            f"swap_memory is {value}, but preempt is {instance.preempt!r}; give preempt='swap' "
            f"to use it"
        )


@attrs.frozen(kw_only=True)
class EngineConfig:
    """What an engine was asked to do. `engine.config` has the same with nothing left open.

    Attributes:
        allocator: a strategy's name, `"name:key=value,..."`, or a factory.
        block_size: tokens per block; None takes it from the allocator string, or 16.
        kv_memory: bytes, `"512MiB"`, `"2048 blocks"` or `"32768 tokens"` for K and V; None takes,
            on a CPU, the smaller of 1 GiB and a quarter of the available memory, on a GPU 90 % of
            what is free after the worst step.
        max_model_len: longest sequence, prompt and output, in tokens; None takes what the model
            and the pool both allow. (The pool allows any length where a window slides over all
            layers of the model and fits, and the strategy gives back single blocks.)
        max_num_seqs: sequences that run at once.
        max_batch_tokens: tokens that one step computes at most.
        max_waiting: requests that may queue; beyond it see `when_busy`.
        when_busy: `"wait"`: `generate` waits for a place in the queue; `"raise"`: it raises
            `EngineBusy`.
        preempt: what becomes of the K and V of a sequence that must make room for a more urgent
            one. `"recompute"`: they are dropped, and computed again later. `"swap"`: they are
            copied to host memory and back; where that is full, computed again.
        swap_memory: host memory for `preempt="swap"`, written like `kv_memory`; None takes as much
            as the pool has, but at most a quarter of the available memory. The effective value
            is in blocks.
        prefix_cache: share the blocks of equal prefixes, where the strategy can share.
        cuda_graphs: capture decode steps as CUDA graphs, on a GPU with the Triton kernel.
        kv_dtype: how K and V are stored; `"auto"` is as the model computes them. On a CPU,
            `"bfloat16"` halves the memory of a token and what decoding reads, and `"float16"` the
            memory.
        attention: the kernel; `"auto"` takes Triton on a GPU and numba on a CPU.
        checks: `"grants"`: every answer of the allocator is checked; `"everything"`: besides, the
            whole ledger is recounted at each step, and K and V of free blocks become NaN, so that a
            use of freed memory shows at once. Slow, for finding bugs; the output is the same.
        tracer_provider: an OpenTelemetry `TracerProvider`: each request is a span of it; None: no
            spans, whatever provider the process has.
        plugins: objects or modules with a `kvpage_allocators` hook, beside the installed ones.
    """

    allocator: str | AllocatorFactory | AllocatorSpec = "fixed"
    block_size: int | None = attrs.field(default=None, validator=_at_least_one)
    kv_memory: KVMemory | None = attrs.field(default=None, converter=_memory)
    max_model_len: int | None = attrs.field(default=None, validator=_at_least_one)
    max_num_seqs: int = attrs.field(default=64, validator=_at_least_one)
    max_batch_tokens: int = attrs.field(default=512, validator=_at_least_one)
    max_waiting: int = attrs.field(default=1024, validator=_at_least_one)
    when_busy: WhenBusy = attrs.field(default="wait", validator=_one_of(get_args(WhenBusy)))
    preempt: Preempt = attrs.field(default="recompute", validator=_one_of(get_args(Preempt)))
    swap_memory: KVMemory | None = attrs.field(
        default=None, converter=_swap_memory, validator=_only_to_swap
    )
    prefix_cache: bool = True
    cuda_graphs: bool = True
    kv_dtype: KVDtype = attrs.field(default="auto", validator=_one_of(get_args(KVDtype)))
    attention: Attention = attrs.field(default="auto", validator=_one_of(get_args(Attention)))
    checks: Checks = attrs.field(default="grants", validator=_one_of(get_args(Checks)))
    tracer_provider: Any = attrs.field(default=None, validator=_tracer_provider)
    plugins: Sequence[object] = attrs.field(default=(), converter=tuple)

    def resolve(
        self, *, bytes_per_token: int, model_max_len: int, default_kv_bytes: int, window: int = 0
    ) -> tuple["EngineConfig", PoolGeometry]:
        """Fill in what was left open.

        Args:
            bytes_per_token: K and V of one token in all layers.
            model_max_len: longest sequence of the model, in tokens.
            default_kv_bytes: memory of the KV cache if `kv_memory` is open.
            window: tokens that a sequence holds at most, since a window slides over it; 0 for all.

        Returns:
            The effective settings and the pool they describe.

        Raises:
            ConfigError: the settings contradict each other or the model.
        """
        spec = AllocatorSpec.parse(self.allocator)
        block_size = self._block_size(spec)
        memory = self.kv_memory or KVMemory(default_kv_bytes, "bytes")
        num_blocks = memory.num_blocks(bytes_per_token=bytes_per_token, block_size=block_size)
        if num_blocks < 1:
            raise ConfigError(
                f"kv_memory of {memory} holds no block of {block_size} tokens "
                f"at {bytes_per_token} bytes a token"
            )
        pool = PoolGeometry(num_blocks, block_size, model_max_len)
        slides = window and pool.window_fits(window)
        max_len = self._max_model_len(model_max_len, model_max_len if slides else pool.num_slots)
        effective = attrs.evolve(
            self,
            allocator=spec,
            block_size=block_size,
            kv_memory=KVMemory(num_blocks * block_size * bytes_per_token, "bytes"),
            swap_memory=self._swap_blocks(num_blocks, block_size, bytes_per_token),
            max_model_len=max_len,
        )
        return effective, PoolGeometry(num_blocks, block_size, max_len)

    @property
    def num_swap_blocks(self) -> int:
        """Host blocks of swap space that effective settings give; 0 without swapping."""
        return 0 if self.swap_memory is None else self.swap_memory.amount

    def over(self, geometry: PoolGeometry) -> "EngineConfig":
        """The effective settings over a pool that exists already.

        Raises:
            ConfigError: a size was asked for that the pool does not have.
        """
        spec = AllocatorSpec.parse(self.allocator)
        asked = {
            "block_size": (self.block_size, geometry.block_size),
            "block_size in the allocator string": (spec.block_size, geometry.block_size),
            "max_model_len": (self.max_model_len, geometry.max_model_len),
            "kv_memory": (self.kv_memory, KVMemory(geometry.num_blocks, "blocks")),
        }
        if self.swap_memory is not None and self.swap_memory.unit == "bytes":
            raise ConfigError(
                f"swap_memory is {self.swap_memory}, but over a runner of your own the size of a "
                f"block is not known; give it in blocks or tokens"
            )
        for name, (wanted, given) in asked.items():
            if wanted not in (None, given):
                raise ConfigError(f"{name} is {wanted}, but the pool was made with {given}")
        return attrs.evolve(
            self,
            allocator=spec,
            block_size=geometry.block_size,
            kv_memory=KVMemory(geometry.num_blocks, "blocks"),
            swap_memory=self._swap_blocks(geometry.num_blocks, geometry.block_size, 0),
            max_model_len=geometry.max_model_len,
        )

    def _swap_blocks(
        self, pool_blocks: int, block_size: int, bytes_per_token: int
    ) -> KVMemory | None:
        """Swap space in blocks; as large as the pool unless asked otherwise or memory is short."""
        if self.preempt != "swap":
            return None
        if self.swap_memory is None:
            affordable = int(DEFAULT_SWAP_SHARE * available_memory_bytes())
            block_bytes = bytes_per_token * block_size
            fitting = affordable // block_bytes if block_bytes else pool_blocks
            return KVMemory(min(pool_blocks, fitting), "blocks")
        blocks = self.swap_memory.num_blocks(bytes_per_token=bytes_per_token, block_size=block_size)
        if blocks < 1:
            raise ConfigError(
                f"swap_memory of {self.swap_memory} holds no block of {block_size} tokens at "
                f"{bytes_per_token} bytes a token"
            )
        return KVMemory(blocks, "blocks")

    def _block_size(self, spec: AllocatorSpec) -> int:
        asked = {size for size in (self.block_size, spec.block_size) if size is not None}
        if len(asked) > 1:
            raise ConfigError(
                f"block_size is {self.block_size} as an argument and {spec.block_size} in the "
                f"allocator string; give one of them"
            )
        return asked.pop() if asked else DEFAULT_BLOCK_SIZE

    def _max_model_len(self, model_max_len: int, pool_tokens: int) -> int:
        if self.max_model_len is None:
            return min(model_max_len, pool_tokens)
        if self.max_model_len > model_max_len:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but the model ends at {model_max_len}"
            )
        if self.max_model_len > pool_tokens:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but kv_memory holds only {pool_tokens} "
                f"tokens; raise kv_memory or lower max_model_len"
            )
        return self.max_model_len


def default_cpu_kv_bytes() -> int:
    """KV memory on a CPU unless asked otherwise: 1 GiB, or a quarter of what is available."""
    return min(DEFAULT_CPU_KV_BYTES, int(CPU_KV_SHARE * available_memory_bytes()))


def available_memory_bytes() -> int:
    """Memory that this process may still take: of the machine, or of its control group if less."""
    import psutil

    available = int(psutil.virtual_memory().available)
    return min(available, _cgroup_available_bytes(Path("/sys/fs/cgroup"), available))


def _cgroup_available_bytes(root: Path, default: int) -> int:
    """What the control group of this process leaves (version 2 or 1); `default` without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int((root / limit).read_text()) - int((root / used).read_text()))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return default
