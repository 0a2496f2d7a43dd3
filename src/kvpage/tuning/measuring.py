"""Finalists end to end: a real engine, real steps, the requests of the workload."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio.to_thread
import attrs

from kvpage.blocks import PoolGeometry
from kvpage.comparison.engines import EngineSource, SharedModel
from kvpage.comparison.measuring import Job, measure
from kvpage.comparison.workload import Workload
from kvpage.config import default_cpu_kv_bytes
from kvpage.plan import Runner
from kvpage.tuning.calibration import DECODE_ROWS, calibrate
from kvpage.tuning.candidates import Candidate
from kvpage.tuning.cost import MachineCost

Measure = Callable[[Candidate, Workload], Awaitable[float]]
"""Sends the requests through an engine with these settings; gives output tokens a second."""


POOL_TOKENS = 8192
"""Slots of the pools that steps are measured in, where there is memory for them."""


@attrs.frozen(eq=False)
class EndToEnd:
    """A `Measure` over one loaded model; all requests are sent at once."""

    source: EngineSource
    max_model_len: int
    seed: int

    async def __call__(self, candidate: Candidate, workload: Workload) -> float:
        """See `Measure`."""
        job = Job(
            prompts=workload.prompts(self.source.vocab_size, self.seed),
            output_tokens=[request.output_tokens for request in workload.requests],
            delays_s=[0.0] * len(workload.requests),
        )
        settings = candidate.settings() | {"max_model_len": self.max_model_len}
        open_engine = partial(self.source.open, **settings)
        async with await anyio.to_thread.run_sync(open_engine) as engine:
            run = await measure(
                engine, job, lambda *_: None, token_bytes=self.source.bytes_per_token
            )
        return run.throughput


def measured_cost(
    source: SharedModel,
    block_sizes: Sequence[int],
    progress: Callable[[str], None],
    *,
    kv_bytes: int,
) -> MachineCost:
    """Measure what steps of the model cost on this machine; see `calibrate`. Blocks."""
    model = source.loaded.model
    return calibrate(
        partial(_runner, source),
        block_sizes=block_sizes,
        bytes_per_token=model.bytes_per_token,
        max_model_len=model.max_len,
        num_tokens=min(POOL_TOKENS, kv_bytes // model.bytes_per_token),
        progress=progress,
    )


def _runner(source: SharedModel, geometry: PoolGeometry) -> Runner:
    """A runner as an engine would make it, with graphs where it would have them."""
    from kvpage.kernels import default_backend
    from kvpage.kernels.graphs import CudaRecorder
    from kvpage.runner import GraphOptions, ModelRunner

    model = source.loaded.model
    on_gpu = model.device.type == "cuda"
    graphs = GraphOptions(max(DECODE_ROWS), CudaRecorder) if on_gpu else None
    runner = ModelRunner(model, geometry, default_backend(model.device.type), graphs=graphs)
    runner.warm_up()
    return runner


def default_kv_bytes(source: SharedModel, *, max_batch_tokens: int, max_num_seqs: int) -> int:
    """What an engine takes for K and V by itself, with room for the largest step to try."""
    if source.loaded.model.device.type != "cuda":
        return default_cpu_kv_bytes()
    from kvpage.gpu_memory import gpu_kv_bytes

    return gpu_kv_bytes(
        source.loaded.model, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs
    )
