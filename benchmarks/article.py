"""Every figure that is often told of paged KV memory and can be checked, checked.

    python benchmarks/article.py                    # all of it; 15 quiet minutes on two cores
    python benchmarks/article.py --only simulated   # exact anywhere, a minute
    python benchmarks/article.py --only measured    # what takes a clock
    python benchmarks/article.py --only measured --model MODEL --device cuda --seconds 600

It rewrites the tables and pictures of `docs/explanation/block-size.md` in place, each between its
markers; `--page` names another page.
"""

import asyncio
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import attrs
import numpy as np
import torch
import typer
from matplotlib import rc_context
from matplotlib.figure import Figure

import kvpage
from kvpage.kernels import attention_backend, default_backend
from kvpage.kernels.work import AttentionBatch
from kvpage.simulator import DrawnTrace, Replay, ReplaySettings, Report, TraceRequest

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "block-size.md"
SIZES = (8, 16, 32, 64)
KERNEL_SIZES = (1, 2, 4, 8, 16, 32, 64)
WORKLOADS = ("chat", "code", "summarise", "reasoning")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito's, for any eye


@attrs.frozen
class Shape:
    """What decides how much K and V a token has."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes


SHAPES = (
    Shape("Qwen2.5 0.5B", 24, 2, 64),
    Shape("SmolLM2 135M, float32", 30, 3, 64, 4),
    Shape("Llama 3.1 8B", 32, 8, 128),
    Shape("Llama 2 7B", 32, 32, 128),
)


# -- exact anywhere ------------------------------------------------------------------------------


def utilisation(page: "Page") -> None:
    """Rows of 2,048, exact rows, and paging, on four workloads."""
    settings = ReplaySettings(slots=50_000, max_model_len=2048)
    strategies = {
        "rows of 2,048": "contiguous",
        "rows of the exact length": "contiguous:reserve=request",
        "blocks of 16": "fixed:block_size=16",
    }
    found: dict[str, list[float]] = {name: [] for name in strategies}
    for workload in WORKLOADS:
        for name, allocator in strategies.items():
            trace = DrawnTrace(workload, num_requests=3000, seed=0)
            report = Replay(trace, allocator, settings, name=workload).run()
            assert report.utilisation is not None
            found[name].append(report.utilisation)
    rows = [
        [workload, *(f"{100 * found[name][i]:.1f}" for name in strategies)]
        for i, workload in enumerate(WORKLOADS)
    ]
    page.table("utilisation", ["utilisation, %", *strategies], rows, picture="utilisation")
    figure, axes = drawing("utilisation, %")
    places = np.arange(len(WORKLOADS))
    for i, (name, shares) in enumerate(found.items()):
        axes.bar(
            places + 0.27 * (i - 1), 100 * np.array(shares), 0.25, label=name, color=COLOURS[i]
        )
    axes.axhspan(20, 40, color="#999999", alpha=0.25, label="said of rows: 20-40 %", lw=0, zorder=0)
    axes.set_xticks(places, WORKLOADS)
    axes.set_ylim(0, 118)
    axes.legend(fontsize="small", ncol=2, loc="upper center", frameon=False)
    page.picture("utilisation", figure)


def mean_120(page: "Page") -> None:
    """Requests that hold 120 tokens on average while they run: waste and table entries."""
    reports = {size: _replayed(requests_of_120(4000), size) for size in SIZES}
    base = reports[16]
    rows = [
        [
            str(size),
            f"{100 * expected_waste(120, size):.1f}",
            f"{100 * (report.internal_waste or 0):.1f}",
            f"{(report.entries_per_request or 0):.1f}",
            change(report.entries_per_request, base.entries_per_request),
            change(report.tokens_per_step, base.tokens_per_step),
        ]
        for size, report in reports.items()
    ]
    head = [
        "block size",
        "waste by formula, %",
        "waste, %",
        "table entries a request",
        "entries against 16",
        "tokens a step against 16",
    ]
    page.table("mean120", head, rows, picture="waste")
    figure, axes = drawing("internal waste, %")
    sizes = np.arange(1, 65)
    for i, mean in enumerate((120, 500, 2000)):
        waste = [100 * expected_waste(mean, int(size)) for size in sizes]
        axes.plot(sizes, waste, color=COLOURS[i], label=f"requests of {mean:,} tokens")
    simulated = [100 * (report.internal_waste or 0) for report in reports.values()]
    axes.plot(SIZES, simulated, "o", color=COLOURS[0], label="120 tokens, simulated")
    axes.set_xlabel("block size, tokens")
    axes.set_xticks(SIZES)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", frameon=False)
    page.picture("waste", figure)


def models(page: "Page") -> None:
    """What half a block costs, and what a table costs, by the model's K and V."""
    rows = [
        [
            shape.name,
            f"{shape.bytes_per_token / 1024:,.0f}",
            *(f"{(size - 1) / 2 * shape.bytes_per_token / 2**20:.2f}" for size in SIZES),
            f"{100 * 4 / (8 * shape.bytes_per_token):.4f}",
        ]
        for shape in SHAPES
    ]
    waste = [f"waste a request at {size}, MiB" for size in SIZES]
    page.table("models", ["model", "KiB a token", *waste, "table of 8s, % of K and V"], rows)


def requests_of_120(count: int) -> list[TraceRequest]:
    """Prompt and output drawn so that p + o / 2, weighed by o, is about 120."""
    random = np.random.default_rng(0)
    prompts = random.integers(40, 121, count).tolist()
    outputs = random.integers(40, 101, count).tolist()
    return [TraceRequest(0.0, p, o) for p, o in zip(prompts, outputs, strict=True)]


def _replayed(requests: Sequence[TraceRequest], size: int) -> Report:
    settings = ReplaySettings(slots=32_768, max_model_len=512)
    return Replay(requests, f"fixed:block_size={size}", settings).run()


def expected_waste(live_tokens: float, block_size: int) -> float:
    """Half a block beside so many live tokens."""
    waste = (block_size - 1) / 2
    return waste / (live_tokens + waste)


# -- measured ------------------------------------------------------------------------------------


def kernel(page: "Page", device: str) -> None:
    """One decode step of paged attention by block size, beside one long run of adjacent slots."""
    cases = {"64 sequences of 512": (64, 512), "4 sequences of 8,192": (4, 8192)}
    rows, curves = [], {}
    for name, (sequences, keys) in cases.items():
        times = in_turn([decode_call(sequences, keys, size, device) for size in KERNEL_SIZES])
        curves[name] = [seconds * 1e6 for seconds in times]
        base = times[KERNEL_SIZES.index(16)]
        rows.append([name, *(f"{t * 1e6:,.0f} ({change(t, base)})" for t in times)])
    page.table(
        "kernel", ["microseconds, against 16", *map(str, KERNEL_SIZES)], rows, picture="kernel"
    )
    figure, axes = drawing("time of a layer, µs")
    for i, (name, micros) in enumerate(curves.items()):
        axes.plot(KERNEL_SIZES, micros, "o-", color=COLOURS[i], label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(KERNEL_SIZES, map(str, KERNEL_SIZES))
    axes.set_xlabel("block size, tokens")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", frameon=False)
    page.picture("kernel", figure)


def decode_call(sequences: int, keys: int, size: int, device: str) -> Callable[[], None]:
    """A decode step over blocks in random order; the heads of SmolLM2, two layers in turn."""
    width = -(-keys // size)
    blocks = np.random.default_rng(0).permutation(sequences * width)
    batch = AttentionBatch(
        blocks.reshape(sequences, width).astype(np.int32),
        np.arange(sequences, dtype=np.int32),
        np.ones(sequences, np.int32),
        np.full(sequences, keys, np.int32),
        size,
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options = {"dtype": dtype, "device": device}
    q = torch.randn(sequences, 9, 64, **options)
    shape = (blocks.size * size, 3, 64)
    layers = [(torch.randn(shape, **options), torch.randn(shape, **options)) for _ in range(2)]
    backend = attention_backend(default_backend(torch.device(device).type))

    def call() -> None:
        for k, v in layers:
            backend.paged_attention(q, k, v, batch, scale=0.125)
        if device != "cpu":
            torch.cuda.synchronize()

    return call


def in_turn(calls: Sequence[Callable[[], None]], rounds: int = 30) -> list[float]:
    """The fastest of some rounds, in seconds a layer; all calls in each round."""
    times = []
    for _ in range(rounds + 1):  # the first one warms up
        row = []
        for call in calls:
            started = perf_counter()
            call()
            row.append((perf_counter() - started) / 2)
        times.append(row)
    return [min(column) for column in zip(*times[1:], strict=True)]


async def engine(page: "Page", model: str | None, device: str, seconds: float) -> None:
    """End to end by block size: conversations, and requests of 120 tokens."""
    common: dict[str, Any] = {
        "allocators": ("fixed",),
        "block_sizes": SIZES,
        "device": device,
        "rounds": 5,
        "seconds": seconds / 2,
    }
    chat = await kvpage.compare(model, workload="chat", **common)
    short = await kvpage.compare(model, workload=requests_of_120(40), scale=1.0, **common)
    head = [
        "block size",
        "tokens/s",
        "smallest-largest",
        "against 16",
        "peak K and V, MiB",
        "waste, %",
        "requests running",
    ]
    page.table("chat", head, [*end_to_end(chat)])
    page.table("short", head, [*end_to_end(short)], picture="throughput")
    figure, axes = drawing("tokens/s")
    for i, (name, found) in enumerate({"conversations": chat, "120 tokens": short}.items()):
        sizes = [result.candidate.block_size for result in found.measured]
        medians = [result.throughput or 0.0 for result in found.measured]
        runs = [[run.throughput for run in result.runs] for result in found.measured]
        below = [m - min(r) for m, r in zip(medians, runs, strict=True)]
        above = [max(r) - m for m, r in zip(medians, runs, strict=True)]
        axes.errorbar(
            sizes, medians, (below, above), fmt="o-", capsize=3, color=COLOURS[i], label=name
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, map(str, SIZES))
    axes.set_xlabel("block size, tokens; bars: slowest and fastest run")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", frameon=False)
    page.picture("throughput", figure)


def end_to_end(found: kvpage.Comparison) -> list[list[str]]:
    """A row for each block size that was measured; there may be no time for all of them."""
    base = next((r.throughput for r in found.measured if r.candidate.block_size == 16), None)
    return [
        [
            str(result.candidate.block_size),
            f"{result.throughput or 0:.1f}",
            f"{min(r.throughput for r in result.runs):.1f}-"
            f"{max(r.throughput for r in result.runs):.1f}",
            change(result.throughput, base),
            f"{statistics.median(r.peak_kv_bytes for r in result.runs) / 2**20:.1f}",
            f"{100 * (result.median(lambda r: r.internal_waste) or 0):.1f}",
            f"{result.median(lambda r: r.running) or 0:.1f}",
        ]
        for result in found.measured
    ]


def machine(page: "Page", model: str | None, device: str) -> None:
    """What the measured numbers were measured on."""
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = torch.cuda.get_device_name() if device != "cpu" else processor and processor[1]
    page.text(
        "machine",
        f"{name or platform.processor()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, model {model or 'SmolLM2-135M-Instruct'}.",
    )


# -- the page ------------------------------------------------------------------------------------


def change(value: float | None, base: float | None) -> str:
    return f"{100 * ((value or 0) / base - 1):+.1f} %" if base else "-"


def drawing(ylabel: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


@attrs.frozen
class Page:
    """A Markdown page whose parts `<!-- name -->...<!-- /name -->` are rewritten."""

    path: Path

    def text(self, name: str, text: str) -> None:
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        page = self.path.read_text()
        if begin not in page or end not in page:
            raise SystemExit(f"{self.path} has no part between {begin} and {end}")
        head, _, rest = page.partition(begin)
        self.path.write_text(f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}")
        print(text, end="\n\n")

    def table(
        self,
        name: str,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        picture: str | None = None,
    ) -> None:
        """A table, and below it a picture that `picture` draws."""
        lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
        if picture is not None:
            lines += ["", f"![{picture}]({self.path.stem}/{picture}.svg)"]
        self.text(name, "\n" + "\n".join(lines) + "\n")

    def picture(self, name: str, figure: Figure) -> None:
        folder = self.path.with_suffix("")
        folder.mkdir(exist_ok=True)
        # The same picture gives the same file: no date, no random names.
        with rc_context({"svg.hashsalt": name}):
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def main(
    only: Annotated[str, typer.Option(help="simulated, measured, or both.")] = "both",
    model: Annotated[str | None, typer.Option(help="[default: SmolLM2-135M-Instruct]")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="For the runs end to end.")] = 600.0,
    page: Annotated[Path, typer.Option(help="To rewrite.")] = PAGE,
) -> None:
    """Check the figures and rewrite the page."""
    if only not in ("simulated", "measured", "both"):
        raise typer.BadParameter("simulated, measured or both")
    target = Page(page)
    if only != "measured":
        utilisation(target)
        mean_120(target)
        models(target)
    if only != "simulated":
        kernel(target, device)
        asyncio.run(engine(target, model, device, seconds))
        machine(target, model, device)


if __name__ == "__main__":
    typer.run(main)
