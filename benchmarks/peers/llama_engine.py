"""llama.cpp through llama-cpp-python's low-level calls: it has no batching of its own.

The model is a `.gguf` file; `environments.py` makes float32 and 8-bit ones.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import llama_cpp
import numpy as np
from workloads import Request

BATCH = 4096


@contextmanager
def engine(model: str) -> Iterator[Callable[[list[Request]], int]]:
    """A loaded model; see `kvpage_engine.engine`."""
    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    loaded = llama_cpp.llama_model_load_from_file(
        model.encode(), llama_cpp.llama_model_default_params()
    )
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
    yield lambda requests: _generate(loaded, batch, requests)


def _context(model: object, requests: list[Request]) -> object:
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = sum(len(r.prompt) + r.num_tokens for r in requests) + 1024
    settings.n_batch, settings.n_ubatch = BATCH, 512
    settings.n_seq_max = len(requests)
    settings.n_threads = settings.n_threads_batch = 2
    settings.kv_unified = True
    return llama_cpp.llama_init_from_model(model, settings)


def _generate(model: object, batch: object, requests: list[Request]) -> int:
    context = _context(model, requests)
    num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def put(place: int, token: int, position: int, sequence: int, wanted: bool) -> None:
        batch.token[place] = token
        batch.pos[place] = position
        batch.n_seq_id[place] = 1
        batch.seq_id[place][0] = sequence
        batch.logits[place] = wanted

    def best(place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, place)
        return int(np.ctypeslib.as_array(logits, (num_vocab,)).argmax())

    def decode(num_tokens: int) -> None:
        batch.n_tokens = num_tokens
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    last = []
    for sequence, request in enumerate(requests):
        for position, token in enumerate(request.prompt):
            put(position, token, position, sequence, position == len(request.prompt) - 1)
        decode(len(request.prompt))
        last.append(best(-1))
    made = [1] * len(requests)
    while running := [s for s, r in enumerate(requests) if made[s] < r.num_tokens]:
        for place, sequence in enumerate(running):
            position = len(requests[sequence].prompt) + made[sequence] - 1
            put(place, last[sequence], position, sequence, True)
        decode(len(running))
        for place, sequence in enumerate(running):
            last[sequence] = best(place)
            made[sequence] += 1
    llama_cpp.llama_free(context)
    return sum(made)
