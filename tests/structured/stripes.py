"""A grammar without a library: the token at place `i` leaves remainder `i` modulo 4."""

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.errors import RequestError
from kvpage.grammar import StructuredOutputs
from tests.engine.runners import VOCAB_SIZE

STRIPES = 4
BREAKS = "breaks"
"""The grammar of this name fails at its third token."""


@attrs.define(eq=False)
class StripeMatcher:
    """Outputs of `length` tokens.

    Attributes:
        length: tokens of a complete output.
        masker: counts the calls.
        breaks_at: fails when it should say what follows so many tokens.
        seen: what was accepted.
        failure: see `Matcher.failure`.
    """

    length: int
    masker: "StripeGrammars"
    breaks_at: int | None = None
    seen: tuple[int, ...] = ()
    failure: str | None = None

    def accept(self, token_id: int) -> bool:
        if token_id % STRIPES != len(self.seen) % STRIPES:
            self.failure = f"token {token_id} at place {len(self.seen)}"
        self.seen += (token_id,)
        return self.failure is not None or len(self.seen) == self.length

    def fork(self) -> "StripeMatcher":
        return attrs.evolve(self)

    def mask(self) -> npt.NDArray[np.int32]:
        """`int32[W]`."""
        if len(self.seen) == self.breaks_at:
            self.failure = "too hard"
        allowed = np.arange(VOCAB_SIZE) % STRIPES == len(self.seen) % STRIPES
        return packed(allowed & (self.failure is None))


class StripeGrammars:
    """Compiles a `regex` that is a number: the length of outputs.

    Attributes:
        calls: how many matchers each call of `masks` was asked about.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []

    def compile(self, wanted: StructuredOutputs) -> StripeMatcher:
        if wanted.choice == (BREAKS,):
            return StripeMatcher(20, self, breaks_at=2)
        if wanted.regex is None:
            raise RequestError("stripes only")
        return StripeMatcher(int(wanted.regex), self)

    def masks(self, matchers: Sequence[StripeMatcher]) -> npt.NDArray[np.int32]:
        self.calls.append(len(matchers))
        return np.stack([matcher.mask() for matcher in matchers])


def packed(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """A mask `int32[W]` of `bool[vocabulary]`."""
    whole = np.pad(allowed, (0, -len(allowed) % 32))
    return np.packbits(whole, bitorder="little").view(np.int32)


def striped(token_ids: Sequence[int]) -> bool:
    """Are these tokens the beginning of an output?"""
    return all(token % STRIPES == place % STRIPES for place, token in enumerate(token_ids))
