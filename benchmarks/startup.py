"""From the start of a process to the first token, part by part, in fresh processes.

    python benchmarks/startup.py                   # the default model
    python benchmarks/startup.py --weights int8

A first process, which is not counted, converts and compiles whatever is not in its cache yet. Shown
are the medians of the others, and beside them what importing torch and transformers takes in a
process that does nothing else.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Annotated

import typer

PARTS = ("interpreter and imports", "model", "engine", "first token")
STARTED = "KVPAGE_STARTED"
IMPORTS = "import torch, transformers.models.llama.modeling_llama, transformers.generation"


def child(weights: str | None) -> None:
    """Print the seconds since the parent started this process, after each part."""
    marks = [float(os.environ[STARTED])]
    from kvpage.imports import import_model_libraries

    import_model_libraries()
    import kvpage
    from kvpage.pretrained import load_pretrained

    marks.append(time.time())
    loaded = load_pretrained(weights=weights)
    marks.append(time.time())

    async def first_token() -> None:
        async with kvpage.AsyncEngine.from_loaded(loaded) as engine:
            marks.append(time.time())
            async for _ in engine.generate("Once upon a time"):
                marks.append(time.time())
                break

    asyncio.run(first_token())
    print(json.dumps([after - before for before, after in pairwise(marks)]))


def run(*arguments: str) -> str:
    environ = os.environ | {STARTED: str(time.time())}
    return subprocess.check_output([sys.executable, *arguments], env=environ, text=True)


def main(
    weights: Annotated[str | None, typer.Option(help="'int8', or left out.")] = None,
    runs: Annotated[int, typer.Option(help="Processes that count.")] = 5,
    is_child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    """Print seconds."""
    if is_child:
        child(weights)
        return
    options = ["--weights", weights] if weights else []
    found, imports = [], []
    for number in range(runs + 1):
        seconds = json.loads(run(__file__, "--child", *options))
        started = time.perf_counter()
        run("-c", IMPORTS)
        if number:
            found.append(seconds)
            imports.append(time.perf_counter() - started)
    medians = [statistics.median(of_part) for of_part in zip(*found, strict=True)]
    shown = ", ".join(f"{name} {s:.1f}" for name, s in zip(PARTS, medians, strict=True))
    total = statistics.median(sum(each) for each in found)
    print(f"first token after {total:.1f} s: {shown}")
    print(f"importing torch and transformers and nothing else: {statistics.median(imports):.1f} s")


if __name__ == "__main__":
    typer.run(main)
