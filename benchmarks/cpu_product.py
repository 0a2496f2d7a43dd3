"""Linear layers alone on a CPU: our panels beside oneDNN's packed layout and torch's own.

    python benchmarks/cpu_product.py
    python benchmarks/cpu_product.py --rows 1,64

The layers of SmolLM2, many of each shape, so that weights come from memory as they do in a model.
All three take turns; the best of each counts. Rates are of the machine: gigabytes of weights a
second, and float32 operations.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Annotated

import torch
import typer

from kvpage.packed_linear import PackedLinear, PanelLinear

SHAPES = {"qkv": (576, 960), "out": (576, 576), "gate_up": (576, 3072), "down": (1536, 576)}
"""Inputs and outputs."""

LAYERS = 24
SECONDS = 4.0


def times(calls: list[Callable[[], None]]) -> list[float]:
    """The best time of each, in turn."""
    best = [float("inf")] * len(calls)
    began = perf_counter()
    while perf_counter() - began < SECONDS:
        for index, call in enumerate(calls):
            started = perf_counter()
            call()
            best[index] = min(best[index], perf_counter() - started)
    return best


@torch.inference_mode()
def compare(name: str, rows: int) -> None:
    """Print one line."""
    inputs, outputs = SHAPES[name]
    plain = [torch.nn.Linear(inputs, outputs, bias=False) for _ in range(LAYERS)]
    forms = [plain, [PackedLinear(each) for each in plain], [PanelLinear(each) for each in plain]]
    x = torch.randn(rows, inputs)

    def call(layers: list[torch.nn.Module]) -> Callable[[], None]:
        def run() -> None:
            for layer in layers:
                layer(x)

        return run

    torch_s, packed_s, panels_s = (best / LAYERS for best in times([call(f) for f in forms]))
    weights = inputs * outputs
    print(
        f"{name:8} {rows:4} rows: torch {torch_s * 1e6:7.0f} us, oneDNN packed "
        f"{packed_s * 1e6:7.0f} us, panels {panels_s * 1e6:7.0f} us "
        f"({4 * weights / panels_s / 1e9:5.1f} GB/s, {2 * rows * weights / panels_s / 1e9:4.0f} "
        f"GFLOP/s); panels are {packed_s / panels_s:.2f} x packed",
        flush=True,
    )


def main(rows: Annotated[str, typer.Option(help="Comma-separated.")] = "1,4,16,64,512") -> None:
    """Compare every shape at every number of rows."""
    for name in SHAPES:
        for count in rows.split(","):
            compare(name, int(count))


if __name__ == "__main__":
    typer.run(main)
