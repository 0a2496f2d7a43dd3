"""kvpage beside the engines that one would use instead, on the same weights, CPU, two cores.

    python benchmarks/peers/environments.py
    python benchmarks/peers/run.py --rounds 3 --json peers.json

Every engine is a process of its own, stopped (SIGSTOP) while another one runs. They run in turn, A
B C A B C; the ratio to kvpage at the same precision is taken within each round, and the median of
those is shown. An engine whose run takes longer than `--patience` runs once in that workload; one
that cannot run on this machine is named and left out. The table ends with what the machine could
reach at best, measured in the same rounds (`limit.py`). `--engines kvpage,transformers` needs no
environments.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from environments import HOME, float32_folder, python
from limit import Shape, measure_machine, seconds
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig
from workloads import WORKLOADS

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Engine:
    """How to start one.

    Attributes:
        name: in the table.
        adapter: the module with its `engine`.
        environment: whose interpreter runs it; None is this one.
        model: its folder or file; None is the float32 folder.
        precision: of the weights; ratios are taken to kvpage at the same one.
        environ: variables it needs.
    """

    name: str
    adapter: str
    environment: str | None
    model: Path | None
    precision: str
    environ: tuple[tuple[str, str], ...] = ()


VLLM_ENVIRON = (
    ("VLLM_CPU_KVCACHE_SPACE", "2"),
    ("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}"),
    ("VLLM_LOGGING_LEVEL", "ERROR"),
)

ENGINES = {
    engine.name: engine
    for engine in (
        Engine("kvpage", "kvpage_engine", None, None, "fp32"),
        Engine("openvino", "openvino_engine", "openvino", HOME / "openvino-fp32", "fp32"),
        Engine("vllm", "vllm_engine", "vllm", None, "fp32", VLLM_ENVIRON),
        Engine("llama", "llama_engine", "llama", HOME / "llama-fp32.gguf", "fp32"),
        Engine("transformers-cb", "transformers_batching", None, None, "fp32"),
        Engine("transformers", "transformers_generate", None, None, "fp32"),
        Engine("kvpage-int8", "kvpage_engine", None, None, "int8", (("KVPAGE_WEIGHTS", "int8"),)),
        Engine("openvino-int8", "openvino_engine", "openvino", HOME / "openvino-int8", "int8"),
        Engine("llama-int8", "llama_engine", "llama", HOME / "llama-int8.gguf", "int8"),
    )
}


class Worker:
    """A started engine, which computes only while it is asked."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, **order: object) -> dict[str, float]:
        """Let it run one workload."""
        os.killpg(self._process.pid, signal.SIGCONT)
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self.answer()
        os.killpg(self._process.pid, signal.SIGSTOP)
        return answer

    def answer(self) -> dict[str, float]:
        """Its next line.

        Raises:
            RuntimeError: it ended instead.
        """
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine ended: {self._process.args}")
        answer: dict[str, float] = json.loads(line)
        return answer


@contextmanager
def started(engine: Engine, log: Path) -> Iterator[Worker]:
    """Start one, wait until it is loaded, and stop it."""
    interpreter = python(engine.environment) if engine.environment else sys.executable
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [interpreter, HERE / "worker.py", engine.adapter, engine.model or float32_folder()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | dict(engine.environ),
            start_new_session=True,
        ) as process,
    ):
        try:
            worker = Worker(process)
            loaded = worker.answer()["loaded"]
            os.killpg(process.pid, signal.SIGSTOP)
            print(f"{engine.name}: loaded in {loaded:.1f} s", file=sys.stderr)
            yield worker
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def measure(
    workers: dict[str, Worker], workload: str, rounds: int, patience_s: float
) -> dict[str, list[float]]:
    """Output tokens a second by engine, round by round, and of the `limit` in float32."""
    rates: dict[str, list[float]] = defaultdict(list)
    shape = Shape.of(AutoConfig.from_pretrained(float32_folder()))
    slow: set[str] = set()
    for run in range(rounds):
        requests = WORKLOADS[workload](run)
        num_tokens = sum(request.num_tokens for request in requests)
        rates["limit"].append(num_tokens / seconds(measure_machine(), shape, requests))
        for name, worker in workers.items():
            if name in slow:
                continue
            answer = worker.ask(workload=workload, run=run)
            if answer["tokens"] != num_tokens:
                raise RuntimeError(f"{name} made {answer['tokens']} tokens of {num_tokens}")
            if answer["seconds"] > patience_s:
                slow.add(name)
            rates[name].append(num_tokens / answer["seconds"])
            print(f"{workload} {run} {name}: {rates[name][-1]:.1f}", file=sys.stderr)
    return rates


def show(results: dict[str, dict[str, list[float]]]) -> None:
    """A table for each workload."""
    console = Console()
    for workload, rates in results.items():
        table = Table("engine", "weights", "output tok/s", "kvpage is x", "of the limit", "rounds")
        for name, values in rates.items():
            if name not in ENGINES:
                continue
            precision = ENGINES[name].precision
            ours = rates.get("kvpage" if precision == "fp32" else "kvpage-int8", [])
            ratios = [a / b for a, b in zip(ours, values, strict=False)]
            shares = [a / b for a, b in zip(values, rates["limit"], strict=False)]
            table.add_row(
                name,
                precision,
                f"{statistics.median(values):.1f}",
                f"{statistics.median(ratios):.2f}" if ratios else "-",
                f"{statistics.median(shares):.0%}" if precision == "fp32" else "-",
                str(len(values)),
            )
        limit = statistics.median(rates["limit"])
        table.add_row("the machine's limit", "fp32", f"{limit:.1f}", "", "", "")
        console.print(f"\n{workload}, {torch.get_num_threads()} threads")
        console.print(table)


def main(
    engines: Annotated[str, typer.Option(help="Comma-separated names.")] = ",".join(ENGINES),
    workloads: Annotated[str, typer.Option(help="Comma-separated names.")] = ",".join(WORKLOADS),
    rounds: Annotated[int, typer.Option(help="Runs of each engine in each workload.")] = 3,
    patience: Annotated[float, typer.Option(help="Seconds; slower engines run once.")] = 60,
    json_file: Annotated[Path, typer.Option("--json", help="Results.")] = Path("peers.json"),
) -> None:
    """Start all engines, run the rounds, print the tables. Results are written as they come."""
    chosen = [ENGINES[name] for name in engines.split(",")]
    results = {}
    logs = HOME / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        workers = {}
        for engine in chosen:
            log = logs / f"{engine.name}.log"
            try:
                workers[engine.name] = stack.enter_context(started(engine, log))
            except RuntimeError:
                said = log.read_text().strip().splitlines() or ["nothing"]
                print(f"{engine.name} is left out; it said: {said[-1]}", file=sys.stderr)
        for workload in workloads.split(","):
            results[workload] = measure(workers, workload, rounds, patience)
            json_file.write_text(json.dumps(results, indent=1))
    show(results)


if __name__ == "__main__":
    typer.run(main)
