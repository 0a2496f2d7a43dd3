"""How the next token is chosen: the parameters of a request, and the choice for a whole batch.

The order of the steps is the usual one: rules and penalties (see `logits`), temperature, min-p,
top-k, top-p, then one draw. The draw needs a single uniform number per row, a pure function of the
request's seed and of the token's index, so a seed gives the same numbers alone, in any batch, and
after preemption.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.errors import RequestError
from kvpage.logits import History, Penalties, Processor, TokenRules, apply_penalties, apply_rules

if TYPE_CHECKING:
    import torch

LOOKS = (64, 1024)
"""How many of the largest logits are looked at before a whole vocabulary is sorted."""

RUN = 256
"""Tokens whose weights are summed before the sums are accumulated."""

LARGEST = float(np.finfo(np.float32).max)
"""Columns of numbers are float32: anything larger would be infinite."""

_MANY = 2**31
"""As good as any larger number of tokens: no vocabulary has so many."""

GREEDY_BELOW = 1e-5
"""A temperature below this is argmax: dividing logits by it would overflow."""


def _number(low: float, high: float, *, open_low: bool = False) -> Any:
    """A validator for a real number between `low` and `high`."""

    def check(_instance: object, attribute: "attrs.Attribute[float]", value: float) -> None:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not low <= value <= high or (open_low and value == low):
            bracket = "above" if open_low else "at least"
            raise RequestError(
                f"{attribute.name} must be {bracket} {low:g} and at most {high:g}, got {value!r}"
            )

    return check


def _integer(low: int, high: float = np.inf, *, optional: bool = False) -> Any:
    """A validator for an integer between `low` and `high`."""

    def check(_instance: object, attribute: "attrs.Attribute[int]", value: int | None) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            limit = f" and at most {high}" if high != np.inf else ""
            raise RequestError(
                f"{attribute.name} must be an integer of at least {low}{limit}, got {value!r}"
            )

    return check


def _truth(_instance: object, attribute: "attrs.Attribute[bool]", value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{attribute.name} must be True or False, got {value!r}")


def _token_ids(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    for token in value or ():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise RequestError(f"{attribute.name} must hold token ids, got {token!r}")


def _biases(_instance: object, attribute: "attrs.Attribute[Any]", value: Mapping[Any, Any]) -> None:
    _token_ids(_instance, attribute, value)
    for token, bias in value.items():
        if not isinstance(bias, (int, float)) or isinstance(bias, bool) or not abs(bias) <= LARGEST:
            raise RequestError(f"{attribute.name} of token {token} must be a number, got {bias!r}")


def _texts(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    for text in value:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{attribute.name} must hold texts that are not empty, got {text!r}")


def _callables(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    for processor in value:
        if not callable(processor):
            raise RequestError(f"{attribute.name} must hold callables, got {processor!r}")


def _several(values: Iterable[Any]) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise RequestError(f"a sequence of values is due where {values!r} was given")
    return tuple(values)


def _one_or_many(texts: "str | Iterable[str]") -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else _several(texts)


def _maybe_several(values: "Iterable[int] | None") -> tuple[int, ...] | None:
    return None if values is None else _several(values)


def _read_only(biases: Mapping[int, float]) -> Mapping[int, float]:
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias maps token ids to numbers, got {biases!r}")
    return MappingProxyType(dict(biases))


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Refuses what cannot work.

    Attributes:
        max_tokens: tokens to generate at most; None means up to the engine's `max_model_len`.
        temperature: 0 (or below 1e-5) always takes the most likely token; 1 samples from the
            model's own distribution.
        top_k: sample among the k most likely tokens only; 0 means all.
        top_p: sample among the fewest tokens whose probabilities sum up to this.
        min_p: drop tokens less likely than this share of the most likely one.
        seed: makes the draws repeatable; None takes a fresh seed.
        stop_token_ids: end when one of these is generated, beside the model's end-of-text tokens.
        ignore_eos: go on after the model's end-of-text tokens.
        stop: texts that end the output where they would begin; they are not part of it.
        min_tokens: no end token before so many tokens.
        repetition_penalty: above 1 makes tokens of prompt and output less likely.
        presence_penalty: subtracted from the logit of every generated token, -2 to 2.
        frequency_penalty: subtracted for each time that it was generated, -2 to 2.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: generate only these; None allows all.
        bad_words: texts that must not be generated.
        logprobs: report the log-probability of each token and of so many most likely ones; 0
            reports the token's own; None reports nothing. Taken before any of the changes above.
        logits_processors: callables `(token_ids int64[1, t], logits float32[1, vocabulary]) ->
            logits`; transformers' `LogitsProcessor` objects have this form.

    Raises:
        RequestError: a value is out of range; the sentence names it.
    """

    max_tokens: int | None = attrs.field(default=None, validator=_integer(1, optional=True))
    temperature: float = attrs.field(default=1.0, validator=_number(0, LARGEST))
    top_k: int = attrs.field(default=0, validator=_integer(0))
    top_p: float = attrs.field(default=1.0, validator=_number(0, 1, open_low=True))
    min_p: float = attrs.field(default=0.0, validator=_number(0, 1))
    seed: int | None = attrs.field(default=None, validator=_integer(0, 2**64 - 1, optional=True))
    stop_token_ids: tuple[int, ...] = attrs.field(
        default=(), converter=_several, validator=_token_ids
    )
    ignore_eos: bool = attrs.field(default=False, validator=_truth)
    stop: tuple[str, ...] = attrs.field(default=(), converter=_one_or_many, validator=_texts)
    min_tokens: int = attrs.field(default=0, validator=_integer(0))
    repetition_penalty: float = attrs.field(
        default=1.0, validator=_number(0, LARGEST, open_low=True)
    )
    presence_penalty: float = attrs.field(default=0.0, validator=_number(-2, 2))
    frequency_penalty: float = attrs.field(default=0.0, validator=_number(-2, 2))
    logit_bias: Mapping[int, float] = attrs.field(
        factory=dict, converter=_read_only, validator=_biases
    )
    allowed_token_ids: tuple[int, ...] | None = attrs.field(
        default=None, converter=_maybe_several, validator=_token_ids
    )
    bad_words: tuple[str, ...] = attrs.field(default=(), converter=_one_or_many, validator=_texts)
    logprobs: int | None = attrs.field(default=None, validator=_integer(0, optional=True))
    logits_processors: tuple[Processor, ...] = attrs.field(
        default=(), converter=_several, validator=_callables
    )

    def __attrs_post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} and max_tokens is {self.max_tokens}"
            )
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids is empty: no token could be generated")

    @property
    def penalised(self) -> bool:
        """Does any penalty apply?"""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def greedy(self) -> bool:
        """Is every token the most likely one?"""
        return self.temperature < GREEDY_BELOW


@attrs.frozen(eq=False)
class SamplingRows:
    """The sampling parameters of some rows, column by column, ready for vectorised work.

    Attributes:
        temperature: `float32[n]`; 0 means greedy.
        top_k: `int64[n]`; 0 means all.
        top_p: `float32[n]`.
        min_p: `float32[n]`.
        seed: `uint64[n]`.
        penalties: of the n rows.
        penalised: `bool[n]`, which of them have any.
        needs_history: `bool[n]`, whose penalties or rules look at the tokens so far.
        logprobs: `int64[n]`, how many of the most likely tokens to report; -1 reports nothing.
        rules: `object[n]`, a row's `TokenRules` or None.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    penalties: Penalties
    penalised: npt.NDArray[np.bool_]
    needs_history: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.int64]
    rules: npt.NDArray[np.object_]

    @classmethod
    def empty(cls, num_rows: int) -> "SamplingRows":
        """Room for `num_rows` rows, all greedy."""
        return cls(
            np.zeros(num_rows, np.float32),
            np.zeros(num_rows, np.int64),
            np.ones(num_rows, np.float32),
            np.zeros(num_rows, np.float32),
            np.zeros(num_rows, np.uint64),
            Penalties.none(num_rows),
            np.zeros(num_rows, np.bool_),
            np.zeros(num_rows, np.bool_),
            np.full(num_rows, -1, np.int64),
            np.full(num_rows, None, np.object_),
        )

    def put(
        self, row: int, params: SamplingParams, seed: int, rules: TokenRules | None = None
    ) -> None:
        """Enter one request's parameters in `row`."""
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = min(params.top_k, _MANY)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed
        self.penalties.repetition[row] = params.repetition_penalty
        self.penalties.presence[row] = params.presence_penalty
        self.penalties.frequency[row] = params.frequency_penalty
        self.penalised[row] = params.penalised
        self.needs_history[row] = params.penalised or (rules is not None and rules.needs_history)
        self.logprobs[row] = -1 if params.logprobs is None else min(params.logprobs, _MANY)
        self.rules[row] = rules

    def take(self, rows: npt.NDArray[np.int64]) -> "SamplingRows":
        """A copy of the rows named by `rows`."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            self.penalties.take(rows),
            self.penalised[rows],
            self.needs_history[rows],
            self.logprobs[rows],
            self.rules[rows],
        )


@attrs.frozen(eq=False)
class Logprobs:
    """Log-probabilities of one generated token and of the most likely ones in its place.

    Attributes:
        own: of the token itself.
        top: `(token id, log-probability)` of the most likely tokens, the likeliest first.
    """

    own: float
    top: tuple[tuple[int, float], ...]


def uniforms(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """One number in [0, 1) for each (seed, token index): `float64[n]`.

    Counter-based: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) started at the seed and asked for
    its `index`-th output, with a second round so that neighbouring seeds share nothing.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = _mix(seeds + golden) + golden * (indices.astype(np.uint64) + np.uint64(1))
        bits = _mix(state)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(
    logits: "torch.Tensor",
    rows: SamplingRows,
    indices: npt.NDArray[np.int64],
    history: History | None = None,
) -> "torch.Tensor":
    """Choose one token per row.

    Args:
        logits: `[n, vocabulary]`, any float type; not changed.
        rows: the parameters of the n rows.
        indices: `int64[n]`, how many tokens each request has generated so far.
        history: holds every row that `needs_history`.

    Returns:
        `int64[n]` token ids on the device of `logits`.
    """
    import torch

    logits = _adjusted(logits, rows, indices, history)
    random_rows = np.flatnonzero(rows.temperature > 0)
    tokens = logits.argmax(dim=-1)
    if len(random_rows):
        chosen = torch.from_numpy(random_rows).to(logits.device)
        drawn = _draw(logits[chosen].float(), rows.take(random_rows), indices[random_rows])
        tokens[chosen] = drawn
    return tokens


def token_logprobs(
    logits: "torch.Tensor", rows: SamplingRows, tokens: "torch.Tensor"
) -> list[Logprobs | None]:
    """Log-probabilities where they were asked for, from the model's own logits `[n, vocabulary]`.

    Returns:
        One for each of the n rows, or nothing if no row asked.
    """
    import torch

    asked = np.flatnonzero(rows.logprobs >= 0)
    if not len(asked):
        return []
    found: list[Logprobs | None] = [None] * len(rows.logprobs)
    chosen = torch.from_numpy(asked).to(logits.device)
    logprobs = logits[chosen].float().log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[chosen][:, None])[:, 0].tolist()
    width = int(min(rows.logprobs.max(), logits.shape[-1]))
    values, ids = (part.tolist() for part in logprobs.topk(width, dim=-1))
    for i, row in enumerate(asked.tolist()):
        top = list(zip(ids[i], values[i], strict=True))[: rows.logprobs[row]]
        found[row] = Logprobs(own[i], tuple(top))
    return found


def _adjusted(
    logits: "torch.Tensor",
    rows: SamplingRows,
    indices: npt.NDArray[np.int64],
    history: History | None,
) -> "torch.Tensor":
    """Logits after rules and penalties; the same tensor where no row has any."""
    import torch

    ruled = [row for row, rule in enumerate(rows.rules) if rule is not None]
    if not ruled and not rows.penalised.any():
        return logits
    logits = logits.to(torch.float32, copy=True)
    apply_rules(logits, {row: rows.rules[row] for row in ruled}, indices, history)
    if history is not None and rows.penalised.any():
        apply_penalties(logits, rows.penalties, history)
    return logits


def _draw(
    logits: "torch.Tensor", rows: SamplingRows, indices: npt.NDArray[np.int64]
) -> "torch.Tensor":
    """Sample every row. `logits` is scratch: `float32[n, vocabulary]`, changed."""
    import torch

    device = logits.device
    logits.div_(torch.from_numpy(rows.temperature).to(device)[:, None])
    logits.sub_(logits.amax(dim=-1, keepdim=True))  # the most likely token has weight exp(0) = 1
    if (rows.min_p > 0).any():
        with np.errstate(divide="ignore"):  # no min_p is log 0: nothing lies below it
            least = torch.from_numpy(np.log(rows.min_p))
        logits.masked_fill_(logits < least.to(device)[:, None], -torch.inf)
    points = torch.from_numpy(uniforms(rows.seed, indices)).to(device)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=device)
    cut = (rows.top_k > 0) | (rows.top_p < 1)
    if not cut.all():
        free = torch.from_numpy(np.flatnonzero(~cut)).to(device)
        tokens[free] = _draw_from_all(logits[free], points[free])
    if cut.any():
        _draw_from_top(logits, rows, points, tokens)
    return tokens


def _draw_from_all(logits: "torch.Tensor", points: "torch.Tensor") -> "torch.Tensor":
    """Invert the cumulative distribution at `points`: first the run of tokens, then the token.

    One pass over the vocabulary in float32; only the sums of runs are accumulated in float64.
    """
    import torch

    padding = -logits.shape[-1] % RUN
    weights = torch.nn.functional.pad(logits.exp_(), (0, padding)).view(len(logits), -1, RUN)
    upto = weights.sum(dim=-1).double().cumsum(dim=-1)
    targets = points[:, None] * upto[:, -1:]
    run = torch.searchsorted(upto, targets, right=True).clamp_(max=upto.shape[-1] - 1)
    within = weights.gather(1, run[:, :, None].expand(-1, -1, RUN))[:, 0].double().cumsum(dim=-1)
    before = torch.where(run > 0, upto.gather(1, (run - 1).clamp_(min=0)), 0.0)
    offset = torch.searchsorted(within, targets - before, right=True)
    # Rounding may point past the last token of the run that has any weight.
    last = torch.searchsorted(within, within[:, -1:].contiguous())
    return (run * RUN + torch.minimum(offset, last)).squeeze(1)


def _draw_from_top(
    logits: "torch.Tensor", rows: SamplingRows, points: "torch.Tensor", tokens: "torch.Tensor"
) -> None:
    """Sample the rows with top-k or top-p; enters their tokens in `tokens`.

    Sorting a whole vocabulary is slow, and the few tokens that matter are nearly always among the
    largest. So the largest few are looked at first, and only a row which they do not decide is
    looked at again with more.
    """
    import torch

    device, vocabulary = logits.device, logits.shape[-1]
    top_k = torch.from_numpy(np.where(rows.top_k > 0, rows.top_k, vocabulary)).to(device)
    top_p = torch.from_numpy(rows.top_p).to(device)
    left = torch.from_numpy(np.flatnonzero((rows.top_k > 0) | (rows.top_p < 1))).to(device)
    for width in (*LOOKS, vocabulary):
        chosen, decided = _draw_among(
            logits[left], min(width, vocabulary), top_k[left], top_p[left], points[left]
        )
        tokens[left] = chosen
        left = left[~decided]
        if not len(left):
            return


def _draw_among(
    logits: "torch.Tensor",
    width: int,
    top_k: "torch.Tensor",
    top_p: "torch.Tensor",
    points: "torch.Tensor",
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Draw from the `width` largest; tokens, and a mask of the rows for which these suffice."""
    import torch

    values, ids = logits.topk(width, dim=-1)
    rank = torch.arange(width, device=logits.device)
    values.masked_fill_(rank >= top_k[:, None], -torch.inf)
    # top-p counts probabilities after top-k: tokens that were cut have none.
    inside = values.logsumexp(dim=-1)
    total = torch.where(top_k <= width, inside, logits.logsumexp(dim=-1))
    probabilities = (values - total[:, None]).exp_()
    upto = probabilities.cumsum(dim=-1)
    probabilities.masked_fill_((upto - probabilities >= top_p[:, None]) & (rank > 0), 0.0)
    # With a top-k beyond `width` the probabilities above are too small to decide by.
    unlimited = top_k >= logits.shape[-1]
    decided = (top_k <= width) | (unlimited & (upto[:, -1] >= top_p))
    # In the order of ids, so that a near tie of two ranks cannot swap what a seed means.
    ids, order = ids.sort(dim=-1)
    cumulative = probabilities.gather(1, order).double().cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, points[:, None] * cumulative[:, -1:], right=True)
    return ids.gather(1, drawn.clamp_(max=width - 1)).squeeze(1), decided
