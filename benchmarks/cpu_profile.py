"""Where the time of a step goes on a CPU, and what fusing and packing give.

    python benchmarks/cpu_profile.py                  # steps of 1, 16 and 64 decoding sequences
    python benchmarks/cpu_profile.py --rows 512 --weights int8

The same weights three times: as transformers computes them, with packed linear layers, and as
kvpage serves them. All three take the same steps in turn, so that a ratio holds on a busy machine;
the best step of each counts. Then the parts of a step as kvpage serves it, and the time that one
read of all weights takes, which no step with few rows can beat.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM

from kvpage.attention import ATTENTION_NAME, register_attention
from kvpage.blocks import PoolGeometry
from kvpage.fusion import RMSNorm
from kvpage.kernels import cpu, cpu_rows
from kvpage.model import PagedModel
from kvpage.packed_linear import PackedLinear, pack_linears
from kvpage.plan import StepPlan
from kvpage.pretrained import load_pretrained
from kvpage.quantised_linear import QuantisedLinear
from kvpage.runner import ModelRunner
from kvpage.sampling import SamplingRows

PASSES = {cpu_rows.PRODUCT: "linear layers", cpu_rows.NORM: "norms"}
"""Of a layer's program, which the parts are timed in one by one."""

CONTEXT_TOKENS = 200
BLOCK_SIZE = 16
FORMS = ("plain", "packed", "served")


def load(weights: str | None) -> dict[str, PagedModel]:
    """The default model in the three forms."""
    served = load_pretrained(weights=weights)  # type: ignore[arg-type]

    def plain() -> PagedModel:
        return PagedModel(
            AutoModelForCausalLM.from_pretrained(
                served.tokenizer.name_or_path,
                dtype=torch.float32,
                attn_implementation=ATTENTION_NAME,
            )
        )

    register_attention()
    models = (plain(), plain(), served.model)
    pack_linears(models[1].module)
    return dict(zip(FORMS, models, strict=True))


def decode_step(rows: int) -> StepPlan:
    """One token for each of so many sequences."""
    blocks = CONTEXT_TOKENS // BLOCK_SIZE + 1
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    last = CONTEXT_TOKENS - 1
    every = np.arange(rows)
    return StepPlan(
        rows=every.astype(np.int32),
        query_lens=np.ones(rows, np.int32),
        kv_lens=np.full(rows, CONTEXT_TOKENS, np.int32),
        token_ids=every + 100,
        positions=np.full(rows, last),
        slots=tables[:, last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE,
        block_tables=tables,
        copies=np.empty((0, 2), np.int64),
        sample_tokens=every,
        sample_rows=every,
        sample_indices=np.zeros(rows, np.int64),
        sampling=SamplingRows.empty(rows),
    )


def seconds(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started


@contextmanager
def timed(totals: dict[str, float]) -> Iterator[None]:
    """Add up the time spent in linear layers, attention, and what lies between products."""
    kinds: Sequence[tuple[str, Any, str]] = (
        ("linear", PackedLinear, "forward"),
        ("linear", QuantisedLinear, "forward"),
        ("attention", cpu, "paged_attention"),
        ("norms", RMSNorm, "forward"),
        ("gates", cpu_rows, "silu_gate"),
        ("rotations", cpu_rows, "rotate"),
        ("writes", cpu_rows, "write"),
    )

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            result = function(*args, **kwargs)
            totals[kind] = totals.get(kind, 0.0) + perf_counter() - started
            return result

        return call

    def pass_by_pass(program: cpu_rows.Program, num_rows: int) -> None:
        for job in program.jobs:
            job.next_item = 0
            cpu_rows.set_rows(job, num_rows)
            counted(PASSES.get(job.operation, "other passes"), cpu_rows._run)(job)

    apart = (
        (cpu, "compute_layers", lambda *_, **__: None),
        (cpu_rows.Program, "run", pass_by_pass),
    )
    originals = [
        (owner, name, getattr(owner, name))
        for owner, name in [*(kind[1:] for kind in kinds), *(each[:2] for each in apart)]
    ]

    for kind, owner, name in kinds:
        setattr(owner, name, counted(kind, getattr(owner, name)))
    for owner, name, replacement in apart:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def parts(make_runner: Callable[[], ModelRunner], plan: StepPlan, steps: int) -> dict[str, float]:
    """Seconds of the best step by part."""
    best: dict[str, float] = {"all": math.inf}
    totals: dict[str, float] = {}
    with timed(totals):
        runner = make_runner()  # it takes the functions as they are now
        for _ in range(steps):
            totals.clear()
            whole = seconds(lambda: runner.execute(plan))
            if whole < best["all"]:
                best = {"all": whole, **totals, "the rest": whole - sum(totals.values())}
    return best


def read_seconds(num_bytes: int) -> float:
    """One pass over so much memory, on all threads of torch."""
    memory = torch.ones(num_bytes // 4)
    return min(seconds(memory.sum) for _ in range(7))


def main(
    rows: Annotated[list[int], typer.Option(help="Sequences of a step.")] = [1, 16, 64],  # noqa: B006
    weights: Annotated[str | None, typer.Option(help="'int8', or left out.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each form.")] = 12,
) -> None:
    """Print milliseconds per step."""
    geometry = PoolGeometry(max(rows) * (CONTEXT_TOKENS // BLOCK_SIZE + 1), BLOCK_SIZE, 1024)
    models = load(weights)
    runners = {form: ModelRunner(model, geometry, "numba") for form, model in models.items()}
    num_weights = sum(p.numel() for p in models["plain"].module.parameters())
    num_bytes = num_weights * (1 if weights == "int8" else 4)
    print(f"{torch.get_num_threads()} threads; one read of all weights: "
          f"{read_seconds(num_bytes) * 1e3:.1f} ms")  # fmt: skip
    for num_rows in rows:
        plan = decode_step(num_rows)
        best = dict.fromkeys(FORMS, math.inf)
        for _ in range(steps):
            for form, runner in runners.items():
                best[form] = min(best[form], seconds(lambda: runner.execute(plan)))  # noqa: B023
        print(f"\n{num_rows} rows: " + ", ".join(f"{f} {s * 1e3:.1f}" for f, s in best.items()))
        found = parts(lambda: ModelRunner(models["served"], geometry, "numba"), plan, steps)
        print("   " + ", ".join(f"{part} {s * 1e3:.2f}" for part, s in found.items()))


if __name__ == "__main__":
    typer.run(main)
