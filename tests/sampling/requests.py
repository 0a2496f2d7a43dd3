"""Requests in the middle of their output, and what sampling sees of a batch of them."""

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvpage import PoolGeometry, SamplingParams, SequenceId
from kvpage.batch import RunningBatch
from kvpage.logits import History, apply_penalties, apply_rules
from kvpage.request import EngineModel, prepare
from kvpage.sampling import SamplingRows, process, sample

GEOMETRY = PoolGeometry(num_blocks=64, block_size=4, max_model_len=200)


class LetterTokenizer:
    """One token per character: a is 1, b is 2; the space in front of a later word is 0."""

    chat_template = None

    def __call__(self, text: str, **_options: bool) -> dict[str, list[int]]:
        return {"input_ids": [max(0, ord(letter) - 96) for letter in text]}

    def convert_tokens_to_ids(self, token: str) -> None:
        """No token has the name of a byte."""

    def decode(self, ids: Sequence[int], **_options: bool) -> str:
        return "".join(chr(96 + token) if token else " " for token in ids)


@attrs.frozen
class Request:
    """A prompt, what has been generated so far, and how to go on."""

    params: SamplingParams
    prompt: Sequence[int] = (1,)
    output: Sequence[int] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]


@attrs.frozen
class Batch:
    """What a step's plan says about the sampling of some requests."""

    sampling: SamplingRows
    indices: npt.NDArray[np.int64]
    history: History | None

    @classmethod
    def of(cls, requests: Sequence[Request], vocabulary: int) -> "Batch":
        """The requests as they would run, in this order, token 3 ending a text."""
        model = EngineModel("letters", vocabulary, (3,), LetterTokenizer())
        running = RunningBatch(len(requests), GEOMETRY.max_model_len)
        for number, request in enumerate(requests):
            [choice] = prepare(
                request.prompt,
                request.params,
                number=SequenceId(number),
                model=model,
                geometry=GEOMETRY,
                window=0,
                new_keys=None,
                priority=0,
            )
            choice.sequence.tokens = np.array(request.tokens, np.int32)
            running.add(choice.sequence, 0)
        rows = np.arange(len(requests))
        sampling = running.sampling.take(rows)
        indices = running.num_tokens - running.prompt_tokens
        return cls(sampling, indices, running.history(rows, sampling))


def next_tokens(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """What a step samples for `requests` from `logits` `[n, vocabulary]`."""
    batch = Batch.of(requests, logits.shape[1])
    processed, _ = process(logits, batch.sampling, batch.history)
    tokens: list[int] = sample(processed, batch.sampling, batch.indices, batch.history).tolist()
    return tokens


def changed_logits(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Logits after processors, rules and penalties: what tokens are drawn from."""
    batch = Batch.of(requests, logits.shape[1])
    rules = {row: rule for row, rule in enumerate(batch.sampling.rules) if rule is not None}
    processed, _ = process(logits, batch.sampling, batch.history)
    changed = processed.to(torch.float32, copy=True)
    apply_rules(changed, rules, batch.indices, batch.history)
    if batch.history is not None:
        apply_penalties(changed, batch.sampling.penalties, batch.history)
    return changed
