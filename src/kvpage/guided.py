"""Grammars by llguidance (the extra `guided`), the only module that knows it.

https://github.com/guidance-ai/llguidance: an Earley parser over a lexer of derivatives of regular
expressions, which walks the vocabulary as a tree of bytes. Masks of a whole batch are computed by
its own threads, without the interpreter lock.
"""

import json
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.errors import RequestError
from kvpage.grammar import Matcher, StructuredOutputs

if TYPE_CHECKING:
    import llguidance

KEPT_GRAMMARS = 64
"""Compiled grammars that an engine keeps, those used last."""

JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""Enough to indent by; without an end to it, small models fill their outputs with white space."""


class LLGuidance:
    """The grammars of one engine: converts its tokenizer when the first request needs it.

    The conversion holds the interpreter lock, for about 7 microseconds a token of the vocabulary.

    Args:
        tokenizer: transformers' tokenizer, or None.
        vocab_size: of the model.
        eos_token_ids: what may end an output where its grammar allows an end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._opening = threading.Lock()
        self._compile: Callable[[StructuredOutputs], LLGuidanceMatcher] | None = None

    def compile(self, wanted: StructuredOutputs) -> Matcher:
        """See `Grammars.compile`. A grammar that was compiled lately costs a copy only.

        Raises:
            RequestError: it makes no sense, or there is no llguidance, or no tokenizer that it
                can work with.
        """
        with self._opening:
            if self._compile is None:
                self._compile = self._opened()
        return self._compile(wanted).fork()

    def _opened(self) -> "Callable[[StructuredOutputs], LLGuidanceMatcher]":
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer: structured_outputs needs one")
        try:
            import llguidance.hf
        except ImportError as error:
            raise RequestError(
                "structured_outputs needs llguidance: pip install 'kvpage[guided]'"
            ) from error
        try:
            tokenizer = llguidance.hf.from_tokenizer(
                self._tokenizer,
                n_vocab=max(self._vocab_size, len(self._tokenizer)),
                eos_token=self._eos_token_ids or None,
            )
        except Exception as error:  # whatever it finds strange about a tokenizer
            raise RequestError(
                f"llguidance cannot use this model's tokenizer, so neither can "
                f"structured_outputs: {error}"
            ) from error
        masker = LLGuidanceMasker(llguidance.LLExecutor(), tokenizer.vocab_size)
        return lru_cache(KEPT_GRAMMARS)(partial(_compiled, tokenizer, masker))


@attrs.frozen(eq=False)
class LLGuidanceMasker:
    """Computes masks on llguidance's threads.

    Attributes:
        executor: has the threads.
        vocab_size: bits of a mask.
    """

    executor: "llguidance.LLExecutor"
    vocab_size: int

    def masks(self, matchers: "Sequence[LLGuidanceMatcher]") -> npt.NDArray[np.int32]:
        """See `Masker.masks`."""
        bits = np.zeros((len(matchers), -(-self.vocab_size // 32)), np.int32)
        places = [(matcher.inner, place) for place, matcher in enumerate(matchers)]
        self.executor.unsafe_compute_mask_ptr(
            places, bits.ctypes.data, bits.strides[0], len(matchers)
        )
        # One that has failed allows the end, which would pass for a complete output.
        bits[[matcher.inner.is_error() for matcher in matchers]] = 0
        return bits


@attrs.frozen(eq=False)
class LLGuidanceMatcher:
    """One output's place in its grammar.

    Attributes:
        inner: llguidance's matcher, which `accept` changes.
        masker: computes its masks.
    """

    inner: "llguidance.LLMatcher"
    masker: LLGuidanceMasker

    @property
    def failure(self) -> str | None:
        """See `Matcher.failure`."""
        if not self.inner.is_error():
            return None
        reason = _in_one_line(self.inner.get_error())
        return "no token can follow" if reason.startswith("NoExtension") else reason

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        self.inner.consume_token(token_id)
        stopped: bool = self.inner.is_stopped()
        return stopped

    def fork(self) -> "LLGuidanceMatcher":
        """See `Matcher.fork`."""
        return attrs.evolve(self, inner=self.inner.deep_copy())


def _compiled(
    tokenizer: "llguidance.LLTokenizer", masker: LLGuidanceMasker, wanted: StructuredOutputs
) -> LLGuidanceMatcher:
    """A matcher at the beginning, its first mask computed, so that what it keeps is warm."""
    from llguidance import LLMatcher, LLParserLimits

    name, source = _source(wanted)
    limits = LLParserLimits(verbose_errors=False)
    inner = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    matcher = LLGuidanceMatcher(inner, masker)
    allowed = masker.masks([matcher])
    if not allowed.any():
        raise RequestError(f"{name} cannot be used: {matcher.failure}")
    return matcher


def _source(wanted: StructuredOutputs) -> tuple[str, str]:
    """Which form was asked for, and its grammar in llguidance's own form."""
    from llguidance import LLMatcher, grammar_from

    try:
        if wanted.json_schema is not None:
            schema = wanted.json_schema
            return "json_schema", LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
        if wanted.regex is not None:
            return "regex", grammar_from("regex", wanted.regex)
        if wanted.choice is not None:
            return "choice", grammar_from("choice", json.dumps(wanted.choice))
        return "grammar", grammar_from("grammar", wanted.grammar or "")
    except ValueError as error:
        raise RequestError(f"grammar cannot be used: {_in_one_line(str(error))}") from error


def _in_one_line(message: str) -> str:
    """The first line and what a nested parser says; not its drawings of the place."""
    first, *rest = message.strip().splitlines() or ["no reason was given"]
    reasons = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    return " ".join([first, *reasons[:1]])
