"""Modules that take the place of a model's own, on a CPU; `fusion` finds the places.

Each computes in fewer passes over memory what transformers' modules compute, and by operators of
its own only where its linear layers are packed in panels.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from kvpage.attention import attend_packed, compute_layers
from kvpage.kernels import AttentionOptions, cpu_rows
from kvpage.kernels.cpu_layer import HeadKernel, LayerKernel, LayerRun
from kvpage.kernels.simd import LANES
from kvpage.packed_linear import PanelLinear
from kvpage.probe import Call

Norms: TypeAlias = tuple[torch.nn.Module, torch.nn.Module]
"""Of Q and of K."""


class RMSNorm(torch.nn.Module):
    """What transformers' RMS norms do, in one pass.

    Args:
        weight: `[D]`.
        eps: added to the mean of the squares.
    """

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().contiguous())
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., D]` to `[..., D]`."""
        return cpu_rows.rms_norm(hidden_states, self.weight, self.eps)


class RotaryEmbedding(torch.nn.Module):
    """Cosines and sines of angles that grow with the position, at frequencies that stay.

    Args:
        inv_freq: `[R / 2]`, radians for each position.
        attention_scaling: multiplies all of them.
    """

    inv_freq: torch.Tensor

    def __init__(self, inv_freq: torch.Tensor, attention_scaling: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq.detach().clone(), persistent=False)
        self.attention_scaling = attention_scaling

    def forward(
        self, _hidden_states: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions `[1, T]` to `[1, T, R]` each; both halves of a row are the same."""
        half = position_ids[..., None] * self.inv_freq
        angles = torch.cat((half, half), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


class GatedMLP(torch.nn.Module):
    """`down(activation(gate(x)) * up(x))` with gate and up in one product.

    Args:
        gate: a plain linear layer.
        up: likewise.
        down: likewise.
        activation: of the gate; None is SiLU, whose product with `up` takes one pass.

    Attributes:
        in_turns: `gate_up` gives `LANES` of gate and of up in turns, for that pass; otherwise all
            of gate, then all of up.
    """

    def __init__(
        self,
        gate: torch.nn.Linear,
        up: torch.nn.Linear,
        down: torch.nn.Linear,
        activation: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        super().__init__()
        self.in_turns = activation is None and gate.out_features % LANES == 0
        self.gate_up = side_by_side(gate, up)
        if self.in_turns:
            _take_turns(self.gate_up)
        self.down = down
        self.activation = activation or torch.nn.functional.silu

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` to `[..., hidden]`."""
        gate_up: torch.Tensor = self.gate_up(hidden_states)
        if self.in_turns:
            product = cpu_rows.silu_gate(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            product = self.activation(gate) * up
        result: torch.Tensor = self.down(product)
        return result


@attrs.frozen(eq=False)
class Projections:
    """How an attention module makes Q, K and V of its input.

    Attributes:
        q: gives `[T, Hq * D]`.
        k: gives `[T, Hkv * D]`.
        v: gives `[T, Hkv * Dv]`.
        norms: of Q and K before the rotation, if there are any.
        rotates: whether Q and K are rotated by the position embeddings of the call.
    """

    q: torch.nn.Linear
    k: torch.nn.Linear
    v: torch.nn.Linear
    norms: Norms | None
    rotates: bool


class FusedAttention(torch.nn.Module):
    """An attention module of transformers, with Q, K and V in one product.

    Args:
        projections: how Q, K and V are made.
        out: the output projection.
        call: an attention call of the module that this one replaces.
    """

    def __init__(self, projections: Projections, out: torch.nn.Linear, call: Call) -> None:
        super().__init__()
        self.qkv = side_by_side(projections.q, projections.k, projections.v)
        self.out = out
        self.norms = None if projections.norms is None else torch.nn.ModuleList(projections.norms)
        self.rotates = projections.rotates
        self.options: AttentionOptions = call.options
        self.heads = tuple((x.shape[1], x.shape[2]) for x in (call.q, call.k, call.v))
        self.widths = [num_heads * head_dim for num_heads, head_dim in self.heads]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_others: Any,
    ) -> tuple[torch.Tensor, None]:
        """`[1, T, hidden]` to `[1, T, hidden]`; what else transformers passes is of no effect."""
        num_tokens = hidden_states.shape[1]
        qkv = self.qkv(hidden_states)[0]
        q, k, v = (
            part.view(num_tokens, *heads)
            for part, heads in zip(qkv.split(self.widths, dim=1), self.heads, strict=True)
        )
        if self.norms is not None:
            q, k = (normed(norm, x) for norm, x in zip(self.norms, (q, k), strict=True))
        if self.rotates:
            assert position_embeddings is not None
            cos, sin = (table[0] for table in position_embeddings)
            for heads in (q, k):
                cpu_rows.rotate(heads, cos, sin)
        attended = attend_packed(q, k, v, self.options)
        return self.out(attended.reshape(1, num_tokens, -1)), None


class FusedLayer(torch.nn.Module):
    """A decoder layer: `h = x + attention(norm(x))`, then `h + mlp(norm(h))`.

    Args:
        norms: before attention and before the MLP.
        attention: the first part.
        mlp: the second part.
        returns_tuple: give the result as a tuple of one.

    Attributes:
        follows: the layer whose result comes to this one as it is, in a tuple of one; or nothing.
            Not a part of this module, which a plain attribute would make it.
        is_done_before: it gives back what it is given, for a layer before it has computed it.
    """

    follows: "tuple[FusedLayer, ...]" = ()

    def __init__(
        self,
        norms: tuple[RMSNorm, RMSNorm],
        attention: FusedAttention,
        mlp: GatedMLP,
        *,
        returns_tuple: bool,
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention = attention
        self.mlp = mlp
        self.returns_tuple = returns_tuple
        self.run: LayerRun | None = None
        self._options: tuple[AttentionOptions, ...] = ()
        self.is_done_before = False

    def begin_run(self, others: "Sequence[FusedLayer]", kernels: Sequence[LayerKernel]) -> None:
        """Compute this layer and those that follow upon it, in one call.

        Args:
            others: the layers behind this one, which give back what they are given from now on.
            kernels: of this layer and of the others.
        """
        self.run = LayerRun(kernels)
        self._options = tuple(each.attention.options for each in (self, *others))
        for each in others:
            each.is_done_before = True

    def kernel(self) -> LayerKernel | None:
        """What computes all of the layer but attention, where that can be.

        To be called when the linear layers are packed and nothing moves any more.
        """
        attention, mlp = self.attention, self.mlp
        linears: tuple[torch.nn.Module, ...] = (
            *(attention.qkv, attention.out),
            *(mlp.gate_up, mlp.down),
        )
        packed = [each.panels for each in linears if isinstance(each, PanelLinear)]
        plain = attention.rotates and attention.norms is None and mlp.in_turns
        q, k, v = attention.heads
        if plain and q[1] == k[1] and len(packed) == len(linears):
            first, second = self.attention_norm, self.mlp_norm
            return LayerKernel(
                *packed,
                norms=((first.weight, first.eps), (second.weight, second.eps)),
                heads=(q, k, v),
            )
        return None

    def __getstate__(self) -> dict[str, Any]:
        """Without the run, which is made of the weights as they lie in memory."""
        return {**vars(self), "run": None, "_options": (), "is_done_before": False}

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor]:
        """`[1, T, hidden]` to `[1, T, hidden]`; what else transformers passes is of no effect."""
        if self.is_done_before:
            pass
        elif self.run is None:
            attended, _ = self.attention(self.attention_norm(hidden_states), position_embeddings)
            hidden_states = hidden_states + attended
            hidden_states = hidden_states + self.mlp(self.mlp_norm(hidden_states))
        else:
            assert position_embeddings is not None
            x, cos, sin = (each[0].contiguous() for each in (hidden_states, *position_embeddings))
            hidden_states = compute_layers(self.run, x, cos, sin, self._options)[None]
        return (hidden_states,) if self.returns_tuple else hidden_states


@attrs.frozen(eq=False)
class Output:
    """What a `FusedModel` gives: `logits` `[1, n, vocabulary]`."""

    logits: torch.Tensor


class FusedModel(torch.nn.Module):
    """A causal language model of decoder layers each of which is given what the one before gave.

    transformers prepares masks, caches and recorded outputs around its layers; nothing of that is
    needed here.

    Args:
        embedding: of `[1, T]` token ids.
        positions: takes hidden states and positions `[1, T]`, and gives the position embeddings.
        layers: in order; joined, as by `join_layers`.
        norm: of what the last layer gave, token by token.
        head: from hidden states to logits, as it will stay.
    """

    def __init__(
        self,
        embedding: torch.nn.Module,
        positions: torch.nn.Module,
        layers: Sequence[FusedLayer],
        norm: torch.nn.Module,
        head: torch.nn.Module,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.positions = positions
        self.layers = torch.nn.ModuleList(layers)
        join_layers(layers)
        self.norm = norm
        self.head = head
        self._ending: HeadKernel | None = None
        if isinstance(norm, RMSNorm) and isinstance(head, PanelLinear):
            self._ending = HeadKernel((norm.weight, norm.eps), head.panels)

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew of its parts."""
        parts = self.embedding, self.positions, [*self.layers], self.norm, self.head
        return FusedModel, parts

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor | None = None,
        **_others: Any,
    ) -> Output:
        """`[1, T]` each; `logits_to_keep` `int64[n]`, None for all. The rest is of no effect."""
        hidden_states = self.embedding(input_ids)
        tables = self.positions(hidden_states, position_ids)
        for layer in self.layers:
            if not layer.is_done_before:
                given = layer(hidden_states, tables)
                hidden_states = given[0] if layer.returns_tuple else given
        if logits_to_keep is not None:
            hidden_states = hidden_states[:, logits_to_keep]
        if self._ending is None:
            return Output(self.head(self.norm(hidden_states)))
        return Output(self._ending.compute(hidden_states[0].contiguous())[None])


def join_layers(layers: Sequence[FusedLayer]) -> None:
    """Compute as many layers by one call as follow upon each other, have kernels and are alike.

    Args:
        layers: in the order in which they compute.
    """
    kernels = [(layer, layer.kernel()) for layer in layers]
    runs: list[list[tuple[FusedLayer, LayerKernel]]] = []
    for layer, kernel in kernels:
        if kernel is None:
            continue
        if runs and layer.follows == (runs[-1][-1][0],) and kernel.is_like(runs[-1][-1][1]):
            runs[-1].append((layer, kernel))
        else:
            runs.append([(layer, kernel)])
    for run in runs:
        (first, *others), of_run = zip(*run, strict=True)
        first.begin_run(others, of_run)


def normed(norm: torch.nn.Module, heads: torch.Tensor) -> torch.Tensor:
    """Norm `[T, H, D]` over each head or over all of them together, as the weight is for."""
    if next(norm.parameters(), next(norm.buffers())).numel() == heads.shape[2]:
        result: torch.Tensor = norm(heads)
    else:
        result = norm(heads.flatten(1)).view_as(heads)
    return result.contiguous()


def side_by_side(*linears: torch.nn.Linear) -> torch.nn.Linear:
    """One layer whose outputs are those of all, in order."""
    rows = sum(linear.out_features for linear in linears)
    has_bias = any(linear.bias is not None for linear in linears)
    joined = torch.nn.Linear(linears[0].in_features, rows, bias=has_bias, device="meta")
    joined.weight = _frozen([linear.weight for linear in linears])
    if has_bias:
        joined.bias = _frozen([_bias(linear) for linear in linears])
    return joined


def _take_turns(joined: torch.nn.Linear) -> None:
    """Give the outputs of two layers side by side in turns, `LANES` of each."""
    for each in joined.parameters():
        each.data = each.data.view(2, -1, LANES, *each.shape[1:]).transpose(0, 1).reshape_as(each)


def _bias(linear: torch.nn.Linear) -> torch.Tensor:
    bias: torch.Tensor | None = linear.bias
    return linear.weight.new_zeros(linear.out_features) if bias is None else bias


def _frozen(parts: Sequence[torch.Tensor]) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)
