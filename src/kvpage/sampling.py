"""How the next token is chosen: the parameters of a request, and the choice for a whole batch.

The order of the steps is the usual one: temperature, top-k, top-p, min-p, then one draw. The draw
needs a single uniform number per row, a pure function of the request's seed and of the token's
index, so a seed gives the same numbers alone, in any batch, and after preemption.
"""

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.errors import RequestError

if TYPE_CHECKING:
    import torch

GREEDY_BELOW = 1e-5
"""A temperature below this is argmax: dividing logits by it would overflow."""


def _number(low: float, high: float, *, open_low: bool = False) -> Any:
    """A validator for a real number between `low` and `high`."""

    def check(_instance: object, attribute: "attrs.Attribute[float]", value: float) -> None:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not low <= value <= high or (open_low and value == low):
            bracket = "above" if open_low else "at least"
            limit = f" and at most {high:g}" if high != np.inf else ""
            raise RequestError(f"{attribute.name} must be {bracket} {low:g}{limit}, got {value!r}")

    return check


def _integer(low: int, *, optional: bool = False) -> Any:
    """A validator for an integer of at least `low`."""

    def check(_instance: object, attribute: "attrs.Attribute[int]", value: int | None) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise RequestError(
                f"{attribute.name} must be an integer of at least {low}, got {value!r}"
            )

    return check


def _token_ids(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise RequestError(f"{attribute.name} must hold token ids, got {token!r}")


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

    Raises:
        RequestError: a value is out of range; the sentence names it.
    """

    max_tokens: int | None = attrs.field(default=None, validator=_integer(1, optional=True))
    temperature: float = attrs.field(default=1.0, validator=_number(0, np.inf))
    top_k: int = attrs.field(default=0, validator=_integer(0))
    top_p: float = attrs.field(default=1.0, validator=_number(0, 1, open_low=True))
    min_p: float = attrs.field(default=0.0, validator=_number(0, 1))
    seed: int | None = attrs.field(default=None, validator=_integer(0, optional=True))
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=tuple, validator=_token_ids)
    ignore_eos: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))

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
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]

    @classmethod
    def empty(cls, num_rows: int) -> "SamplingRows":
        """Room for `num_rows` rows, all greedy."""
        return cls(
            np.zeros(num_rows, np.float32),
            np.zeros(num_rows, np.int64),
            np.ones(num_rows, np.float32),
            np.zeros(num_rows, np.float32),
            np.zeros(num_rows, np.uint64),
        )

    def put(self, row: int, params: SamplingParams, seed: int) -> None:
        """Enter one request's parameters in `row`."""
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed % 2**64

    def take(self, rows: npt.NDArray[np.int64]) -> "SamplingRows":
        """A copy of the rows named by `rows`."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
        )


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
    logits: "torch.Tensor", rows: SamplingRows, indices: npt.NDArray[np.int64]
) -> "torch.Tensor":
    """Choose one token per row.

    Args:
        logits: `[n, vocabulary]`, any float type; not changed.
        rows: the parameters of the n rows.
        indices: `int64[n]`, how many tokens each request has generated so far.

    Returns:
        `int64[n]` token ids on the device of `logits`.
    """
    import torch

    random_rows = np.flatnonzero(rows.temperature > 0)
    tokens = logits.argmax(dim=-1)
    if len(random_rows):
        chosen = torch.from_numpy(random_rows).to(logits.device)
        drawn = _draw(logits[chosen].float(), rows.take(random_rows), indices[random_rows])
        tokens[chosen] = drawn
    return tokens


def _draw(
    logits: "torch.Tensor", rows: SamplingRows, indices: npt.NDArray[np.int64]
) -> "torch.Tensor":
    """Sample every row. `logits` is scratch: `float32[n, vocabulary]`, changed."""
    import torch

    device = logits.device
    logits.div_(torch.from_numpy(rows.temperature).to(device)[:, None])
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    if (rows.top_k > 0).any() or (rows.top_p < 1).any():
        _keep_top(logits, rows)
    weights = logits.double().exp_()
    if (rows.min_p > 0).any():
        # The most likely token has weight 1, so the share of it is the weight itself.
        weights[weights < torch.from_numpy(rows.min_p).to(device)[:, None]] = 0.0
    cumulative = weights.cumsum_(dim=-1)
    point = torch.from_numpy(uniforms(rows.seed, indices)).to(device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).squeeze(1)


def _keep_top(logits: "torch.Tensor", rows: SamplingRows) -> None:
    """Set every logit outside top-k and top-p to minus infinity, in place."""
    import torch

    device, vocabulary = logits.device, logits.shape[-1]
    top_k = torch.from_numpy(np.where(rows.top_k > 0, rows.top_k, vocabulary)).to(device)
    top_p = torch.from_numpy(rows.top_p).to(device)
    # Sorting the whole vocabulary is needed only where some row has no top-k to cut it first.
    width = vocabulary if (rows.top_k == 0).any() else int(min(rows.top_k.max(), vocabulary))
    values, tokens = logits.topk(width, dim=-1)
    rank = torch.arange(width, device=device)
    values.masked_fill_(rank >= top_k[:, None], -torch.inf)
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    values.masked_fill_((before >= top_p[:, None]) & (rank > 0), -torch.inf)
    logits.fill_(-torch.inf).scatter_(-1, tokens, values)
