"""Decoder layers in two calls each, against float64, and all in one, against the two."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from kvpage.kernels import AttentionOptions, cpu, cpu_threads
from kvpage.kernels.cpu_layer import LayerKernel, LayerRun
from kvpage.kernels.cpu_product import Panels, Room
from kvpage.kernels.simd import LANES
from kvpage.kernels.work import AttentionBatch

HIDDEN, WIDTH, ROTARY = 70, 9 * LANES, 12
Q, K, V = (6, 20), (2, 20), (2, 24)
EPS = 1e-5


pytestmark = pytest.mark.usefixtures("one_and_two_threads")


GATE_UP = 2
"""Which of the four products."""


def in_turns(x: torch.Tensor) -> torch.Tensor:
    """The first half of `[N, ...]` and the second, `LANES` of each in turns."""
    return x.view(2, -1, LANES, *x.shape[1:]).transpose(0, 1).reshape_as(x)


class Layer:
    """A layer with random weights, twice: as a kernel and as formulas."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        num_qkv = sum(heads * dim for heads, dim in (Q, K, V))
        num_attended = Q[0] * V[1]
        shapes = [
            (num_qkv, HIDDEN), (HIDDEN, num_attended), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH),
        ]  # fmt: skip
        self.weights = [self.draw(*shape) / shape[1] ** 0.5 for shape in shapes]
        self.biases = [self.draw(shape[0]) for shape in shapes]
        self.norms = [self.draw(HIDDEN), self.draw(HIDDEN)]
        room = Room(shapes)
        weights, biases = (
            [in_turns(x) if i == GATE_UP else x for i, x in enumerate(of_layers)]
            for of_layers in (self.weights, self.biases)
        )
        panels = [
            Panels.of(weight, bias, room) for weight, bias in zip(weights, biases, strict=True)
        ]
        first, second = self.norms
        self.kernel = LayerKernel(*panels, norms=((first, EPS), (second, EPS)), heads=(Q, K, V))

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def inputs(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, and cosines and sines of their positions."""
        cos, sin = self.draw(num_rows, ROTARY), self.draw(num_rows, ROTARY)
        return self.draw(num_rows, HIDDEN), cos, sin

    def linear(self, which: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[which].double(), self.biases[which].double())

    def norm(self, which: int, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), self.norms[which].double(), EPS)

    def exact_before(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> list[torch.Tensor]:
        widths = [heads * dim for heads, dim in (Q, K, V)]
        parts = torch.split(self.linear(0, self.norm(0, x.double())), widths, dim=1)
        q, k, v = (p.view(-1, *heads) for p, heads in zip(parts, (Q, K, V), strict=True))
        for heads in (q, k):
            turned = heads[..., :ROTARY].clone()
            first, second = turned.chunk(2, dim=-1)
            swapped = torch.cat([-second, first], dim=-1)
            heads[..., :ROTARY] = turned * cos[:, None] + swapped * sin[:, None]
        return [q, k, v]

    def exact_after(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        h = x.double() + self.linear(1, attended.double().flatten(1))
        gate, up = self.linear(GATE_UP, self.norm(1, h)).chunk(2, dim=1)
        return h + self.linear(3, F.silu(gate) * up)


def check(layer: Layer, num_rows: int) -> None:
    x, cos, sin = layer.inputs(num_rows)
    expected = layer.exact_before(x, cos, sin)
    for one, other in zip(expected, layer.kernel.before_attention(x, cos, sin), strict=True):
        torch.testing.assert_close(other, one.float(), rtol=0, atol=3e-5)
    attended = layer.draw(num_rows, Q[0], V[1])
    before = x.clone()
    actual = layer.kernel.after_attention(x, attended)
    torch.testing.assert_close(actual, layer.exact_after(x, attended).float(), rtol=0, atol=1e-4)
    assert torch.equal(x, before)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 64, 300])
def test_a_layer_is_that_of_float64(num_rows: int) -> None:
    """Odd widths, biases, heads of V of another dim, a part of each head rotated."""
    check(Layer(), num_rows)


def test_numbers_of_rows_come_and_go() -> None:
    """What lies between the passes is used again, by other layers too."""
    layers = [Layer(seed) for seed in range(3)]
    for num_rows in (5, 8, 1, 9, 3, 64, 2):
        for layer in layers:
            check(layer, num_rows)


def test_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no GNU OpenMP, one pass after the other is run from here."""
    monkeypatch.setattr(cpu_threads, "openmp_address", lambda: 0)
    monkeypatch.setattr(cpu_threads, "_openmp", lambda: None)
    with ThreadPoolExecutor(1) as fresh:  # a thread that has no programs yet
        fresh.submit(check, Layer(), 9).result()


def test_several_python_threads_share_a_layer() -> None:
    """As engines that share weights do."""
    layer = Layer()
    x, cos, sin = layer.inputs(33)
    attended = layer.draw(33, Q[0], V[1])
    expected = layer.kernel.after_attention(x, attended)

    def work(_number: int) -> bool:
        q, _, _ = layer.kernel.before_attention(x, cos, sin)
        again = layer.kernel.before_attention(x, cos, sin)[0]
        return torch.equal(q, again) and torch.equal(
            expected, layer.kernel.after_attention(x, attended)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def check_in_one_piece(
    layers: list[Layer], batch: AttentionBatch, dtype: torch.dtype, windows: tuple[int, ...]
) -> None:
    num_rows, draw = batch.num_tokens, layers[0].draw
    x, cos, sin = layers[0].inputs(num_rows)
    slots = torch.arange(num_rows).flip(0)
    slots[2] = -1
    options = [
        AttentionOptions(
            0.3 + i / 10, windows[i % len(windows)], i * 5.0, [None, draw(Q[0])][i % 2]
        )
        for i in range(len(layers))
    ]
    pools = tuple(tuple(draw(num_rows + 40, *heads).to(dtype) for heads in (K, V)) for _ in layers)
    copies: Any = tuple(tuple(pool.clone() for pool in each) for each in pools)
    given, expected = x.clone(), x
    for layer, (k_pool, v_pool), each in zip(layers, pools, options, strict=True):
        q, k, v = layer.kernel.before_attention(expected, cos, sin)
        cpu.write_kv(k, v, k_pool, v_pool, slots)
        attended = cpu.paged_attention(
            q, k_pool, v_pool, batch, scale=each.scale, window=each.window, softcap=each.softcap,
            sinks=each.sinks,
        )  # fmt: skip
        expected = layer.kernel.after_attention(expected, attended)
    run = LayerRun([layer.kernel for layer in layers])
    actual = cpu.compute_layers(run, x, cos, sin, copies, batch, slots, options)
    assert actual is not None
    assert torch.equal(actual, expected)
    assert torch.equal(x, given)
    for one, other in zip(copies, pools, strict=True):
        assert all(map(torch.equal, one, other))


def batch_of(*lengths: tuple[int, int]) -> AttentionBatch:
    """Sequences of so many queries and keys each, in blocks of 8 of the same few slots."""
    queries, keys = (np.array(each, np.int32) for each in zip(*lengths, strict=True))
    table = np.random.default_rng(0).integers(0, 5, (len(lengths), -(-max(keys) // 8)))
    rows = np.arange(len(lengths), dtype=np.int32)
    return AttentionBatch(table.astype(np.int32), rows, queries, keys, 8)


@pytest.mark.parametrize("windows", [(0,), (9,), (0, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_one_call_gives_what_two_give(
    num_layers: int, dtype: torch.dtype, windows: tuple[int, ...]
) -> None:
    """To the last bit: rows alone and in chunks, short and in parts; what is written, too."""
    layers = [Layer(seed) for seed in range(num_layers)]
    for lengths in ([(1, 5), (1, 300), (1, 1)], [(9, 40), (1, 20), (4, 4)], [(3, 7)]):
        check_in_one_piece(layers, batch_of(*lengths), dtype, windows)


def test_one_call_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is a pass of its own there."""
    monkeypatch.setattr(cpu_threads, "openmp_address", lambda: 0)
    monkeypatch.setattr(cpu_threads, "_openmp", lambda: None)
    layers, batch = [Layer(0), Layer(1)], batch_of((1, 300), (5, 20))
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(check_in_one_piece, layers, batch, torch.float32, (0,)).result()


def test_a_run_goes_on_with_other_pools_and_rows() -> None:
    """What it derives from pools is of those that it is given."""
    layers = [Layer(0), Layer(1)]
    run = LayerRun([layer.kernel for layer in layers])
    options = [AttentionOptions(0.5), AttentionOptions(0.5)]
    for num_rows in (3, 40, 3):
        batch = batch_of((num_rows, num_rows))
        x, cos, sin = layers[0].inputs(num_rows)
        slots = torch.arange(num_rows)
        results: list[Any] = []
        for _ in range(2):
            pools: Any = tuple(tuple(torch.zeros(40, *heads) for heads in (K, V)) for _ in layers)
            results.append(cpu.compute_layers(run, x, cos, sin, pools, batch, slots, options))
            assert all(pool.any() for each in pools for pool in each)
        assert torch.equal(*results)


def test_a_run_keeps_no_pools() -> None:
    """An engine that ends gives their memory back, though its model may go on."""
    layers = [Layer(0), Layer(1)]
    run = LayerRun([layer.kernel for layer in layers])
    options = [AttentionOptions(0.5), AttentionOptions(0.5)]
    pools: Any = tuple(tuple(torch.zeros(40, *heads) for heads in (K, V)) for _ in layers)
    seen = [weakref.ref(pool) for each in pools for pool in each]
    x, cos, sin = layers[0].inputs(3)
    cpu.compute_layers(run, x, cos, sin, pools, batch_of((3, 3)), torch.arange(3), options)
    del pools
    gc.collect()
    assert not any(each() is not None for each in seen)


def test_threads_share_a_run() -> None:
    """As engines that share weights do; each with pools of its own."""
    layers = [Layer(0), Layer(1)]
    run = LayerRun([layer.kernel for layer in layers])
    options = [AttentionOptions(0.5), AttentionOptions(0.5)]
    x, cos, sin = layers[0].inputs(33)
    slots = torch.arange(33)

    def work(_number: int) -> Any:
        pools: Any = tuple(tuple(torch.zeros(40, *heads) for heads in (K, V)) for _ in layers)
        return cpu.compute_layers(run, x, cos, sin, pools, batch_of((33, 33)), slots, options)

    expected = work(0)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(expected, each) for each in pool.map(work, range(40)))


def test_pools_of_other_types_take_calls_of_their_own() -> None:
    """Nothing is computed, and nothing written."""
    layer, batch = Layer(), batch_of((3, 3))
    x, cos, sin = layer.inputs(3)
    k, v = (torch.zeros(40, *heads, dtype=torch.float16) for heads in (K, V))
    run, slots = LayerRun([layer.kernel]), torch.arange(3)
    options = [AttentionOptions(1.0)]
    assert cpu.compute_layers(run, x, cos, sin, ((k, v),), batch, slots, options) is None
    assert not k.any()
    assert not v.any()


def test_a_layer_that_is_gone_leaves_nothing() -> None:
    """Workspaces outlive layers, and do not keep them."""
    layer = Layer()
    check(layer, 4)
    seen = weakref.ref(layer.kernel)
    del layer
    gc.collect()
    assert seen() is None
