"""Stop strings: what is shown of any text, however it is cut into tokens."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from kvpage.detokenizer import Detokenizer
from kvpage.stop_strings import StopStrings


def pushes(
    pieces: Sequence[str], stops: Sequence[str], *, min_tokens: int = 0, ends: bool = True
) -> tuple[list[str], bool]:
    """What each token shows, tokens being texts, up to the stop or the last; was there a stop?"""
    detokenizer = Detokenizer(lambda ids: "".join(pieces[token] for token in ids))
    stop_strings = StopStrings(detokenizer, stops, min_tokens=min_tokens)
    shown = []
    for token in range(len(pieces)):
        text, stopped = stop_strings.push(token, last=ends and token == len(pieces) - 1)
        shown.append(text)
        if stopped:
            return shown, True
    return shown, False


def expected_text(text: str, stops: Sequence[str], immune: int = 0) -> tuple[str, bool]:
    """The definition: cut where that stop string begins which is complete first, after `immune`."""
    for end in range(immune + 1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """How much of the end of `text` may be the beginning of a stop string."""
    lengths = range(1, len(text) + 1)
    return max(
        (n for n in lengths if any(s.startswith(text[-n:]) and len(s) > n for s in stops)),
        default=0,
    )


letters = st.text("ab", min_size=1, max_size=4)
some_pieces = st.lists(st.text("ab", max_size=3), min_size=1, max_size=12)
some_stops = st.lists(letters, min_size=1, max_size=3)


@settings(max_examples=500, deadline=None)
@given(some_pieces, some_stops)
@example(["aab", "b"], ["abb", "b"])
@example(["a", "a", "b", "b"], ["abb", "b"])
@example(["ab"], ["ab"])
def test_the_output_is_the_text_before_the_first_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    """Of any text of two letters in any tokens: so beginnings that come to nothing abound."""
    shown, stopped = pushes(pieces, stops)
    assert ("".join(shown), stopped) == expected_text("".join(pieces), stops)


@settings(max_examples=500, deadline=None)
@given(some_pieces, some_stops, st.integers(0, 6))
def test_nothing_is_held_longer_than_needed(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    """While a text goes on, exactly what may begin a stop string is held back, nothing else."""
    shown, stopped = pushes(pieces, stops, min_tokens=min_tokens, ends=False)
    if not stopped:
        text = "".join(pieces)
        held = longest_beginning(text, stops)
        assert "".join(shown) == text[: len(text) - held]


@settings(max_examples=500, deadline=None)
@given(some_pieces, some_stops, st.integers(0, 6))
@example(["a", "b", "c"], ["ab"], 1)
@example(["ab", "x"], ["ab", "abc"], 1)
def test_a_stop_string_counts_once_min_tokens_have_come(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    """One that is complete earlier is text; one that only begins earlier still ends the output."""
    shown, stopped = pushes(pieces, stops, min_tokens=min_tokens)
    immune = len("".join(pieces[:min_tokens]))
    assert ("".join(shown), stopped) == expected_text("".join(pieces), stops, immune)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["STOP"], ([""], True)),
        (["xSTOPy"], (["x"], True)),
        (["a", "S", "T", "O", "P", "b"], (["a", "", "", "", ""], True)),
        (["a", "ST", "x"], (["a", "", "STx"], False)),
        (["a", "STO"], (["a", "STO"], False)),
        (["aSTOST", "OP"], (["aSTO", ""], True)),
    ],
)
def test_examples(pieces: list[str], expected: tuple[list[str], bool]) -> None:
    """In the first token, inside a token, over tokens, a false start, cut short, a second start."""
    assert pushes(pieces, ["STOP"]) == expected


def test_a_character_whose_bytes_are_not_complete_is_neither_shown_nor_lost() -> None:
    """Held back by the detokenizer; a stop string behind it does not let it slip."""
    encoded = "é".encode() + b"!"
    detokenizer = Detokenizer(
        lambda ids: bytes(encoded[token] for token in ids).decode(errors="replace")
    )
    stop_strings = StopStrings(detokenizer, ["!"])
    assert [stop_strings.push(token) for token in range(3)] == [
        ("", False),
        ("é", False),
        ("", True),
    ]
