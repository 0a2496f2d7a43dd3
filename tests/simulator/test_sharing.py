"""Keys from hash ids: equal exactly where the tokens would be equal."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpage.blocks import SequenceId
from kvpage.prefix import BlockKey
from kvpage.simulator.sharing import TraceKeys

NO_TOKENS = np.empty(0, np.int32)


def keys_of(
    seq: int, hash_ids: list[int], prompt_tokens: int, *, hash_block_size: int, block_size: int
) -> list[BlockKey]:
    """Keys of all full blocks of the prompt, and of one more block."""
    keys = TraceKeys(
        SequenceId(seq),
        hash_ids,
        prompt_tokens=prompt_tokens,
        hash_block_size=hash_block_size,
        block_size=block_size,
    )
    return keys.first(prompt_tokens // block_size + 1, NO_TOKENS)


def test_a_partial_trace_block_is_not_the_full_one() -> None:
    """Requests that name the same last trace block, one filling it, share only what is before."""
    short = keys_of(1, [7, 8], 600, hash_block_size=512, block_size=16)
    full = keys_of(2, [7, 8], 1024, hash_block_size=512, block_size=16)
    equal = [a == b for a, b in zip(short, full, strict=False)]
    assert equal == [True] * 32 + [False] * (len(equal) - 32)


def test_equal_partial_trace_blocks_share() -> None:
    """The same prompt twice is the same content to its last full block."""
    first = keys_of(1, [7, 8], 600, hash_block_size=512, block_size=16)
    again = keys_of(2, [7, 8], 600, hash_block_size=512, block_size=16)
    assert [a == b for a, b in zip(first, again, strict=True)] == [True] * 37 + [False]


def test_output_is_the_requests_own() -> None:
    """Blocks with generated tokens, and prompt tokens without an id, are never shared."""
    first = keys_of(1, [], 64, hash_block_size=16, block_size=16)
    other = keys_of(2, [], 64, hash_block_size=16, block_size=16)
    assert not any(a == b for a, b in zip(first, other, strict=True))


def test_keys_are_made_once() -> None:
    """Asking for more keys extends the list; asking for fewer gives its beginning."""
    keys = TraceKeys(SequenceId(1), [3], prompt_tokens=64, hash_block_size=64, block_size=16)
    three = keys.first(3, NO_TOKENS)
    assert keys.first(2, NO_TOKENS) == three[:2]
    assert keys.first(4, NO_TOKENS)[:3] == three
    assert keys.first(4, NO_TOKENS)[3].parent == three[2].digest


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A trace block size and two prompts, as the texts of their trace blocks."""
    size = draw(st.sampled_from([4, 16, 24]))
    block = st.integers(0, 1)
    return size, [
        draw(st.lists(block, min_size=1, max_size=5)),
        draw(st.lists(block, min_size=1, max_size=5)),
    ]


@given(prompts(), st.sampled_from([1, 3, 8, 16, 24, 64]), st.integers(0, 15), st.integers(0, 15))
def test_equal_keys_mean_equal_tokens(
    case: tuple[int, list[list[int]]], block_size: int, cut_one: int, cut_two: int
) -> None:
    """Two prompts share keys on their common tokens, cut at a trace block that differs."""
    size, texts = case
    names: dict[tuple[object, ...], int] = {}
    contents, keys = [], []
    for seq, (text, cut) in enumerate(zip(texts, (cut_one, cut_two), strict=True)):
        tokens = len(text) * size - cut % size
        # As in a trace, an id covers all blocks up to its own, and how full that one is.
        covered = [(tuple(text[: i + 1]), min(size, tokens - i * size)) for i in range(len(text))]
        ids = [names.setdefault(content, len(names)) for content in covered]
        contents.append([(ids[p // size], p % size) for p in range(tokens)])
        keys.append(keys_of(seq, ids, tokens, hash_block_size=size, block_size=block_size))
    for index, (one, two) in enumerate(zip(*keys, strict=False)):
        end = (index + 1) * block_size
        whole = end <= min(map(len, contents))
        assert (one == two) == (whole and contents[0][:end] == contents[1][:end])
