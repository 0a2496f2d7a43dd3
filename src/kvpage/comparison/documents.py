"""A comparison as plain values: what JSON can hold."""

from typing import Any

import attrs

from kvpage.comparison.figures import FIGURES
from kvpage.comparison.records import CandidateResult, CandidateRun, Comparison
from kvpage.comparison.verdict import verdict

QUANTILES = (0.5, 0.95, 0.99)
_NOT_WRITTEN = ("workload", "allocators", "plugins", "kv_memory")


def json_document(comparison: Comparison, *, command: str = "") -> dict[str, Any]:
    """Everything but the memory films, as dicts, lists, numbers and texts.

    Args:
        comparison: what was measured; it may be under way.
        command: what made it.
    """
    settings = attrs.asdict(comparison.settings, filter=lambda a, _: a.name not in _NOT_WRITTEN)
    judged = verdict(comparison)
    return {
        "command": command,
        "state": comparison.state,
        "elapsed_s": comparison.elapsed_s,
        "model": comparison.model,
        "machine": attrs.asdict(comparison.machine)
        | {"versions": dict(comparison.machine.versions)},
        "workload": {
            "name": comparison.workload.name,
            "requests": len(comparison.workload.requests),
            "left_out": comparison.workload.left_out,
            "scale": comparison.workload.scale,
            "prompt_tokens": comparison.workload.prompt_tokens,
            "output_tokens": comparison.workload.output_tokens,
        },
        "settings": settings,
        "max_model_len": comparison.max_model_len,
        "slots": comparison.slots,
        "kv_bytes": comparison.slots * comparison.token_bytes,
        "verdict": {
            "best": judged.best,
            "noise": judged.noise,
            "not_told_apart": list(judged.equals),
            "sentences": list(judged.sentences),
        },
        "results": [_result(result) for result in comparison.results],
    }


def _result(result: CandidateResult) -> dict[str, Any]:
    return {
        "label": result.label,
        "strategy": result.candidate.strategy,
        "block_size": result.candidate.block_size,
        "num_blocks": result.num_blocks,
        "failure": result.failure,
        "median": {figure.name: result.median(figure.read) for figure in FIGURES},
        "runs": [_run(run) for run in result.runs],
    }


def _run(run: CandidateRun) -> dict[str, Any]:
    written = attrs.asdict(
        run,
        recurse=False,
        filter=lambda a, _: a.name not in ("film", "series", "first_token", "inter_token"),
    )
    for name in ("first_token", "inter_token"):
        of_run = getattr(run, name)
        written[f"{name}_s"] = {f"p{q * 100:g}": of_run.quantile(q) for q in QUANTILES}
    series = [{"seconds": time} | sample._asdict() for time, sample in run.series]
    return written | {"throughput": run.throughput, "series": series}
