"""Is what `kvpage tune` recommends within 3 % of the best of the full sweep?

    python benchmarks/tune_check.py TRACES                          # by simulation, every trace
    python benchmarks/tune_check.py TRACES --cost found.json        # on a machine that was measured
    python benchmarks/tune_check.py TRACE.csv.gz --measured         # end to end

By simulation: the search, and every candidate of the same space, over the same requests. The
machine is that of `kvpage tune --json found.json`, or arithmetic for 8 billion parameters on an
H100. Measured: the recommendation, against `fixed` and `dynamic` at every block size with the
memory and the batch that it recommends, in rounds that each begin anew in another order.
"""

import asyncio
import json
import random
import statistics
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from kvpage.comparison.engines import open_source
from kvpage.comparison.workload import Workload, read_workload
from kvpage.simulator import MOONCAKE_BLOCK, StepTime
from kvpage.tuning import Candidate, Curve, MachineCost, SearchSpace, TuningSettings, tune
from kvpage.tuning.measuring import EndToEnd
from kvpage.tuning.search import simulate
from kvpage.tuning.tuning import About, Tuning

ALLOWED_LOSS = 0.03
ROUNDS = 6
SPACE = SearchSpace(memory_shares=(0.5, 1.0), max_num_seqs=(32, 256), max_batch_tokens=(512, 2048))
H100_KV_BYTES = 8 * 2**30
H100_KV_BYTES_PER_TOKEN = 128 * 1024


def h100() -> MachineCost:
    defaults = StepTime()
    return MachineCost.linear(
        base_s=defaults.base_s,
        per_token_s=defaults.per_token_s,
        per_kv_token_s=defaults.per_kv_token_s,
        bytes_per_token=H100_KV_BYTES_PER_TOKEN,
        block_sizes=SPACE.block_sizes,
    )


def read_cost(path: Path) -> MachineCost:
    """The machine that a tuning has measured."""
    cost: dict[str, Any] = json.loads(path.read_text())["cost"]
    by_size = {int(size): seconds for size, seconds in cost.pop("per_kv_token_s").items()}
    decode, chunk = (Curve(cost.pop(name)["points"]) for name in ("decode", "chunk"))
    return MachineCost(decode, chunk, by_size, **cost)


def simulated(
    trace: Path, cost: MachineCost, kv_bytes: int, requests: int, hash_block_size: int
) -> bool:
    settings = TuningSettings(space=SPACE, max_model_len=4096)
    workload = read_workload(trace, 20_000, 0, hash_block_size=hash_block_size)
    tuning = Tuning(About("the model", None, 4096, kv_bytes), settings, workload, cost)
    step = max(1, len(tuning.demand.requests) // requests)
    tuning.demand = attrs.evolve(tuning.demand, requests=tuning.demand.requests[::step])
    found, _ = tuning.search()
    swept = [simulate(c, tuning.demand, cost) for c in SPACE.candidates(kv_bytes)]
    best = max(swept, key=lambda s: s.tokens_s)
    loss = 1 - found.chosen.tokens_s / best.tokens_s
    print(
        f"| {trace.name.split('.')[0]} | {found.chosen.candidate} | {best.candidate} "
        f"| {100 * loss:.1f} | {len(found.simulated)} of {len(swept)} |",
        flush=True,
    )
    return loss <= ALLOWED_LOSS


async def measured(
    trace: Path, model: str | None, scale: float, seconds: float, run_seconds: float
) -> bool:
    found = await tune(model, workload=trace, scale=scale, seconds=seconds, on_progress=print)
    chosen = found.chosen.candidate
    swept = [
        attrs.evolve(chosen, allocator=allocator, block_size=size)
        for allocator in ("fixed", "dynamic")
        for size in SPACE.block_sizes
    ]
    candidates = list(dict.fromkeys([chosen, *swept]))
    workload = read_workload(trace, 20_000, 0).scaled(scale, found.max_model_len)
    output_tokens = statistics.mean(request.output_tokens for request in workload.requests)
    count = max(int(run_seconds * found.chosen.tokens_s / output_tokens), 8)
    step = max(1, len(workload.requests) // count)
    sample: Workload = attrs.evolve(workload, requests=workload.requests[::step][:count])
    measure = EndToEnd(open_source(model), found.max_model_len, 0)
    shares: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
    speeds: list[float] = []
    orders = random.Random(0)
    for number in range(ROUNDS):
        print(f"round {number + 1} of {ROUNDS}", flush=True)
        orders.shuffle(candidates)
        found_now = {candidate: await measure(candidate, sample) for candidate in candidates}
        speeds.append(statistics.median(found_now.values()))
        for candidate, tokens_s in found_now.items():
            shares[candidate].append(tokens_s / speeds[-1])
    print(f"{found.chosen.running:.0f} of {count} requests run at once, as it was estimated\n")
    print(
        f"| {trace.name.split('.')[0]} | tokens/s | rounds, against their median |\n|---|---|---|"
    )
    for candidate in sorted(candidates, key=str):
        mark = " (recommended)" if candidate == chosen else ""
        middle = statistics.median(shares[candidate])
        rounds = ", ".join(f"{share:.2f}" for share in sorted(shares[candidate]))
        print(f"| {candidate}{mark} | {middle * statistics.median(speeds):.1f} | {rounds} |")
    loss = expected_loss(shares, chosen)
    print(f"the recommendation loses {100 * loss:.1f} % against the best")
    return loss <= ALLOWED_LOSS


def expected_loss(shares: dict[Candidate, list[float]], chosen: Candidate) -> float:
    """What the choice loses against the best; negative if the best is less good than it seemed.

    Which one is best is said by one half of the rounds, and how good it is by the other half: the
    largest of several uncertain numbers is larger than what it stands for.
    """
    halves = slice(0, None, 2), slice(1, None, 2)
    losses = []
    for known, judged in (halves, halves[::-1]):
        best = max(shares, key=lambda candidate: statistics.median(shares[candidate][known]))
        of_chosen, of_best = (statistics.median(shares[c][judged]) for c in (chosen, best))
        losses.append(1 - of_chosen / of_best)
    return statistics.mean(losses)


def main(
    traces: Annotated[list[Path], typer.Argument(help="Traces, or a folder of *.csv.gz.")],
    end_to_end: Annotated[bool, typer.Option("--measured", help="On the model.")] = False,
    cost: Annotated[Path | None, typer.Option(help="Of `kvpage tune --json`.")] = None,
    kv_bytes: Annotated[int, typer.Option(help="Budget of the simulation.")] = H100_KV_BYTES,
    requests: Annotated[int, typer.Option(help="Simulated, at most.")] = 200,
    hash_block_size: Annotated[int, typer.Option(help="Tokens per hash id.")] = MOONCAKE_BLOCK,
    model: Annotated[str | None, typer.Option(help="For --measured.")] = None,
    scale: Annotated[float, typer.Option(help="Multiplies lengths, for --measured.")] = 1.0,
    seconds: Annotated[float, typer.Option(help="For the finalists, for --measured.")] = 300.0,
    run_seconds: Annotated[float, typer.Option(help="Of a run of the sweep, about.")] = 30.0,
) -> None:
    files = [f for t in traces for f in (sorted(t.glob("*.csv.gz")) if t.is_dir() else [t])]
    if end_to_end:
        good = [asyncio.run(measured(file, model, scale, seconds, run_seconds)) for file in files]
    else:
        print(
            "| trace | recommended | best of the sweep | loss, % | simulated |\n"
            "|---|---|---|---|---|"
        )
        machine = h100() if cost is None else read_cost(cost)
        good = []
        for file in files:
            try:
                good.append(simulated(file, machine, kv_bytes, requests, hash_block_size))
            except ValueError as error:
                print(f"| {file.name.split('.')[0]} | {error} | | | |", flush=True)
    raise typer.Exit(0 if all(good) else 1)


if __name__ == "__main__":
    typer.run(main)
