"""vLLM's CPU build; `run.py` sets its environment (both cores, memory of the cache)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm import LLM, SamplingParams
from workloads import Request


@contextmanager
def engine(model: str) -> Iterator[Callable[[list[Request]], int]]:
    """A loaded engine; see `kvpage_engine.engine`."""
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=8192,
        max_num_seqs=64,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def generate(requests: list[Request]) -> int:
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt} for request in requests],
            [
                SamplingParams(temperature=0, max_tokens=request.num_tokens, ignore_eos=True)
                for request in requests
            ],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    yield generate
