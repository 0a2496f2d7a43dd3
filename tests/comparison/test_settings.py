"""What a comparison may be asked."""

from typing import Any

import pytest

from kvpage import ComparisonSettings, ConfigError, PluginError


def labels(**settings: Any) -> list[str]:
    return [candidate.label for candidate in ComparisonSettings(**settings).candidates()]


def test_every_strategy_meets_every_block_size() -> None:
    """In the order asked."""
    assert labels(allocators=["fixed", "contiguous"], block_sizes=[8, 16]) == [
        "fixed/8",
        "fixed/16",
        "contiguous/8",
        "contiguous/16",
    ]


def test_the_default_is_three_strategies_and_four_sizes() -> None:
    """The built-in ones."""
    assert len(labels()) == 3 * 4


def test_a_block_size_in_the_allocator_string_is_the_only_one() -> None:
    """And the label shows the other options, not this one twice."""
    asked = ["fixed:block_size=24", "contiguous:reserve=request"]
    assert labels(allocators=asked, block_sizes=[8]) == [
        "fixed/24",
        "contiguous:reserve=request/8",
    ]


def test_the_same_candidate_twice_is_refused() -> None:
    """Its runs could not be told apart."""
    with pytest.raises(ConfigError, match="fixed/8 is asked for twice"):
        labels(allocators=["fixed", "fixed:block_size=8"], block_sizes=[8])


def test_an_unknown_strategy_is_refused_by_name() -> None:
    """Before any model is loaded."""
    with pytest.raises(PluginError, match="no allocator named 'buddy'"):
        labels(allocators=["buddy"])


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"requests": 0}, "requests must be a whole number of at least 1, got 0"),
        ({"rounds": True}, "rounds must be a whole number of at least 1, got True"),
        ({"scale": float("nan")}, "scale must be a number above 0, got nan"),
        ({"scale": -1.0}, "scale must be a number above 0"),
        ({"rate": 0}, "rate must be a number above 0, got 0"),
        ({"seconds": float("inf")}, "seconds must be a number above 0, got inf"),
        ({"block_sizes": [8, 0]}, "block_sizes must be whole numbers of at least 1, got 0"),
        ({"block_sizes": []}, "a list of at least one is due where \\[\\] was given"),
        ({"allocators": "fixed"}, "a list of at least one is due where 'fixed' was given"),
        ({"kv_memory": "64 blocks"}, "kv_memory of a comparison is in bytes or tokens"),
        ({"kv_memory": "much"}, "kv_memory must be a number of bytes"),
    ],
)
def test_what_cannot_work_is_refused(setting: dict[str, Any], sentence: str) -> None:
    """With the value in the sentence."""
    with pytest.raises(ConfigError, match=sentence):
        ComparisonSettings(**setting)


def slots(*, total_tokens: int, longest: int = 512, **settings: Any) -> int:
    asked = ComparisonSettings(**settings)
    return asked.slots(
        asked.candidates(), total_tokens=total_tokens, longest=longest, token_bytes=10
    )


def test_the_default_pool_holds_a_quarter_of_the_requests() -> None:
    """In whole blocks of every size."""
    assert slots(total_tokens=40_010, block_sizes=[8, 64]) == 10_048  # 10,002 rounded up


def test_the_default_pool_holds_two_of_the_longest() -> None:
    """Where all requests together are short."""
    assert slots(total_tokens=1000, block_sizes=[16]) == 1024


def test_a_pool_that_was_asked_for_is_cut_to_whole_blocks_of_every_size() -> None:
    """So that every candidate has the same number of slots."""
    assert slots(total_tokens=1000, block_sizes=[8, 24], kv_memory="1000 tokens") == 984
    assert slots(total_tokens=1000, block_sizes=[16], kv_memory=10_000) == 992


def test_a_pool_that_cannot_hold_the_longest_request_is_refused() -> None:
    """With both numbers."""
    with pytest.raises(ConfigError, match=r"holds 256 tokens .* max_model_len is 512"):
        slots(total_tokens=1000, kv_memory="300 tokens", block_sizes=[64])


def test_the_longest_request_is_what_the_model_allows_at_most() -> None:
    """By default 512 tokens, and never more than was asked for."""
    assert ComparisonSettings().longest_request(8192) == 512
    assert ComparisonSettings().longest_request(256) == 256
    assert ComparisonSettings(max_model_len=2048).longest_request(8192) == 2048
    with pytest.raises(ConfigError, match="max_model_len is 2048, but the model ends at 1024"):
        ComparisonSettings(max_model_len=2048).longest_request(1024)
