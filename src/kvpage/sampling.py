"""How the next token is chosen: the parameters of a request, and the choice for a whole batch.

The order of the steps: the request's own processors, its grammar (see `grammar`), rules and
penalties (see `logits`), temperature, min-p, top-k, top-p, then one draw (see `draw`). A draw needs
a single uniform number per row, a pure function of the request's seed and of the token's index, so
a seed gives the same numbers alone, in any batch, and after preemption.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.draw import NO_TOKEN, Cuts, draw, most_likely
from kvpage.errors import RequestError, StepFailed
from kvpage.grammar import Matcher, StructuredOutputs, TokenMasks
from kvpage.logits import (
    History,
    Penalties,
    Processor,
    TokenRules,
    apply_penalties,
    apply_processors,
    apply_rules,
)

if TYPE_CHECKING:
    import torch

PART_BYTES = 4 * 2**20
"""Logits that are worked on at once on a CPU: more would leave its caches, and freshly allocated
memory costs more than all arithmetic here, while so much is kept for reuse."""

LARGEST = float(np.finfo(np.float32).max)
"""Columns of numbers are float32: anything larger would be infinite."""

_MANY = 2**31
"""As good as any larger number of tokens: no vocabulary has so many."""

MAX_CHOICES = 128
"""Outputs of one request."""

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


def _structured(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value is not None and not isinstance(value, StructuredOutputs):
        raise RequestError(f"{attribute.name} must be StructuredOutputs, got {value!r}")


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
        n: how many outputs to generate for the prompt, which is computed once.
        logprobs: report the log-probability of each token and of so many most likely ones; 0
            reports the token's own; None reports nothing. Taken before any of the changes above.
        prompt_logprobs: the same for each token of the prompt, reported with the first generated
            token. The whole prompt is computed for it, whatever the prefix cache has.
        logits_processors: callables `(token_ids int64[1, t], logits float32[1, vocabulary]) ->
            logits`, called in order before all other changes; transformers' `LogitsProcessor`
            objects have this form. One that raises ends its own request only.
        structured_outputs: the form that the output must have; the request ends with `"stop"` when
            it is complete. Needs the extra `guided`.

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
    n: int = attrs.field(default=1, validator=_integer(1, MAX_CHOICES))
    logprobs: int | None = attrs.field(default=None, validator=_integer(0, optional=True))
    prompt_logprobs: int | None = attrs.field(default=None, validator=_integer(0, optional=True))
    logits_processors: tuple[Processor, ...] = attrs.field(
        default=(), converter=_several, validator=_callables
    )
    structured_outputs: StructuredOutputs | None = attrs.field(default=None, validator=_structured)

    def __attrs_post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} and max_tokens is {self.max_tokens}"
            )
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids is empty: no token could be generated")

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew from the same values: a read-only mapping can be neither pickled nor copied."""
        values = {each.name: getattr(self, each.name) for each in attrs.fields(type(self))}
        return _with_values, (type(self), values | {"logit_bias": dict(self.logit_bias)})

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


def _with_values(kind: type[SamplingParams], values: dict[str, Any]) -> SamplingParams:
    return kind(**values)


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
        changed: `bool[n]`, which of them have penalties, rules or a grammar.
        needs_history: `bool[n]`, whose penalties or rules look at the tokens so far.
        logprobs: `int64[n]`, how many of the most likely tokens to report; -1 reports nothing.
        rules: `object[n]`, a row's `TokenRules` or None.
        guided: `bool[n]`, which of them follow a grammar.
        matchers: `object[n]`, a row's `Matcher` or None.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    penalties: Penalties
    penalised: npt.NDArray[np.bool_]
    changed: npt.NDArray[np.bool_]
    needs_history: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.int64]
    rules: npt.NDArray[np.object_]
    guided: npt.NDArray[np.bool_]
    matchers: npt.NDArray[np.object_]

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
            np.zeros(num_rows, np.bool_),
            np.full(num_rows, -1, np.int64),
            np.full(num_rows, None, np.object_),
            np.zeros(num_rows, np.bool_),
            np.full(num_rows, None, np.object_),
        )

    def put(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        rules: TokenRules | None = None,
        matcher: Matcher | None = None,
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
        self.changed[row] = params.penalised or rules is not None or matcher is not None
        self.needs_history[row] = params.penalised or (rules is not None and rules.needs_history)
        self.logprobs[row] = -1 if params.logprobs is None else min(params.logprobs, _MANY)
        self.rules[row] = rules
        self.guided[row] = matcher is not None
        self.matchers[row] = matcher

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
            self.changed[rows],
            self.needs_history[rows],
            self.logprobs[rows],
            self.rules[rows],
            self.guided[rows],
            self.matchers[rows],
        )

    def accept(
        self, token_ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], dict[int, StepFailed]]:
        """Let the grammars go on by the tokens that were sampled, `int64[n]`.

        Returns:
            `bool[n]`, whose output is complete, and for each row whose grammar cannot follow what
            its request fails by.
        """
        complete = np.zeros(len(token_ids), np.bool_)
        failed = {}
        for row in np.flatnonzero(self.guided & (token_ids != NO_TOKEN)).tolist():
            complete[row] = self.matchers[row].accept(int(token_ids[row]))
            failure = self.matchers[row].failure if complete[row] else None
            if failure is not None:
                failed[row] = _left_grammar(failure)
        return complete, failed


@attrs.frozen
class Logprobs:
    """Log-probabilities of one token and of the most likely ones in its place.

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


def process(
    logits: "torch.Tensor", rows: SamplingRows, history: History | None
) -> tuple["torch.Tensor", dict[int, StepFailed]]:
    """Apply the requests' own processors.

    Args:
        logits: `[n, vocabulary]`, any float type; not changed.
        rows: the parameters of the n rows.
        history: holds every row that has processors.

    Returns:
        The logits to sample from, the same tensor if no row has a processor, and for each row whose
        processor raised what its request fails by. Nothing can be sampled from such a row.
    """
    processors = {row: rule.processors for row, rule in _ruled(rows) if rule.processors}
    if not processors or history is None:
        return logits, {}
    processed = logits.float().clone()
    return processed, apply_processors(processed, processors, history)


def sample(
    logits: "torch.Tensor",
    rows: SamplingRows,
    indices: npt.NDArray[np.int64],
    history: History | None = None,
) -> "torch.Tensor":
    """Choose one token per row.

    Args:
        logits: `[n, vocabulary]`, any float type; not changed.
        rows: the parameters of the n rows; their processors have been applied, see `process`.
        indices: `int64[n]`, how many tokens each request has generated so far.
        history: holds every row that `needs_history`.

    Returns:
        `int64[n]` token ids on the device of `logits`; `draw.NO_TOKEN` for a row whose largest
        logit is not finite, as when everything is forbidden.
    """
    import torch

    if len(logits) and not (rows.changed.any() or rows.temperature.any()):
        return most_likely(logits)
    masks = TokenMasks.of(rows.matchers) if rows.guided.any() else None
    points = torch.from_numpy(uniforms(rows.seed, indices)).to(logits.device)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for part in _parts(rows, logits):
        chosen = torch.from_numpy(part).to(logits.device)
        some, of_part = _rows_of(logits, part, chosen), rows.take(part)
        if of_part.changed.any():
            some = some.float().clone()
            if masks is not None and of_part.guided[0]:
                masks.apply(some, part)
            _change(some, of_part, indices[part], history.among(part) if history else None)
        if of_part.temperature[0] == 0:
            tokens[chosen] = most_likely(some)
        else:
            cuts = _cuts(of_part, some)
            tokens[chosen] = draw(some.float(), cuts, points[chosen][:, None])
    return tokens


def failures(
    token_ids: npt.NDArray[np.int64], rows: SamplingRows, raised: Mapping[int, StepFailed]
) -> dict[int, StepFailed]:
    """What the requests of those rows fail by from which `sample` could choose nothing."""
    without = np.flatnonzero(token_ids == NO_TOKEN).tolist()
    return {row: raised.get(row) or _no_token(rows.matchers[row]) for row in without}


def _no_token(matcher: Matcher | None) -> StepFailed:
    failure = matcher.failure if matcher is not None else None
    if failure is not None:
        return _left_grammar(failure)
    return StepFailed(
        "there is no token to choose: the request forbids every one, or the model gave logits "
        "that are not finite"
    )


def _left_grammar(reason: str) -> StepFailed:
    return StepFailed(f"the output cannot be continued by its grammar: {reason}")


def token_logprobs(
    logits: "torch.Tensor", rows: SamplingRows, token_ids: npt.NDArray[np.int64]
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
    chosen = logits.index_select(0, torch.from_numpy(asked).to(logits.device))
    logprobs = logprobs_of(chosen, token_ids[asked], rows.logprobs[asked])
    for row, of_row in zip(asked.tolist(), logprobs, strict=True):
        found[row] = of_row
    return found


def logprobs_of(
    logits: "torch.Tensor", token_ids: npt.NDArray[np.int64], num_top: npt.NDArray[np.int64]
) -> list[Logprobs]:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: `[n, vocabulary]`, any float type.
        token_ids: `int64[n]`.
        num_top: `int64[n]`, how many of the most likely ones to report.
    """
    import torch

    found = []
    width = min(int(num_top.max(initial=0)), logits.shape[-1])
    tokens = torch.from_numpy(token_ids.clip(min=0)).to(logits.device)
    at_once = _rows_at_once(logits)
    for start in range(0, len(logits), at_once):
        end = start + at_once
        logprobs = logits[start:end].float().log_softmax(dim=-1)
        own = logprobs.gather(1, tokens[start:end, None]).squeeze(1).tolist()
        values, ids = (part.tolist() for part in logprobs.topk(width, dim=-1))
        for i, number in enumerate(num_top[start:end].tolist()):
            top = tuple(zip(ids[i][:number], values[i][:number], strict=True))
            found.append(Logprobs(own[i], top))
    return found


def _ruled(rows: SamplingRows) -> Iterator[tuple[int, TokenRules]]:
    """The rows that have rules."""
    changed = np.flatnonzero(rows.changed).tolist()
    return ((row, rows.rules[row]) for row in changed if rows.rules[row] is not None)


def _rows_of(
    logits: "torch.Tensor", part: npt.NDArray[np.int64], chosen: "torch.Tensor"
) -> "torch.Tensor":
    """The rows of a part; a view where they are adjacent, as they are if all need the same."""
    first, last = int(part[0]), int(part[-1])
    if last - first + 1 == len(part):  # parts are in ascending order
        return logits[first : last + 1]
    return logits.index_select(0, chosen)


def _rows_at_once(logits: "torch.Tensor") -> int:
    if logits.device.type != "cpu":
        return max(1, len(logits))
    return max(1, PART_BYTES // (4 * logits.shape[-1]))


def _parts(rows: SamplingRows, logits: "torch.Tensor") -> Iterator[npt.NDArray[np.int64]]:
    """All rows, in parts whose rows need the same work."""
    drawn = rows.temperature > 0
    cut_by_k = (rows.top_k > 0) & (rows.top_k < logits.shape[-1])
    kinds = drawn * (1 + 4 * cut_by_k + 2 * (rows.top_p < 1)) + 8 * rows.changed + 16 * rows.guided
    order = np.argsort(kinds, kind="stable")
    at_once = _rows_at_once(logits)
    for group in np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1):
        for start in range(0, len(group), at_once):
            yield group[start : start + at_once]


def _cuts(rows: SamplingRows, logits: "torch.Tensor") -> Cuts:
    """The cuts of one part, on the device."""
    import torch

    def column(values: npt.NDArray[Any]) -> "torch.Tensor":
        return torch.from_numpy(values).to(logits.device)[:, None]

    return Cuts(
        temperature=column(rows.temperature),
        min_p=column(rows.min_p) if rows.min_p.any() else None,
        top_k=column(rows.top_k) if 0 < rows.top_k[0] < logits.shape[-1] else None,
        top_p=column(rows.top_p) if rows.top_p[0] < 1 else None,
    )


def _change(
    logits: "torch.Tensor",
    rows: SamplingRows,
    indices: npt.NDArray[np.int64],
    history: History | None,
) -> None:
    """Apply rules and penalties to the rows of one part, in place."""
    apply_rules(logits, dict(_ruled(rows)), indices, history)
    if history is not None and rows.penalised.any():
        apply_penalties(logits, rows.penalties, history)
