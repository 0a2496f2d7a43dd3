"""What weights in one byte cost: likelihood of a text, and agreement of the next token.

    python benchmarks/quantisation.py

The text is what the modules of the standard library say of themselves. Each model reads it in
windows; the mean log-likelihood of a token gives the perplexity. The likeliest next token of both
models is compared at every place.
"""

import importlib
import io
import math
import warnings
from contextlib import redirect_stdout
from typing import Annotated, Any

import numpy as np
import torch
import typer

from kvpage.kernels import attention_backend
from kvpage.kernels.work import AttentionBatch
from kvpage.model import KVPools
from kvpage.pretrained import load_pretrained

MODULES = (
    "argparse", "asyncio", "bisect", "calendar", "collections", "concurrent.futures", "copy", "csv",
    "dataclasses", "datetime", "decimal", "difflib", "doctest", "email", "enum", "fractions",
    "functools", "gettext", "hashlib", "heapq", "hmac", "http.server", "imaplib", "inspect",
    "itertools", "json", "locale", "logging", "multiprocessing", "optparse", "os", "pathlib",
    "pickle", "pickletools", "plistlib", "pprint", "profile", "queue", "random", "re", "sched",
    "secrets", "shelve", "shlex", "smtplib", "socket", "socketserver", "sqlite3", "ssl",
    "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit",
    "tokenize", "turtle", "typing", "unittest", "urllib.parse", "urllib.request", "uuid",
    "warnings", "weakref", "xml.etree.ElementTree", "zipfile",
)  # fmt: skip


def text() -> str:
    """Docstrings of modules, one after the other."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        found = []
        for name in MODULES:
            try:
                found.append(importlib.import_module(name).__doc__ or "")
            except ImportError:  # not part of every build of Python
                continue
    return "\n\n".join(found)


def logits_of(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """`float32[T, vocabulary]` of one sequence from its start."""
    length = len(token_ids)
    every = torch.arange(length)
    one = np.array([length], np.int32)
    table = np.zeros((1, 1), np.int32)
    pools = KVPools(model.layers, length, attention_backend("numba"), dtype=model.dtype,
                    device=model.device)  # fmt: skip
    batch = AttentionBatch(table, np.zeros(1, np.int32), one, one, length)
    logits: torch.Tensor = model.logits(token_ids, every, pools.step(batch, every), every)
    return logits


def main(
    tokens: Annotated[int, typer.Option(help="How much of the text, in tokens.")] = 8192,
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
) -> None:
    """Print perplexities and the share of equal next tokens."""
    exact, rounded = load_pretrained(), load_pretrained(weights="int8")
    ids = torch.tensor(exact.tokenizer(text())["input_ids"])[:tokens]
    likelihoods: dict[str, list[float]] = {"float32": [], "int8": []}
    equal = 0
    for start in range(0, len(ids) - 1, window):
        part = ids[start : start + window]
        choices = []
        for name, loaded in (("float32", exact), ("int8", rounded)):
            logits = logits_of(loaded.model, part)
            own = logits.log_softmax(-1)[:-1].gather(1, part[1:, None])
            likelihoods[name] += own.squeeze(1).tolist()
            choices.append(logits.argmax(-1))
        equal += int((choices[0] == choices[1]).sum())
    for name, found in likelihoods.items():
        print(f"{name:8} perplexity {math.exp(-np.mean(found)):.3f}")
    print(f"the same next token at {equal / len(ids):.1%} of {len(ids)} places")


if __name__ == "__main__":
    typer.run(main)
