"""Options that several commands take, each with the same words."""

from pathlib import Path
from typing import Annotated

import typer

from kvpage.errors import ConfigError
from kvpage.simulator import WORKLOADS

MODEL_HELP = "Hub id, folder or .gguf file. [default: SmolLM2-135M-Instruct]"

Model = Annotated[str | None, typer.Option(help=MODEL_HELP)]
Allocator = Annotated[str, typer.Option(help="A strategy's name, or name:key=value,... ")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens per block. [default: 16]")]
KVMemory = Annotated[str | None, typer.Option(help="Like 512MiB, '2048 blocks' or '32768 tokens'.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence, in tokens.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Sequences that run at once.")]
MaxBatchTokens = Annotated[int, typer.Option(help="Tokens per step.")]
Dtype = Annotated[str | None, typer.Option(help="Of the weights, like bfloat16.")]
Weights = Annotated[str | None, typer.Option(help="int8 rounds them to one byte, on CPUs.")]
KVDtype = Annotated[
    str,
    typer.Option("--kv-dtype", "--kv-cache-dtype", help="How K and V are stored, like bfloat16."),
]
Device = Annotated[str | None, typer.Option(help="Like cpu or cuda:0.")]

# -- of commands that try several candidates on a workload ------------------------------------

Trace = Annotated[
    Path | None, typer.Argument(help="CSV or JSON lines, as `kvpage simulate` reads.")
]
Workload = Annotated[
    str | None, typer.Option(help=f"Draw requests: {', '.join(WORKLOADS)}. [default: chat]")
]
HashBlockSize = Annotated[int, typer.Option(help="Tokens per hash id in the trace.")]
Allocators = Annotated[
    list[str] | None,
    typer.Option(help="name or name:key=value,... [default: fixed, dynamic, contiguous]"),
]
BlockSizes = Annotated[
    list[int] | None, typer.Option(help="Tokens per block. [default: 8, 16, 32, 64]")
]
Seed = Annotated[int, typer.Option(help="Of drawn requests and of prompts.")]


def one_workload(trace: Path | None, workload: str | None) -> Path | str:
    """The trace, or the name of the workload to draw.

    Raises:
        ConfigError: both are given.
    """
    if trace is not None and workload is not None:
        raise ConfigError("give a TRACE or a --workload, not both")
    return trace or workload or "chat"
