"""Changes to logits before a token is drawn: rules of single requests, and penalties.

The order is the usual one: forbid (allowed tokens, bad words, ends before `min_tokens`), bias, then
the request's own processors, then penalties. Work on many rows is one tensor operation; only a row
that has such rules costs any at all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Processor = Callable[[Any, Any], Any]
"""`processor(token_ids int64[1, t], logits float32[1, vocabulary]) -> logits`, on the device.

The form of transformers' `LogitsProcessor`, whose objects can be passed as they are.
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

    def of(self, row: int) -> npt.NDArray[np.int64]:
        """The tokens so far of one sampled row that is in the history."""
        index = int(np.searchsorted(self.rows, row))
        return self.tokens[index, : self.num_tokens[index]].astype(np.int64)


def apply_rules(
    logits: "torch.Tensor",
    rules: Mapping[int, TokenRules],
    indices: npt.NDArray[np.int64],
    history: History | None,
) -> None:
    """Forbid, bias and process, in place.

    Args:
        logits: `float32[n, vocabulary]`, changed.
        rules: the rows that have rules.
        indices: `int64[n]`, how many tokens each row has generated.
        history: holds every row whose rules need it.
    """
    _allow_only(logits, {r: x.allowed_ids for r, x in rules.items() if x.allowed_ids is not None})
    _set(logits, _forbidden(rules, indices, history), -np.inf)
    _add(logits, {r: (x.bias_ids, x.bias_values) for r, x in rules.items() if len(x.bias_ids)})
    for row, rule in rules.items():
        if rule.processors and history is not None:
            _process(logits, row, rule.processors, history.of(row))


def apply_penalties(logits: "torch.Tensor", penalties: Penalties, history: History) -> None:
    """Penalise tokens that were seen, in place: one pass over all rows of `history`.

    Args:
        logits: `float32[n, vocabulary]`, changed.
        penalties: of all n rows.
        history: the rows to penalise.
    """
    import torch

    device = logits.device
    rows = torch.from_numpy(history.rows).to(device)
    tokens = torch.from_numpy(history.tokens.astype(np.int64)).to(device)
    position = np.arange(history.tokens.shape[1])
    known = torch.from_numpy(position < history.num_tokens[:, None]).to(device)
    output = torch.from_numpy(position >= history.prompt_tokens[:, None]).to(device) & known
    chosen = penalties.take(history.rows)
    selected = logits[rows]
    # What lies beyond the known tokens repeats a known one, so that it changes nothing.
    seen = torch.where(known, tokens, tokens[:, :1])
    _divide_seen(selected, seen, torch.from_numpy(chosen.repetition).to(device)[:, None])
    counts = torch.zeros_like(selected).scatter_add_(1, seen, output.to(selected.dtype))
    selected -= counts * torch.from_numpy(chosen.frequency).to(device)[:, None]
    selected -= (counts > 0) * torch.from_numpy(chosen.presence).to(device)[:, None]
    logits[rows] = selected


def _divide_seen(logits: "torch.Tensor", seen: "torch.Tensor", repetition: "torch.Tensor") -> None:
    import torch

    scores = logits.gather(1, seen)
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    logits.scatter_(1, seen, scores)


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
    """Last tokens of those bad words whose other tokens have just been generated."""
    if not rule.bad_words:
        return
    recent = history.of(row).tolist() if history is not None and rule.needs_history else []
    for word in rule.bad_words:
        start = len(recent) - (len(word) - 1)
        if len(word) == 1 or (start >= 0 and recent[start:] == list(word[:-1])):
            yield word[-1]


def _process(
    logits: "torch.Tensor",
    row: int,
    processors: Sequence[Processor],
    tokens: npt.NDArray[np.int64],
) -> None:
    import torch

    token_ids = torch.from_numpy(tokens).to(logits.device)[None]
    scores = logits[row : row + 1].clone()
    for processor in processors:
        scores = processor(token_ids, scores)
    logits[row] = scores[0]


def _allow_only(logits: "torch.Tensor", allowed: Mapping[int, npt.NDArray[np.int64]]) -> None:
    import torch

    for row, tokens in allowed.items():
        kept = torch.from_numpy(tokens).to(logits.device)
        values = logits[row, kept]
        logits[row] = -torch.inf
        logits[row, kept] = values


def _set(logits: "torch.Tensor", tokens: Mapping[int, npt.NDArray[np.int64]], value: float) -> None:
    import torch

    if tokens:
        rows, columns = _pairs(tokens)
        logits[
            torch.from_numpy(rows).to(logits.device), torch.from_numpy(columns).to(logits.device)
        ] = value


def _add(
    logits: "torch.Tensor",
    biases: Mapping[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]],
) -> None:
    import torch

    if biases:
        rows, columns = _pairs({row: ids for row, (ids, _) in biases.items()})
        values = np.concatenate([values for _, values in biases.values()])
        where = (
            torch.from_numpy(rows).to(logits.device),
            torch.from_numpy(columns).to(logits.device),
        )
        logits.index_put_(where, torch.from_numpy(values).to(logits.device), accumulate=True)


def _pairs(
    tokens: Mapping[int, npt.NDArray[np.int64]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and column of every token: both `int64[k]`."""
    rows = [np.full(len(ids), row, np.int64) for row, ids in tokens.items()]
    return np.concatenate(rows), np.concatenate(list(tokens.values()))
