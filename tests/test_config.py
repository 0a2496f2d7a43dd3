"""Settings: what can be written, what contradicts itself, what becomes of open ones."""

from pathlib import Path
from typing import Any

import pytest

from kvpage import ConfigError, EngineConfig, KVMemory, PluginError, PoolGeometry
from kvpage.config import _cgroup_available_bytes, available_memory_bytes, default_cpu_kv_bytes

MIB = 2**20


def resolved(
    *, bytes_per_token: int = 1024, model_max_len: int = 2048, **settings: Any
) -> tuple[EngineConfig, PoolGeometry]:
    """The effective settings for a model of 1 KiB a token, with 1 MiB unless asked otherwise."""
    return EngineConfig(**settings).resolve(
        bytes_per_token=bytes_per_token, model_max_len=model_max_len, default_kv_bytes=MIB
    )


# -- kv_memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "amount", "unit"),
    [
        (1, 1, "bytes"),
        (2**40, 2**40, "bytes"),
        ("512", 512, "bytes"),
        ("512 B", 512, "bytes"),
        ("512MiB", 512 * MIB, "bytes"),
        (" 512 mib ", 512 * MIB, "bytes"),
        ("2 KB", 2000, "bytes"),
        ("2KiB", 2048, "bytes"),
        ("1.5GiB", 3 * 2**29, "bytes"),
        ("3MB", 3_000_000, "bytes"),
        ("1GB", 10**9, "bytes"),
        ("1 block", 1, "blocks"),
        ("2048 blocks", 2048, "blocks"),
        ("32768tokens", 32768, "tokens"),
        (KVMemory(7, "blocks"), 7, "blocks"),
    ],
)
def test_memory_can_be_written_in_bytes_blocks_and_tokens(
    written: Any, amount: int, unit: str
) -> None:
    """Decimal and binary units, in any case, with or without a space."""
    parsed = KVMemory.parse(written)
    assert (parsed.amount, parsed.unit) == (amount, unit)


@pytest.mark.parametrize(
    "written",
    [0, -1, "", "0 blocks", "0MiB", "-5 MiB", "1.5 blocks", "lots", "5 apples", "GiB", True, "1e9"],
)
def test_memory_that_makes_no_sense_is_refused(written: Any) -> None:
    """With the forms that are due and what was given."""
    with pytest.raises(ConfigError) as refused:
        EngineConfig(kv_memory=written)
    assert str(refused.value) == (
        "kv_memory must be a number of bytes, or like '512MiB', '2048 blocks' or '32768 tokens', "
        f"got {written!r}"
    )


@pytest.mark.parametrize(
    ("memory", "num_blocks"),
    [("10 blocks", 10), ("160 tokens", 10), ("175 tokens", 10), (160 * 1024, 10), ("1MiB", 64)],
)
def test_memory_becomes_whole_blocks(memory: int | str, num_blocks: int) -> None:
    """What is left over of a block is not used, and the effective memory says so."""
    effective, geometry = resolved(kv_memory=memory)
    assert geometry.num_blocks == num_blocks
    assert effective.kv_memory == KVMemory(num_blocks * 16 * 1024, "bytes")


@pytest.mark.parametrize("memory", ["15 tokens", 16 * 1024 - 1])
def test_memory_for_no_block_is_refused(memory: int | str) -> None:
    """With all three numbers."""
    with pytest.raises(ConfigError, match="holds no block of 16 tokens at 1024 bytes a token"):
        resolved(kv_memory=memory)


# -- defaults --------------------------------------------------------------------------------------


def test_open_settings_take_their_defaults() -> None:
    """Nothing is left open in the effective settings."""
    effective, geometry = resolved()
    assert geometry == PoolGeometry(num_blocks=64, block_size=16, max_model_len=1024)
    assert (effective.block_size, effective.max_model_len) == (16, 1024)
    assert str(effective.allocator) == "fixed"


def test_the_longest_sequence_is_what_model_and_pool_both_allow() -> None:
    """Open, it is the smaller of the two; asked for, it is taken as it is."""
    assert resolved(model_max_len=100)[1].max_model_len == 100
    assert resolved(model_max_len=5000)[1].max_model_len == 1024
    assert resolved(max_model_len=77)[1].max_model_len == 77


def test_block_size_may_be_an_argument_or_a_key_of_the_allocator() -> None:
    """Also both, if they agree; any number from 1 up."""
    assert resolved(block_size=1)[1].block_size == 1
    assert resolved(allocator="fixed:block_size=24")[1].block_size == 24
    assert resolved(allocator="fixed:block_size=24", block_size=24)[1].block_size == 24


def test_the_default_memory_is_bounded_by_what_is_available() -> None:
    """At most 1 GiB, and at most a quarter of the available memory."""
    assert 0 < default_cpu_kv_bytes() <= min(2**30, available_memory_bytes())


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({"memory.max": "1000", "memory.current": "400"}, 600),
        ({"memory.max": "1000", "memory.current": "1400"}, 0),
        ({"memory.max": "max", "memory.current": "400"}, 5000),
        (
            {
                "memory/memory.limit_in_bytes": "2000",
                "memory/memory.usage_in_bytes": "500",
            },
            1500,
        ),
        ({}, 5000),
    ],
)
def test_a_control_group_bounds_the_available_memory(
    tmp_path: Path, files: dict[str, str], available: int
) -> None:
    """Version 2 and version 1; without a limit the machine's own counts."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert _cgroup_available_bytes(tmp_path, 5000) == available


# -- contradictions --------------------------------------------------------------------------------


def test_two_block_sizes_are_refused() -> None:
    """One as an argument, another one in the allocator string."""
    with pytest.raises(ConfigError) as refused:
        resolved(block_size=8, allocator="fixed:block_size=16")
    assert str(refused.value) == (
        "block_size is 8 as an argument and 16 in the allocator string; give one of them"
    )


def test_more_length_than_the_model_or_the_pool_has_is_refused() -> None:
    """Nothing is silently shortened; both numbers are named."""
    with pytest.raises(ConfigError, match="max_model_len is 2049, but the model ends at 2048"):
        resolved(max_model_len=2049)
    with pytest.raises(ConfigError, match="is 1025, but kv_memory holds only 1024 tokens; raise"):
        resolved(max_model_len=1025)


@pytest.mark.parametrize(
    "name", ["block_size", "max_model_len", "max_num_seqs", "max_batch_tokens", "max_waiting"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "16"])
def test_sizes_are_whole_numbers_from_one(name: str, value: Any) -> None:
    """Each is checked when the settings are made."""
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**{name: value})
    assert str(refused.value) == f"{name} must be a whole number of at least 1, got {value!r}"


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("when_busy", "wait, raise"),
        ("attention", "auto, numba, triton, reference"),
        ("kv_dtype", "auto, float32, bfloat16, float16"),
    ],
)
def test_choices_are_checked(name: str, choices: str) -> None:
    """With the list of what there is."""
    with pytest.raises(ConfigError, match=rf"{name} must be one of {choices}, got 'never'"):
        EngineConfig(**{name: "never"})  # type: ignore[arg-type]


def test_an_allocator_string_of_no_form_is_refused() -> None:
    """When the settings are resolved, before a model is sized."""
    with pytest.raises(PluginError, match="is not of the form"):
        resolved(allocator="fixed:16")


# -- over a pool that exists -----------------------------------------------------------------------

POOL = PoolGeometry(num_blocks=10, block_size=8, max_model_len=64)


def test_settings_over_a_pool_take_its_sizes() -> None:
    """Open sizes are the pool's; asking for the same is no contradiction."""
    for settings in ({}, {"block_size": 8, "max_model_len": 64, "kv_memory": "10 blocks"}):
        effective = EngineConfig(**settings).over(POOL)  # type: ignore[arg-type]
        assert (effective.block_size, effective.max_model_len) == (8, 64)
        assert effective.kv_memory == KVMemory(10, "blocks")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"block_size": 16}, "block_size is 16, but the pool was made with 8"),
        (
            {"allocator": "fixed:block_size=4"},
            "block_size in the allocator string is 4, but the pool was made with 8",
        ),
        ({"max_model_len": 32}, "max_model_len is 32, but the pool was made with 64"),
        ({"kv_memory": "5 blocks"}, "kv_memory is 5 blocks, but the pool was made with 10 blocks"),
    ],
)
def test_settings_that_a_pool_does_not_have_are_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    """They would otherwise be silently rewritten."""
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**settings).over(POOL)
    assert str(refused.value) == sentence


# -- preemption ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "blocks"), [("64KiB", 4), ("7 blocks", 7), ("40 tokens", 2), (None, 64)]
)
def test_swap_memory_is_counted_in_blocks(written: Any, blocks: int) -> None:
    """Written like kv_memory; as large as the pool if it is left open."""
    config, _ = resolved(preempt="swap", swap_memory=written)
    assert config.swap_memory == KVMemory(blocks, "blocks")
    assert config.num_swap_blocks == blocks


def test_recompute_takes_no_host_memory() -> None:
    """It is the default."""
    config, _ = resolved()
    assert (config.preempt, config.swap_memory, config.num_swap_blocks) == ("recompute", None, 0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"preempt": "drop"}, "preempt must be one of recompute, swap, got 'drop'"),
        ({"preempt": "swap", "swap_memory": "much"}, "swap_memory must be a number of bytes"),
        ({"swap_memory": "1MiB"}, "swap_memory is 1048576 bytes, but preempt is 'recompute'"),
        ({"preempt": "swap", "swap_memory": "1KiB"}, "swap_memory of 1024 bytes holds no block"),
    ],
)
def test_swap_settings_that_make_no_sense_are_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    """With what was given and what is due."""
    with pytest.raises(ConfigError, match=sentence):
        resolved(**settings)


def test_over_a_runner_swap_memory_has_no_bytes() -> None:
    """The engine does not know how large a block of somebody else's is."""
    geometry = PoolGeometry(8, 16, 128)
    config = EngineConfig(preempt="swap", swap_memory="3 blocks").over(geometry)
    assert config.num_swap_blocks == 3
    with pytest.raises(ConfigError, match="give it in blocks or tokens"):
        EngineConfig(preempt="swap", swap_memory="1MiB").over(geometry)
