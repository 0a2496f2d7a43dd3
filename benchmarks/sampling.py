"""Cost of sampling: a batch of mixed requests, whole and by part, beside the model's decode step.

    python benchmarks/sampling.py

The logits are the default model's own, at the positions of a text, so they are as peaky as logits
are. A third of the rows is greedy; the others draw by temperature alone, top-k, top-p and min-p in
equal numbers. A quarter of all rows have penalties over a history of 500 tokens, a tenth a bias.
The parts are timed by rows that have nothing else, at full batch size. Rows with a JSON schema are
at different places of one output; half of the rows of the last part have one. Each time is the
least of several rounds: what else the machine does only adds.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import attrs
import numpy as np
import torch
import typer

from kvpage.blocks import PoolGeometry
from kvpage.grammar import Grammars, Matcher, StructuredOutputs
from kvpage.guided import LLGuidance
from kvpage.kernels import attention_backend, default_backend
from kvpage.kernels.work import AttentionBatch
from kvpage.logits import History, TokenRules
from kvpage.model import KVPools, PagedModel
from kvpage.pretrained import Pretrained, load_pretrained
from kvpage.sampling import SamplingParams, SamplingRows, sample, token_logprobs

TEXT = Path(__file__).parent.parent / "README.md"
CONTEXT_TOKENS = 64
"""Of each sequence in the decode step: few, so that the step is rather too fast than too slow."""

HISTORY_TOKENS = 500
Options = dict[str, Any]

GREEDY: Options = {"temperature": 0}
DRAWS: dict[str, Options] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
}
PENALTIES: Options = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
BIAS: Options = {"logit_bias": dict.fromkeys(range(100, 110), 1.5)}
SCHEMA: Options = {
    "structured_outputs": StructuredOutputs(
        json_schema={
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer"},
                "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
            },
            "required": ["name", "age", "tags"],
        }
    )
}
JSON_TEXT = '{"name": "Ada Lovelace of London", "age": 36, "tags": ["red", "blue", "green"]'


def mixed(row: int) -> SamplingParams:
    """The parameters of one row of the mixed batch."""
    draws = list(DRAWS.values())
    chosen = GREEDY if row % 3 == 0 else draws[(row // 3 * 2 + row % 3 - 1) % len(draws)]
    penalties = PENALTIES if row % 4 == 1 else {}
    bias = BIAS if row % 10 == 7 else {}
    return SamplingParams(seed=row, **chosen, **penalties, **bias)


@attrs.frozen
class Batch:
    """Rows to sample."""

    rows: SamplingRows
    indices: np.ndarray[Any, np.dtype[np.int64]]
    history: History | None

    @classmethod
    def of(cls, params: list[SamplingParams], vocabulary: int, outputs: "JsonOutputs") -> "Batch":
        rows = SamplingRows.empty(len(params))
        for row, of_row in enumerate(params):
            matcher = outputs.matcher(of_row, row)
            rows.put(row, of_row, of_row.seed or row, _rules(of_row), matcher)
        wanted = np.flatnonzero(rows.needs_history)
        shape = (len(wanted), HISTORY_TOKENS)
        tokens = np.random.default_rng(0).integers(0, vocabulary, shape).astype(np.int32)
        lengths = np.full(len(wanted), HISTORY_TOKENS)
        history = History(wanted, tokens, lengths // 2, lengths) if len(wanted) else None
        return cls(rows, np.arange(len(params)), history)

    def sample(self, logits: torch.Tensor) -> None:
        tokens = sample(logits, self.rows, self.indices, self.history)
        token_logprobs(logits, self.rows, tokens.cpu().numpy())


@attrs.frozen
class JsonOutputs:
    """Outputs by a schema, at every place of one text.

    Attributes:
        grammars: compiles the schema.
        token_ids: of the text.
    """

    grammars: Grammars
    token_ids: list[int]

    def matcher(self, params: SamplingParams, row: int) -> Matcher | None:
        """At a place of the row's own; None without a schema."""
        if params.structured_outputs is None:
            return None
        matcher = self.grammars.compile(params.structured_outputs)
        for token_id in self.token_ids[: row % len(self.token_ids)]:
            matcher.accept(token_id)
        assert matcher.failure is None
        return matcher


def _rules(params: SamplingParams) -> TokenRules | None:
    if not params.logit_bias:
        return None
    ids = np.fromiter(params.logit_bias.keys(), np.int64)
    values = np.fromiter(params.logit_bias.values(), np.float32)
    return TokenRules(ids, values, None, (), 0, np.empty(0, np.int64), ())


def batches(num_rows: int, vocabulary: int, outputs: JsonOutputs) -> dict[str, Batch]:
    """The mixed batch, and one for each part of it."""
    alike: dict[str, SamplingParams] = {
        "greedy": SamplingParams(**GREEDY),
        **{name: SamplingParams(**values) for name, values in DRAWS.items()},
        "greedy, penalties": SamplingParams(**GREEDY, **PENALTIES),
        "greedy, bias": SamplingParams(**GREEDY, **BIAS),
        "greedy, 5 log-probabilities": SamplingParams(**GREEDY, logprobs=5),
        "greedy, JSON schema": SamplingParams(**GREEDY, **SCHEMA),
        "temperature, JSON schema": SamplingParams(**DRAWS["temperature"], **SCHEMA),
    }
    every = {"mixed": [mixed(row) for row in range(num_rows)]}
    every |= {name: [params] * num_rows for name, params in alike.items()}
    half = [alike["greedy, JSON schema"], alike["greedy"]]
    every["greedy, half of them JSON schema"] = [half[row % 2] for row in range(num_rows)]
    return {name: Batch.of(params, vocabulary, outputs) for name, params in every.items()}


class Model:
    """The model over a pool of its own."""

    def __init__(self, model: PagedModel, num_seqs: int) -> None:
        self._model = model
        self._geometry = PoolGeometry(num_seqs * CONTEXT_TOKENS // 16, 16, CONTEXT_TOKENS)
        self._tables = np.arange(self._geometry.num_blocks, dtype=np.int32)
        backend = attention_backend(default_backend(model.device.type))
        self._pools = KVPools(
            model.layers,
            self._geometry.num_slots,
            backend,
            dtype=model.dtype,
            device=model.device,
        )
        for k_pool, v_pool in self._pools.layers:
            k_pool.zero_()
            v_pool.zero_()

    def logits_of(self, token_ids: list[int]) -> torch.Tensor:
        """Logits at every position of one text."""
        num_tokens = len(token_ids)
        table = self._tables[None]
        positions = np.arange(num_tokens)
        return self._run(table, num_tokens, num_tokens, np.array(token_ids), positions, positions)

    def decode(self, num_seqs: int) -> torch.Tensor:
        """One decode step of `num_seqs` sequences of `CONTEXT_TOKENS`."""
        tables = self._tables.reshape(num_seqs, -1)
        positions = np.full(num_seqs, CONTEXT_TOKENS - 1)
        slots = np.arange(1, num_seqs + 1) * CONTEXT_TOKENS - 1
        return self._run(tables, 1, CONTEXT_TOKENS, positions, positions, slots)

    def _run(
        self,
        tables: np.ndarray[Any, np.dtype[np.int32]],
        query_len: int,
        kv_len: int,
        *columns: np.ndarray[Any, Any],
    ) -> torch.Tensor:
        every = np.ones(len(tables), np.int32)
        rows = np.arange(len(tables), dtype=np.int32)
        batch = AttentionBatch(tables, rows, every * query_len, every * kv_len, 16)
        device = self._model.device
        token_ids, positions, slots = (torch.from_numpy(column).to(device) for column in columns)
        step = self._pools.step(batch, slots)
        keep = torch.arange(len(token_ids), device=device)
        return self._model.logits(token_ids, positions, step, keep)


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """The least of several rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, perf_counter() - start)
    return best * 1e3


def real_logits(loaded: Pretrained, model: Model, num_rows: int) -> torch.Tensor:
    """The model's logits at the first positions of a text: `[num_rows, vocabulary]`."""
    token_ids = loaded.tokenizer(TEXT.read_text())["input_ids"]
    return model.logits_of(token_ids[:num_rows])


def main(
    num_rows: Annotated[int, typer.Option(help="Rows of the batch.")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds to take the best of.")] = 7,
) -> None:
    loaded = load_pretrained()
    model = Model(loaded.model, num_rows)
    logits = real_logits(loaded, model, num_rows)
    logprobs = logits.float().log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    grammars = LLGuidance(loaded.tokenizer, logits.shape[1], loaded.model.eos_token_ids)
    outputs = JsonOutputs(grammars, loaded.tokenizer(JSON_TEXT)["input_ids"])
    every = batches(num_rows, logits.shape[1], outputs)
    step = milliseconds(partial(model.decode, num_rows), rounds)
    print(f"{loaded.name}: {len(logits)} rows, vocabulary {logits.shape[1]}, entropy of the")
    print(f"logits {entropy.mean():.1f} nats on average, {entropy.max():.1f} at most")
    print(f"the model's step: {step:.0f} ms\n")
    print("| rows | ms | of the model's step |")
    print("|---|---|---|")
    for name, batch in every.items():
        batch.sample(logits)
        cost = milliseconds(partial(batch.sample, logits), rounds)
        print(f"| {name} | {cost:.1f} | {cost / step:.1%} |")


if __name__ == "__main__":
    typer.run(main)
