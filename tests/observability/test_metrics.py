"""What an engine tells Prometheus."""

import gc
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvpage import AsyncEngine, SamplingParams, metrics
from kvpage.latencies import Histogram
from tests.engine.scenes import fake_engine

PARAMS = SamplingParams(max_tokens=5)
OUTCOMES = ("finished", "cancelled", "failed")


def scraped(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Every sample by its name and its labels, as a server would read them."""
    text = generate_latest(registry).decode()
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def serve(engine: AsyncEngine, num_requests: int) -> None:
    for number in range(num_requests):
        await engine.complete([number + 1, 2, 3], PARAMS)
    async for _ in engine.generate([7, 8], SamplingParams(max_tokens=20)):
        break
    await engine.idle()


async def test_requests_tokens_and_latencies_are_counted() -> None:
    """Two finished requests of three and five tokens, and one that its reader left."""
    registry = CollectorRegistry()
    async with fake_engine() as engine:
        metrics.register(engine, registry)
        await serve(engine, 2)
        samples = scraped(registry)
        total_blocks = engine.geometry.num_blocks
    ended = {how: samples["kvpage_requests_total", f"outcome={how}"] for how in OUTCOMES}
    assert (ended["failed"], sum(ended.values())) == (0, 3)  # the one left may have been finished
    assert samples["kvpage_prompt_tokens_total", ""] == 3 + 3 + 2
    assert samples["kvpage_time_to_first_token_seconds_count", ""] == 3
    assert samples["kvpage_queue_seconds_count", ""] == 3
    assert samples["kvpage_request_seconds_count", ""] == ended["finished"]
    assert samples["kvpage_inter_token_seconds_count", ""] >= 2 * 4
    assert samples["kvpage_step_seconds_count", ""] == samples["kvpage_steps_total", ""]
    assert samples["kvpage_host_seconds_count", ""] == samples["kvpage_steps_total", ""]
    states = ("free", "used", "cached")
    assert sum(samples["kvpage_blocks", f"state={s}"] for s in states) == total_blocks
    assert samples["kvpage_blocks", "state=used"] == 0


async def test_host_memory_is_counted() -> None:
    """Blocks of it by state, and those copied there and back, as in the statistics."""
    registry = CollectorRegistry()
    async with fake_engine(preempt="swap", swap_memory="8 blocks") as engine:
        metrics.register(engine, registry)
        samples = scraped(registry)
    states = {state: samples["kvpage_swap_blocks", f"state={state}"] for state in ("free", "used")}
    assert states == {"free": 8, "used": 0}
    assert samples["kvpage_swapped_blocks_total", "to=host"] == 0


async def test_counters_never_go_down() -> None:
    """Over more requests and a close, every counter and bucket only grows."""
    registry = CollectorRegistry()
    async with fake_engine() as engine:
        metrics.register(engine, registry)
        await serve(engine, 1)
        before = scraped(registry)
        await serve(engine, 2)
        after = scraped(registry)
    closed = scraped(registry)
    growing = [key for key in before if key[0].endswith(("_total", "_count", "_bucket"))]
    assert growing
    assert all(before[key] <= after[key] <= closed[key] for key in growing)


async def test_two_engines_live_side_by_side_on_one_registry() -> None:
    """Labels tell them apart."""
    registry = CollectorRegistry()
    async with fake_engine() as one, fake_engine() as two:
        metrics.register(one, registry, model="one")
        metrics.register(two, registry, model="two")
        await serve(one, 1)
        samples = scraped(registry)
    ended = {
        model: sum(samples["kvpage_requests_total", f"model={model},outcome={o}"] for o in OUTCOMES)
        for model in ("one", "two")
    }
    assert ended == {"one": 2, "two": 0}


async def test_a_registry_does_not_keep_an_engine_alive() -> None:
    """A dropped engine has no samples, and scraping goes on."""
    registry = CollectorRegistry()
    engine = fake_engine()
    metrics.register(engine, registry)
    await engine.aclose()
    del engine
    gc.collect()
    assert scraped(registry) == {}


@pytest.mark.parametrize(("value", "bucket"), [(0.5, 0), (1.0, 0), (1.5, 1), (2.0, 1), (9.0, 2)])
def test_a_value_on_a_bound_belongs_below_it(value: float, bucket: int) -> None:
    """As Prometheus defines its buckets."""
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    snapshot = histogram.snapshot()
    assert snapshot.counts == tuple(int(i == bucket) for i in range(3))
    assert (snapshot.total, snapshot.num_observations) == (value, 1)


async def test_the_page_lists_every_metric() -> None:
    """Under its own name, and none that there is not."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "observe.md"
    described = {
        name.split("{")[0] for name in re.findall(r"`(kvpage_[a-z_{}]+)`", page.read_text())
    }
    registry = CollectorRegistry()
    async with fake_engine() as engine:
        metrics.register(engine, registry)
        text = generate_latest(registry).decode()
    families = [f for f in text_string_to_metric_families(text) if not f.name.endswith("_created")]
    assert described == {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
