"""Output that follows a grammar: what a request asks for, and what sampling needs of it.

A grammar is followed by a `Matcher`, one for each output. Before a token is sampled it says, as a
mask with a bit for each token of the vocabulary, what may come; after that it is told what came.
`guided` has the matchers of llguidance; any others of this form would do.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.errors import RequestError

if TYPE_CHECKING:
    import torch

_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_ADDENDS = np.where(
    np.unpackbits(_BYTES, axis=1, bitorder="little"), np.float32(0), np.float32(-np.inf)
)
"""`float32[256, 8]`: for each byte of a mask, what to add to the logits of its eight tokens."""


def _json_text(schema: "str | Mapping[str, Any] | None") -> str | None:
    if schema is None:
        return None
    if not isinstance(schema, str | Mapping):
        raise RequestError(f"json_schema must be a mapping or JSON text, got {schema!r}")
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(parsed)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise RequestError(f"json_schema must be a JSON object, got {text}")
    return text


def _choices(texts: "Iterable[str] | None") -> tuple[str, ...] | None:
    if texts is None:
        return None
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise RequestError(f"choice must be several texts, got {texts!r}")
    return tuple(texts)


def _not_empty(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise RequestError(f"{attribute.name} must be a text that is not empty, got {value!r}")


def _not_empty_texts(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value == ():
        raise RequestError(f"{attribute.name} is empty: there is nothing to generate")
    for text in value or ():
        _not_empty(_instance, attribute, text)


@attrs.frozen(kw_only=True)
class StructuredOutputs:
    """The form that an output must have; give exactly one of these.

    The name is that of the feature in OpenAI's interface and of the parameter in vLLM.

    Attributes:
        json_schema: JSON Schema, as a mapping or as text; the output is JSON that is valid by it.
            `{"type": "object"}` allows any object. Kept as text.
        regex: a regular expression (the syntax of Rust's `regex`) that the whole output matches.
        choice: the output is one of these texts.
        grammar: a context-free grammar, in llguidance's variant of Lark or in llama.cpp's GBNF.

    Raises:
        RequestError: none or several are given, or one is malformed. Whether a schema, expression
            or grammar makes sense is found out at submission.
    """

    json_schema: str | None = attrs.field(default=None, converter=_json_text)
    regex: str | None = attrs.field(default=None, validator=_not_empty)
    choice: tuple[str, ...] | None = attrs.field(
        default=None, converter=_choices, validator=_not_empty_texts
    )
    grammar: str | None = attrs.field(default=None, validator=_not_empty)

    def __attrs_post_init__(self) -> None:
        """Refuse none and several."""
        given = [name for name, value in attrs.asdict(self).items() if value is not None]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise RequestError(
                f"structured outputs take exactly one of json_schema, regex, choice and grammar, "
                f"got {names}"
            )


class Matcher(Protocol):
    """Follows one output through its grammar. Used by one thread at a time."""

    @property
    def masker(self) -> "Masker":
        """Computes its masks; the same for all matchers of an engine."""
        ...

    @property
    def failure(self) -> str | None:
        """Why it can follow no further, as half a sentence; None while all is well."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by the token that was generated.

        Returns:
            Is the output complete, and can nothing follow? Also if this call made it fail.
        """
        ...

    def fork(self) -> Self:
        """Another one, at the same place, that goes its own way from here."""
        ...


class Masker(Protocol):
    """Computes masks of many matchers at once."""

    def masks(self, matchers: Sequence[Any]) -> npt.NDArray[np.int32]:
        """What may come next.

        Returns:
            `int32[n, W]`: bit `t % 32` of word `t // 32` is set if token `t` may come. A matcher
            that fails meanwhile allows nothing.
        """
        ...


class Grammars(Protocol):
    """What an engine compiles grammars with; from any thread."""

    def compile(self, wanted: StructuredOutputs) -> Matcher:
        """A new matcher, at the beginning of an output. May take long.

        Raises:
            RequestError: the grammar makes no sense, or nothing can be generated by it.
        """
        ...


@attrs.frozen(eq=False)
class TokenMasks:
    """What the grammars of some rows allow.

    Attributes:
        rows: `int64[m]`, which of the sampled rows, in ascending order.
        bits: `int32[m, W]`, see `Masker.masks`.
    """

    rows: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]

    @classmethod
    def of(cls, matchers: npt.NDArray[np.object_]) -> "TokenMasks":
        """The masks of all rows that have a matcher, at least one, computed in one call."""
        rows = np.flatnonzero(matchers.astype(np.bool_))
        chosen: list[Matcher] = matchers[rows].tolist()
        return cls(rows, chosen[0].masker.masks(chosen))

    def apply(self, logits: "torch.Tensor", rows: npt.NDArray[np.int64]) -> None:
        """Forbid in place what the grammars of `rows` do not allow.

        Args:
            logits: `float32[n, vocabulary]`, changed.
            rows: `int64[n]`, the sampled rows that these are; each has a mask.
        """
        import torch

        device, width = logits.device, logits.shape[1]
        bits = torch.from_numpy(self.bits[np.searchsorted(self.rows, rows)]).to(device)
        addends = torch.from_numpy(_ADDENDS).to(device)
        # Looked up by bytes: torch expands bits by arithmetic six times slower.
        every = torch.nn.functional.embedding(bits.view(torch.uint8).int(), addends)
        known = every.view(len(rows), -1)[:, :width]
        logits[:, : known.shape[1]] += known
        logits[:, known.shape[1] :] = -torch.inf
