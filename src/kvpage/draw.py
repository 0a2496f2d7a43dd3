"""Choosing one token per row from logits: the most likely one, or a draw.

A draw cuts the distribution by min-p, top-k and top-p, then inverts what is left of the cumulative
distribution, tokens in the order of their ids, at one point per row. Cuts go by rank: the likelier
token first, of equally likely ones the lower id. So what can be drawn depends neither on the batch
nor on how a device breaks ties.

torch is not imported with this module: the decision side imports it with `sampling`, and must work
without torch.
"""

from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    import torch

NO_TOKEN = -1
"""Stands for a row from which nothing can be chosen: its largest logit is not finite."""

RUN = 256
"""Adjacent tokens that are looked at together before one of them is looked for."""

FEW = 16
"""Up to so many rows on a CPU, one pass on one thread costs less than several calls of torch."""

LOOK = 1024
"""How many of the largest logits top-p looks at before it sorts a whole row."""


@attrs.frozen(eq=False)
class Cuts:
    """How the rows of one draw are cut: tensors `[n, 1]` on the device of the logits.

    Attributes:
        temperature: `float32`, above 0.
        min_p: `float32`; None if no row has one.
        top_k: `int64`, from 1 to the size of the vocabulary; None if no row has one.
        top_p: `float32`, above 0; None if no row has one.
    """

    temperature: "torch.Tensor"
    min_p: "torch.Tensor | None" = None
    top_k: "torch.Tensor | None" = None
    top_p: "torch.Tensor | None" = None


def most_likely(logits: "torch.Tensor") -> "torch.Tensor":
    """The first token that has the largest logit.

    Many rows in two steps, first the run, then the token in it: on a CPU, torch finds maxima
    several times faster than the places of maxima.

    Args:
        logits: `[n, vocabulary]`.

    Returns:
        `int64[n]`; `NO_TOKEN` where the largest logit is not finite.
    """
    import torch

    if len(logits) <= FEW and logits.device.type == "cpu" and logits.dtype == torch.float32:
        rows = logits.detach().numpy()
        found = rows.argmax(axis=1)  # a NaN, if there is one
        finite = np.isfinite(rows[np.arange(len(rows)), found])
        return torch.from_numpy(np.where(finite, found, NO_TOKEN))
    runs = _in_runs(logits, float("-inf"))
    peaks = runs.amax(dim=-1)
    run = peaks.argmax(dim=-1, keepdim=True)
    tokens = run * RUN + _pick(runs, run).argmax(dim=-1, keepdim=True)
    return tokens.where(peaks.gather(1, run).isfinite(), NO_TOKEN).squeeze(1)


def draw(logits: "torch.Tensor", cuts: Cuts, points: "torch.Tensor") -> "torch.Tensor":
    """Draw a token from every row.

    Args:
        logits: `float32[n, vocabulary]`; not changed.
        cuts: of the n rows.
        points: `float64[n, 1]` in [0, 1), where to invert the cumulative distribution.

    Returns:
        `int64[n]`; `NO_TOKEN` where the largest logit is not finite.
    """
    peak = logits.amax(dim=-1, keepdim=True)
    weights = _weigh(logits, peak, cuts.temperature)
    if cuts.min_p is not None:
        _keep_from(weights, weights, cuts.min_p)
    if cuts.top_k is not None:
        width = min(int(cuts.top_k.max()) + 1, logits.shape[1])
        _drop(weights, logits, *_floor(_largest(logits, width), cuts.top_k))
    if cuts.top_p is not None:
        goal = _sums_of_runs(weights).sum(dim=-1, keepdim=True) * cuts.top_p
        _drop(weights, logits, *_nucleus_floor(logits, peak, cuts.temperature, goal))
    return _invert(weights, points)


def _weigh(
    logits: "torch.Tensor", peak: "torch.Tensor", temperature: "torch.Tensor"
) -> "torch.Tensor":
    """Probabilities in units of the most likely token's, so that nothing overflows."""
    return logits.sub(peak).div_(temperature).exp_()


def _nucleus_floor(
    logits: "torch.Tensor", peak: "torch.Tensor", temperature: "torch.Tensor", goal: "torch.Tensor"
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """The floor of the fewest first tokens whose weights sum up to `goal` `float64[n, 1]`.

    Tokens that were cut before count here, but they lie behind all others, where no goal reaches.
    """
    floor, ties = peak.clone(), peak.long().zero_()
    left = floor.squeeze(1).isfinite().nonzero().squeeze(1)
    for width in (min(LOOK, logits.shape[1]), logits.shape[1]):
        largest = _largest(logits[left], width)
        weights = _weigh(largest, peak[left], temperature[left]).double()
        before = weights.cumsum(dim=-1).sub_(weights)
        keep = (before < goal[left]).sum(dim=-1, keepdim=True)
        floor[left], ties[left] = _floor(largest, keep)
        left = left[keep.squeeze(1) == width]
        if not len(left):
            break
    return floor, ties


def _floor(largest: "torch.Tensor", keep: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor"]:
    """Where to cut rows so that the first `keep` tokens of each are left.

    Args:
        largest: `float32[n, w]`, the largest logits in descending order: one more than `keep`, or
            all there are.
        keep: `int64[n, 1]`, at least 1.

    Returns:
        The smallest logit that is kept, `[n, 1]`, and how many tokens of just this logit are: 0
        means all.
    """
    floor = largest.gather(1, keep - 1)
    after = largest.gather(1, keep.clamp(max=largest.shape[1] - 1))
    ties = keep - (largest > floor).sum(dim=-1, keepdim=True)
    return floor, ties.masked_fill(after < floor, 0)


def _drop(
    weights: "torch.Tensor", logits: "torch.Tensor", floor: "torch.Tensor", ties: "torch.Tensor"
) -> None:
    """Take the weight of all tokens beyond a floor, see `_floor`; in place."""
    _keep_from(weights, logits, floor)
    split = ties.squeeze(1).nonzero().squeeze(1)
    if len(split):
        tied = logits[split] == floor[split]
        late = tied & (tied.cumsum(dim=-1) > ties[split])
        weights[split] = weights[split].masked_fill_(late, 0.0)


def _keep_from(weights: "torch.Tensor", numbers: "torch.Tensor", floor: "torch.Tensor") -> None:
    """Take the weight of all tokens whose number is below the floor; in place."""
    # By zeros and ones as floats: on a CPU, a boolean mask takes torch six times as long.
    weights.mul_(numbers.clone().ge_(floor))


def _largest(logits: "torch.Tensor", width: int) -> "torch.Tensor":
    """The `width` largest numbers of each row in descending order: `float32[n, width]`."""
    if logits.device.type != "cpu":
        return logits.topk(width, dim=-1).values
    # NumPy selects and sorts by vector instructions, twenty to fifty times faster than torch here.
    numbers = logits.numpy()
    if width < numbers.shape[1]:
        numbers = np.partition(numbers, -width, axis=-1)[:, -width:]
    return logits.new_tensor(np.sort(numbers, axis=-1)).flip(-1)


def _invert(weights: "torch.Tensor", points: "torch.Tensor") -> "torch.Tensor":
    """Find the token at each point of the cumulative distribution: first the run, then the token.

    One pass over the vocabulary in float32; only the sums of runs are accumulated in float64.
    """
    upto = _sums_of_runs(weights).cumsum(dim=-1)
    targets = upto[:, -1:] * points
    run = _first_above(upto, targets)
    before = upto.gather(1, (run - 1).clamp_(min=0)).masked_fill_(run == 0, 0.0)
    within = _pick(_in_runs(weights, 0.0), run).double().cumsum(dim=-1)
    tokens = run * RUN + _first_above(within, targets - before)
    return tokens.where(upto[:, -1:].isfinite(), NO_TOKEN).squeeze(1)


def _first_above(cumulative: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
    """Place of the first sum above the target, `int64[n, 1]`.

    Where rounding leaves none, the last place that has any weight.
    """
    place = (cumulative <= targets).sum(dim=-1, keepdim=True)
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    return place.minimum(last)


def _sums_of_runs(weights: "torch.Tensor") -> "torch.Tensor":
    return _in_runs(weights, 0.0).sum(dim=-1).double()


def _in_runs(numbers: "torch.Tensor", fill: float) -> "torch.Tensor":
    """A view of `[n, vocabulary]` as `[n, runs, RUN]`, or a copy filled up to whole runs."""
    num_rows, width = numbers.shape
    missing = -width % RUN
    if missing:
        whole = numbers.new_full((num_rows, width + missing), fill)
        whole[:, :width] = numbers
        numbers = whole
    return numbers.view(num_rows, -1, RUN)


def _pick(runs: "torch.Tensor", run: "torch.Tensor") -> "torch.Tensor":
    """Of each row the one run that `run` `int64[n, 1]` names: `[n, RUN]`."""
    return runs.gather(1, run[:, :, None].expand(-1, -1, RUN)).squeeze(1)
