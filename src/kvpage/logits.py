"""Changes to logits before a token is drawn: rules of single requests, and penalties.

The order: the request's own processors, which so see what the model said and cannot undo what
follows; forbid (allowed tokens, bad words, ends before `min_tokens`); bias; penalties. Work on many
rows is one tensor operation; only a row that has such rules costs any at all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.errors import StepFailed

if TYPE_CHECKING:
    import torch

Processor = Callable[[Any, Any], Any]
"""`processor(token_ids int64[1, t], logits float32[1, vocabulary]) -> logits`, on the device.

The form of transformers' `LogitsProcessor`, whose objects can be passed as they are. One that
raises ends its own request only.
"""


@attrs.frozen(eq=False)
class TokenRules:
    """What one request allows, forbids and favours, whatever it has generated.

    Attributes:
        bias_ids: `int64[b]`, tokens whose logits get `bias_values` added.
        bias_values: `float32[b]`.
        allowed_ids: `int64[a]`, the only tokens that may be generated; None allows all.
        bad_words: token sequences that must not be generated, each at least one token.
        min_tokens: no end token before so many tokens.
        end_ids: `int64[e]`, the end tokens.
        processors: called in order with the tokens so far.
    """

    bias_ids: npt.NDArray[np.int64]
    bias_values: npt.NDArray[np.float32]
    allowed_ids: npt.NDArray[np.int64] | None
    bad_words: tuple[tuple[int, ...], ...]
    min_tokens: int
    end_ids: npt.NDArray[np.int64]
    processors: tuple[Processor, ...]

    @property
    def change_anything(self) -> bool:
        """Is there any rule at all?"""
        return bool(
            len(self.bias_ids)
            or self.allowed_ids is not None
            or self.bad_words
            or (self.min_tokens and len(self.end_ids))
            or self.processors
        )

    @property
    def needs_history(self) -> bool:
        """Do they look at the tokens so far?"""
        return bool(self.processors) or any(len(word) > 1 for word in self.bad_words)


@attrs.frozen(eq=False)
class Penalties:
    """Penalties of some rows, column by column.

    Attributes:
        repetition: `float32[n]`; logits of tokens seen in prompt or output are divided by it if
            positive, else multiplied (Keskar et al., CTRL, 2019). 1 changes nothing.
        presence: `float32[n]`, subtracted once for a token that was generated.
        frequency: `float32[n]`, subtracted for each time that a token was generated.
    """

    repetition: npt.NDArray[np.float32]
    presence: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]

    @classmethod
    def none(cls, num_rows: int) -> "Penalties":
        """No penalty in `num_rows` rows."""
        return cls(
            np.ones(num_rows, np.float32),
            np.zeros(num_rows, np.float32),
            np.zeros(num_rows, np.float32),
        )

    def take(self, rows: npt.NDArray[np.int64]) -> "Penalties":
        """A copy of the rows named by `rows`."""
        return Penalties(self.repetition[rows], self.presence[rows], self.frequency[rows])


@attrs.frozen(eq=False)
class History:
    """Known tokens of those sampled rows whose rules or penalties look at them.

    Attributes:
        rows: `int64[m]`, which of the sampled rows.
        tokens: `int32[m, L]`, prompt and output; undefined beyond `num_tokens`.
        prompt_tokens: `int64[m]`.
        num_tokens: `int64[m]`.
    """

    rows: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    prompt_tokens: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]

    def of(self, row: int) -> npt.NDArray[np.int32]:
        """The tokens so far of one sampled row that is in the history."""
        index = int(np.searchsorted(self.rows, row))
        return self.tokens[index, : self.num_tokens[index]]

    def among(self, rows: npt.NDArray[np.int64]) -> "History":
        """The history of those of `rows` that have one, named by their places in `rows`."""
        places = np.flatnonzero(np.isin(rows, self.rows))
        mine = np.searchsorted(self.rows, rows[places])
        return History(places, self.tokens[mine], self.prompt_tokens[mine], self.num_tokens[mine])


def apply_processors(
    logits: "torch.Tensor", processors: Mapping[int, Sequence[Processor]], history: History
) -> dict[int, StepFailed]:
    """Let the processors of each row change it, in place.

    Returns:
        For each row whose processor raised, what its request fails by; all its logits are NaN.
    """
    raised = {}
    for row, of_row in processors.items():
        try:
            _process(logits, row, of_row, history.of(row))
        except Exception as error:  # a processor raises whatever it likes
            raised[row] = StepFailed(f"a logits processor failed: {type(error).__name__}: {error}")
            raised[row].__cause__ = error
            logits[row] = np.nan
    return raised


def apply_rules(
    logits: "torch.Tensor",
    rules: Mapping[int, TokenRules],
    indices: npt.NDArray[np.int64],
    history: History | None,
) -> None:
    """Forbid and bias, in place.

    Args:
        logits: `float32[n, vocabulary]`, changed.
        rules: the rows that have rules.
        indices: `int64[n]`, how many tokens each row has generated.
        history: holds every row whose rules need it.
    """
    _allow_only(logits, {r: x.allowed_ids for r, x in rules.items() if x.allowed_ids is not None})
    _forbid(logits, _forbidden(rules, indices, history))
    _add(logits, {r: (x.bias_ids, x.bias_values) for r, x in rules.items() if len(x.bias_ids)})


def apply_penalties(logits: "torch.Tensor", penalties: Penalties, history: History) -> None:
    """Penalise tokens that were seen, in place.

    Works on these tokens alone: a history is short beside a vocabulary.

    Args:
        logits: `float32[n, vocabulary]`, contiguous; changed.
        penalties: of all n rows.
        history: the rows to penalise.
    """
    import torch

    vocabulary = logits.shape[1]
    places, times = _seen(history, vocabulary)
    rows = places // vocabulary
    columns = (
        places,
        penalties.repetition[rows],
        times * penalties.frequency[rows],
        (times > 0) * penalties.presence[rows],
    )
    where, repetition, *subtracted = (torch.from_numpy(c).to(logits.device) for c in columns)
    every = logits.view(-1)
    scores = every[where]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    for amount in subtracted:
        scores -= amount
    every[where] = scores


def _seen(
    history: History, vocabulary: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The different tokens that each row has seen.

    Returns:
        Their places `row * vocabulary + token`, `int64[k]`, and how often each was generated,
        `float32[k]`.
    """
    position = np.arange(history.tokens.shape[1])
    # Some models have embeddings for tokens that they cannot generate.
    known = (position < history.num_tokens[:, None]) & (history.tokens < vocabulary)
    generated = position >= history.prompt_tokens[:, None]
    places = history.rows[:, None] * vocabulary + history.tokens
    # In one sort of numbers: equal places come together, each with its last bit to count.
    marked = np.sort((places * 2 + generated)[known])
    places = marked >> 1
    first = np.flatnonzero(np.diff(places, prepend=-1))
    return places[first], np.add.reduceat(marked & 1, first).astype(np.float32)


def _forbidden(
    rules: Mapping[int, TokenRules], indices: npt.NDArray[np.int64], history: History | None
) -> dict[int, npt.NDArray[np.int64]]:
    """Tokens that each row must not generate next."""
    forbidden = {}
    for row, rule in rules.items():
        tokens = [np.array(list(_ends_of_bad_words(rule, row, history)), np.int64)]
        if indices[row] < rule.min_tokens:
            tokens.append(rule.end_ids)
        forbidden[row] = np.concatenate(tokens)
    return {row: tokens for row, tokens in forbidden.items() if len(tokens)}


def _ends_of_bad_words(rule: TokenRules, row: int, history: History | None) -> Iterator[int]:
    """Last tokens of those bad words whose other tokens are the last ones of the row."""
    if not rule.bad_words:
        return
    longest = max(len(word) for word in rule.bad_words) - 1
    recent = history.of(row)[-longest:].tolist() if history is not None and longest else []
    for *beginning, end in rule.bad_words:
        if not beginning or recent[-len(beginning) :] == beginning:
            yield end


def _process(
    logits: "torch.Tensor",
    row: int,
    processors: Sequence[Processor],
    tokens: npt.NDArray[np.int32],
) -> None:
    import torch

    token_ids = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)[None]
    scores = logits[row : row + 1].clone()
    for processor in processors:
        scores = processor(token_ids, scores)
        if not isinstance(scores, torch.Tensor) or scores.shape != (1, logits.shape[1]):
            raise ValueError(
                f"it has to return logits [1, {logits.shape[1]}], "
                f"got {getattr(scores, 'shape', scores)!r}"
            )
    logits[row] = scores[0]


def _allow_only(logits: "torch.Tensor", allowed: Mapping[int, npt.NDArray[np.int64]]) -> None:
    import torch

    for row, tokens in allowed.items():
        kept = torch.from_numpy(tokens).to(logits.device)
        values = logits[row, kept]
        logits[row] = -torch.inf
        logits[row, kept] = values


def _forbid(logits: "torch.Tensor", tokens: Mapping[int, npt.NDArray[np.int64]]) -> None:
    import torch

    if tokens:
        rows, columns = (torch.from_numpy(part).to(logits.device) for part in _pairs(tokens))
        logits[rows, columns] = -torch.inf


def _add(
    logits: "torch.Tensor",
    biases: Mapping[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]],
) -> None:
    import torch

    if biases:
        pairs = _pairs({row: ids for row, (ids, _) in biases.items()})
        rows, columns = (torch.from_numpy(part).to(logits.device) for part in pairs)
        values = np.concatenate([values for _, values in biases.values()])
        logits[rows, columns] += torch.from_numpy(values).to(logits.device)


def _pairs(
    tokens: Mapping[int, npt.NDArray[np.int64]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and column of every token: both `int64[k]`."""
    rows = [np.full(len(ids), row, np.int64) for row, ids in tokens.items()]
    return np.concatenate(rows), np.concatenate(list(tokens.values()))
