"""A Prometheus collector for an engine. Needs the extra `metrics`.

It is registered on a registry that the caller passes, reads the engine's own counters when it is
scraped, and costs the engine nothing between scrapes::

    registry = prometheus_client.CollectorRegistry()
    kvpage.metrics.register(engine, registry, model="smollm2")
"""

import weakref
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvpage.engine import AsyncEngine
from kvpage.latencies import HistogramSnapshot, Latencies
from kvpage.stats import EngineStatistics


def register(engine: AsyncEngine, registry: CollectorRegistry, **labels: str) -> None:
    """Expose `engine` on `registry`, until the engine is dropped.

    Args:
        engine: not kept alive by this.
        registry: the caller's; two engines on one registry need different labels.
        labels: added to every sample.
    """
    registry.register(_EngineCollector(engine, labels))


class _EngineCollector(Collector):
    def __init__(self, engine: AsyncEngine, labels: dict[str, str]) -> None:
        self._engine = weakref.ref(engine)
        self._labels = labels

    def describe(self) -> list[Metric]:
        """Nothing in advance, so that several engines may share a registry."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The samples of this moment."""
        engine = self._engine()
        if engine is None:
            return
        stats = engine.stats()
        yield from self._counters(stats)
        yield from self._gauges(stats)
        yield from self._histograms(engine.latencies())

    def _counters(self, stats: EngineStatistics) -> Iterator[Metric]:
        requests = self._counter("requests", "Requests that ended, by how.", "outcome")
        requests.add_metric([*self._labels.values(), "finished"], stats.requests_finished)
        requests.add_metric([*self._labels.values(), "cancelled"], stats.requests_cancelled)
        requests.add_metric([*self._labels.values(), "failed"], stats.requests_failed)
        yield requests
        for name, value, help_text in (
            ("steps", stats.steps, "Steps executed."),
            ("prompt_tokens", stats.prompt_tokens, "Prompt tokens of admitted requests."),
            ("cached_prompt_tokens", stats.cached_prompt_tokens, "Of these, from the cache."),
            ("output_tokens", stats.output_tokens, "Tokens generated."),
            ("preemptions", stats.preemptions, "Times a running sequence lost its blocks."),
            ("swapped_preemptions", stats.swapped_preemptions, "Of these, kept in host memory."),
            ("swap_full", stats.swap_full, "Preemptions that host memory had no room for."),
            ("recomputed_tokens", stats.recomputed_tokens, "Tokens lost by preemption."),
        ):
            counter = self._counter(name, help_text)
            counter.add_metric([*self._labels.values()], value)
            yield counter
        swapped = self._counter("swapped_blocks", "Blocks copied to host memory or back.", "to")
        swapped.add_metric([*self._labels.values(), "host"], stats.swap.swapped_out_blocks)
        swapped.add_metric([*self._labels.values(), "pool"], stats.swap.swapped_in_blocks)
        yield swapped

    def _gauges(self, stats: EngineStatistics) -> Iterator[Metric]:
        blocks = self._gauge("blocks", "KV-cache blocks by state.", "state")
        for state in ("free", "used", "cached"):
            count = getattr(stats.pool, f"{state}_blocks")
            blocks.add_metric([*self._labels.values(), state], count)
        yield blocks
        swap = self._gauge("swap_blocks", "Blocks of host memory by state.", "state")
        used, total = stats.swap.used_blocks, stats.swap.num_blocks
        swap.add_metric([*self._labels.values(), "free"], total - used)
        swap.add_metric([*self._labels.values(), "used"], used)
        yield swap
        for name, value, help_text in (
            ("running_requests", stats.num_running, "Sequences in the batch."),
            ("waiting_requests", stats.num_waiting, "Sequences in the queue."),
            ("utilisation_ratio", stats.utilisation, "Slots that hold a live token."),
            ("internal_waste_ratio", stats.internal_waste, "Allocated slots without a token."),
            ("external_waste_ratio", stats.external_waste, "Free slots of no use to the queue."),
        ):
            gauge = self._gauge(name, help_text)
            gauge.add_metric([*self._labels.values()], value)
            yield gauge

    def _histograms(self, latencies: Latencies) -> Iterator[Metric]:
        for name, histogram, help_text in (
            ("queue_seconds", latencies.queue, "From submission to the first step."),
            ("time_to_first_token_seconds", latencies.first_token, "From submission."),
            ("inter_token_seconds", latencies.inter_token, "Between tokens of a request."),
            ("request_seconds", latencies.request, "From submission to the last token."),
            ("step_seconds", latencies.step, "One execution of the model."),
            ("host_seconds", latencies.host, "Deciding a step and delivering its tokens."),
            ("block_lifetime_seconds", latencies.block_lifetime, "From grant to return."),
        ):
            family = HistogramMetricFamily(f"kvpage_{name}", help_text, labels=[*self._labels])
            snapshot = histogram.snapshot()
            family.add_metric([*self._labels.values()], _buckets(snapshot), snapshot.total)
            yield family

    def _counter(self, name: str, help_text: str, *more_labels: str) -> Any:
        labels = [*self._labels, *more_labels]
        return CounterMetricFamily(f"kvpage_{name}", help_text, labels=labels)

    def _gauge(self, name: str, help_text: str, *more_labels: str) -> Any:
        labels = [*self._labels, *more_labels]
        return GaugeMetricFamily(f"kvpage_{name}", help_text, labels=labels)


def _buckets(snapshot: HistogramSnapshot) -> list[tuple[str, float]]:
    """Prometheus counts a bucket with all those below it."""
    counted, buckets = 0, []
    for bound, count in zip((*snapshot.bounds, float("inf")), snapshot.counts, strict=True):
        counted += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(counted)))
    return buckets
