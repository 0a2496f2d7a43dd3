"""From the start of a process to the first token, part by part, in fresh processes.

    python benchmarks/startup.py                   # the default model
    python benchmarks/startup.py --weights int8

Processes that find the model kept ready and processes that build it anew come in turn; medians of
each are shown, and beside them what importing torch and transformers takes in a process that does
nothing else. A first process, which is not counted, converts, compiles and keeps.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Annotated, Any

import typer

PARTS = ("kvpage imported", "model", "engine", "first token")
STARTED = "KVPAGE_STARTED"
IMPORTS = "import torch, transformers.models.llama.modeling_llama, transformers.generation"


def child(weights: Any, *, builds: bool) -> None:
    """Print the seconds since the parent started this process, after each part."""
    marks = [float(os.environ[STARTED])]
    import kvpage
    from kvpage.model_cache import CacheEntry
    from kvpage.pretrained import load_pretrained

    if builds:
        CacheEntry.begin_reading = lambda _: None  # type: ignore[method-assign]
        CacheEntry.keep = lambda *_: None  # type: ignore[method-assign]
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


def show(name: str, found: list[list[float]]) -> None:
    medians = [statistics.median(of_part) for of_part in zip(*found, strict=True)]
    shown = ", ".join(f"{part} {s:.1f}" for part, s in zip(PARTS, medians, strict=True))
    print(f"{name}: first token after {statistics.median(map(sum, found)):.1f} s: {shown}")


def main(
    weights: Annotated[str | None, typer.Option(help="'int8', or left out.")] = None,
    runs: Annotated[int, typer.Option(help="Processes of each kind that count.")] = 5,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print seconds."""
    if part is not None:
        child(weights, builds=part == "build")
        return
    options = ["--weights", weights] if weights else []
    run(__file__, "--part", "restore", *options)
    found: dict[str, list[list[float]]] = {"restore": [], "build": []}
    imports = []
    for _ in range(runs):
        for kind, of_kind in found.items():
            of_kind.append(json.loads(run(__file__, "--part", kind, *options)))
        started = time.perf_counter()
        run("-c", IMPORTS)
        imports.append(time.perf_counter() - started)
    show("kept ready", found["restore"])
    show("built anew", found["build"])
    print(f"importing torch and transformers and nothing else: {statistics.median(imports):.1f} s")


if __name__ == "__main__":
    typer.run(main)
