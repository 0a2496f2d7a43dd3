"""OpenVINO GenAI's continuous batching; the model folder is its own export, fp32 or int8."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import openvino
import openvino_genai
from workloads import Request


@contextmanager
def engine(model: str) -> Iterator[Callable[[list[Request]], int]]:
    """A pipeline; see `kvpage_engine.engine`."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    # An int8 model runs at OpenVINO's own defaults, which keep the cache in 8 bits too.
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        model, scheduler, "CPU", exact if model.endswith("fp32") else {}, {}
    )

    def generate(requests: list[Request]) -> int:
        handles = [
            pipeline.add_request(
                index, openvino.Tensor(np.array([request.prompt])), _config(request)
            )
            for index, request in enumerate(requests)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return sum(len(handle.read_all()[0].generated_ids) for handle in handles)

    yield generate


def _config(request: Request) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = request.num_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config
