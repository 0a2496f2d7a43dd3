"""Executes step plans on a model: copy, compute, sample."""

import logging
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvpage.adapters import AdaptedTokens
from kvpage.blocks import PoolGeometry
from kvpage.host_pools import HostPools
from kvpage.kernels import BackendName, attention_backend
from kvpage.kernels.graphs import DecodeGraphs, DecodeInputs, DecodeLimits, DecodeStep, Recorder
from kvpage.kernels.work import AttentionBatch
from kvpage.model import KVPools, PagedModel
from kvpage.plan import StepPlan, StepResult
from kvpage.sampling import (
    SamplingRows,
    failures,
    logprobs_of,
    process,
    sample,
    token_logprobs,
)

logger = logging.getLogger("kvpage")

WARM_UP_TOKENS = 8
"""Enough for a chunk to take the kernels' way for chunks."""

SHARED_TABLES = 4
"""Decode steps whose tables are longer than so many pools together run without a graph."""


@attrs.frozen
class GraphOptions:
    """How decode steps are captured.

    Attributes:
        max_sequences: the largest step to capture.
        make_recorder: what captures; `CudaRecorder` on a GPU.
    """

    max_sequences: int
    make_recorder: Callable[[], Recorder]


class ModelRunner:
    """Runs a `PagedModel` over pools of its own. Used from one thread.

    Args:
        model: the model.
        geometry: blocks to make room for.
        backend: which attention kernels.
        kv_dtype: how K and V are stored; None is as the model computes them.
        graphs: captures decode steps for quick replay; None runs every step as it comes.
        num_swap_blocks: host blocks to make room for.
    """

    def __init__(
        self,
        model: PagedModel,
        geometry: PoolGeometry,
        backend: BackendName,
        *,
        kv_dtype: torch.dtype | None = None,
        graphs: GraphOptions | None = None,
        num_swap_blocks: int = 0,
    ) -> None:
        self._model = model
        self._geometry = geometry
        self._graph_options = graphs
        self._graphs: DecodeGraphs | None = None
        self._pools = KVPools(
            model.layers,
            geometry.num_slots,
            attention_backend(backend),
            dtype=kv_dtype or model.dtype,
            device=model.device,
        )
        self._host_pools = HostPools(self._pools, num_swap_blocks, geometry.block_size)

    def warm_up(self) -> None:
        """Compile what is compiled at the first use, then capture graphs.

        Runs a decode step and a chunk, and on a GPU one sequence long enough that its keys are
        split. Call it before the first step: it writes to the first blocks of the pool.
        """
        longest = min(self._geometry.max_model_len, self._geometry.num_slots)
        sizes = {1, WARM_UP_TOKENS, self._split_keys + 1} if self._on_gpu else {1, WARM_UP_TOKENS}
        for num_tokens in sorted(min(size, longest) for size in sizes):
            self.execute(first_tokens(num_tokens, self._geometry.block_size))
            self.execute(first_tokens(num_tokens, self._geometry.block_size, num_queries=1))
        if self._graph_options is not None:
            self._graphs = self._captured(self._graph_options)

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Runner.execute`."""
        block_size = self._geometry.block_size
        if len(plan.swap_outs):
            self._host_pools.swap_out(plan.swap_outs)
        if len(plan.copies):
            self._pools.copy_blocks(self._upload(plan.copies), block_size)
        if len(plan.swap_ins):
            self._host_pools.swap_in(plan.swap_ins)
        batch = AttentionBatch(
            plan.block_tables, plan.rows, plan.query_lens, plan.kv_lens, block_size
        )
        logits = self._replayed(plan, batch)
        if logits is None:
            logits = self._computed(plan, batch)
        return _result(logits, plan)

    def poison(self, blocks: npt.NDArray[np.int64]) -> None:
        """See `Poisonable.poison`: NaN, which no softmax swallows."""
        self._pools.poison(self._upload(blocks), self._geometry.block_size)

    def close(self) -> None:
        """Drop pools and model; on a GPU their memory goes back to the device."""
        on_gpu = self._on_gpu
        del self._graphs, self._host_pools, self._pools, self._model
        if on_gpu:
            torch.cuda.empty_cache()

    @property
    def _on_gpu(self) -> bool:
        return self._model.device.type == "cuda"

    @property
    def _split_keys(self) -> int:
        """Keys at which a decoding sequence is cut into parallel parts, in the finest layer."""
        from kvpage.kernels.paged_attention import decode_split

        return decode_split(min(shape.group_size for shape in self._model.layers))

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """To the device; from pinned memory, a copy that the host does not wait for."""
        tensor = torch.from_numpy(array)
        if not self._on_gpu:
            return tensor
        return tensor.pin_memory().to(self._model.device, non_blocking=True)

    def _computed(self, plan: StepPlan, batch: AttentionBatch) -> torch.Tensor:
        """Logits of the step's kept tokens, kernel by kernel."""
        return self._model.logits(
            self._upload(plan.token_ids),
            self._upload(plan.positions),
            self._pools.step(batch, self._upload(plan.slots)),
            None if _keeps_all(plan) else self._upload(_kept_tokens(plan)),
            self._adapted(plan),
        )

    def _adapted(self, plan: StepPlan) -> AdaptedTokens | None:
        if plan.adapters is None:
            return None
        return AdaptedTokens.of(plan.adapters, plan.query_lens, self._model.device)

    def _replayed(self, plan: StepPlan, batch: AttentionBatch) -> torch.Tensor | None:
        """The same from a captured graph; None unless the step is pure decoding and fits one.

        A graph repeats what it captured, so it knows no adapters.
        """
        decodes = len(plan.token_ids) == len(plan.rows)
        if self._graphs is None or not decodes or plan.adapters is not None:
            return None
        step = DecodeStep(plan.token_ids, plan.positions, plan.slots, batch)
        logits = self._graphs.run(step)
        return None if logits is None else logits[self._upload(_kept_tokens(plan))]

    def _captured(self, options: GraphOptions) -> DecodeGraphs | None:
        """Graphs for every batch size; None if the model cannot be captured."""
        geometry = self._geometry
        blocks_per_sequence = geometry.blocks_for(geometry.max_model_len)
        limits = DecodeLimits(
            max_sequences=options.max_sequences,
            max_model_len=geometry.max_model_len,
            block_size=geometry.block_size,
            split=self._split_keys,
            # Sequences may share blocks, so their tables together may be longer than the pool.
            table_entries=min(
                options.max_sequences * blocks_per_sequence, SHARED_TABLES * geometry.num_blocks
            ),
        )
        try:
            return DecodeGraphs(self._decode, limits, options.make_recorder(), self._model.device)
        except RuntimeError as error:  # a family whose forward pass waits for the device
            logger.warning("decode steps run without graphs: %s", error)
            return None

    def _decode(self, inputs: DecodeInputs) -> torch.Tensor:
        """What a graph repeats: logits of all tokens of a decode step."""
        every = torch.arange(len(inputs.token_ids), device=self._model.device)
        step = self._pools.step(inputs.batch, inputs.slots)
        return self._model.logits(inputs.token_ids, inputs.positions, step, every)


def _keeps_all(plan: StepPlan) -> bool:
    """Whether each token of the step is one to sample from, as in pure decoding."""
    return plan.prompt_scores is None and len(plan.sample_tokens) == len(plan.token_ids)


def _kept_tokens(plan: StepPlan) -> npt.NDArray[np.int64]:
    """Which tokens of the step give logits: those to sample from, then those of prompts."""
    if plan.prompt_scores is None:
        return plan.sample_tokens
    return np.concatenate([plan.sample_tokens, plan.prompt_scores.tokens])


def _result(logits: torch.Tensor, plan: StepPlan) -> StepResult:
    """Sample and score: `logits` `[n, vocabulary]` are of the step's `_kept_tokens`."""
    scores, num_samples = plan.prompt_scores, len(plan.sample_tokens)
    to_sample, of_prompts = logits[:num_samples], logits[num_samples:]
    processed, raised = process(to_sample, plan.sampling, plan.history)
    tokens = sample(processed, plan.sampling, plan.sample_indices, plan.history)
    token_ids = tokens.cpu().numpy()
    return StepResult(
        token_ids,
        logprobs=token_logprobs(to_sample, plan.sampling, token_ids),
        prompt_logprobs=logprobs_of(of_prompts, scores.token_ids, scores.num_top) if scores else (),
        failures=failures(token_ids, plan.sampling, raised),
    )


def first_tokens(num_tokens: int, block_size: int, *, num_queries: int | None = None) -> StepPlan:
    """A step over the last `num_queries` (None: all) of the first tokens of a sequence.

    The sequence holds the first blocks of the pool in order.
    """
    num_queries = num_tokens if num_queries is None else num_queries
    one = np.ones(1, np.int32)
    positions = np.arange(num_tokens - num_queries, num_tokens)
    return StepPlan(
        rows=np.zeros(1, np.int32),
        query_lens=one * num_queries,
        kv_lens=one * num_tokens,
        token_ids=np.zeros(num_queries, np.int64),
        positions=positions,
        slots=positions,
        block_tables=np.arange(-(-num_tokens // block_size), dtype=np.int32)[None],
        copies=np.empty((0, 2), np.int64),
        sample_tokens=np.array([num_queries - 1]),
        sample_rows=np.zeros(1, np.int64),
        sample_indices=np.zeros(1, np.int64),
        sampling=SamplingRows.empty(1),
    )
