"""Fewer, larger operators in place of a model's own, on a CPU.

At the few rows of a decode step, a CPU spends as long on calling operators as on what they do; and
three products with narrow matrices are slower than one with a wide one. So some kinds of modules
are replaced, each by one of `fused_modules` that computes the same in fewer passes over memory:

* an RMS norm: one pass;
* a rotary embedding whose frequencies stay: three operators;
* a gated MLP, `down(activation(gate(x)) * up(x))`: gate and up in one product, then one pass;
* attention: Q, K and V in one product, rotated where they lie, and stored and attended to from
  there;
* a decoder layer of these parts: two calls, one before attention and one after it; and where such
  layers follow upon each other with nothing in between, one call for all of them;
* a model that is an embedding, such layers, a norm and a head: without what transformers does
  around them.

What a module is, its name and class do not tell, and its parts only suggest. So the model is run
once over a few tokens, and what went into and came out of each module is kept; a replacement is
made only if it gives the same output for the same input. Whatever is not recognised stays as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeAlias

import attrs
import torch

from kvpage.attention import attending
from kvpage.fused_modules import (
    FusedAttention,
    FusedLayer,
    FusedModel,
    GatedMLP,
    Norms,
    Projections,
    RMSNorm,
    RotaryEmbedding,
    join_layers,
    normed,
)
from kvpage.kernels import cpu_rows
from kvpage.model import PagedModel
from kvpage.packed_linear import is_plain
from kvpage.probe import Call, Witness, differ

RELATIVE_ERROR = 2e-5
"""How far replacements may be off, in units of the largest output: sums in another order."""

WATCHED_TOKENS = 8

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")


def accelerate(model: PagedModel, pack: Callable[[Any], None], *, exact: bool = True) -> bool:
    """Bring a float32 model on a CPU into the form that computes fastest.

    Args:
        model: its modules are changed.
        pack: replaces the linear layers of what transformers built, once they are fused.
        exact: whether what `pack` makes differs by no more than rounding.

    Returns:
        Whether it works as before. If not, it is of no more use.
    """
    before, parts = fuse(model)
    try:
        if differ(before, _logits(model)):
            return False
        pack(model.module)
        _let_go_of_the_file(model.module)
        if parts is None:
            join_layers(_fused_layers(model))
        else:
            model.put(FusedModel(**parts()))
        after = _logits(model)
    except AttributeError:  # the family looks into its own layers
        return False
    return not (exact and differ(before, after))


def _let_go_of_the_file(module: torch.nn.Module) -> None:
    """Copy what is left of the weights that were loaded.

    Loaded weights are views of the checkpoint's file in memory. While one of them lives, be it the
    weight of a norm, all of the file stays mapped beside what has been packed.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def fuse(model: PagedModel) -> "tuple[torch.Tensor, _Parts | None]":
    """Replace what is recognised in a float32 model on a CPU, whose modules are changed.

    Returns:
        `[WATCHED_TOKENS, vocabulary]`, logits of the model as it was; and what gives the parts of a
        `FusedModel` as they are when it is called, if it would compute the same.
    """
    seen, before = _watch(model)
    # Attention takes the norms of Q and K over as they are by then.
    for make in (_norms, _rotaries, _mlps, _attentions, _layers):
        _replace(model, make, seen)
    layers = _fused_layers(model)
    for earlier, layer in pairwise(layers):
        if _nothing_lies_between(seen[earlier], seen[layer]):
            layer.follows = (earlier,)
    return before, _parts_of(model, layers, seen)


def _fused_layers(model: PagedModel) -> list[FusedLayer]:
    return [each for each in model.module.modules() if isinstance(each, FusedLayer)]


def _replace(model: PagedModel, make: "_Make", seen: "_Uses") -> None:
    """Replace each module by what `make` makes of it, if that agrees.

    Args:
        model: its modules are changed.
        make: gives what may take a module's place.
        seen: how modules were used; those that take their places are added.
    """
    for parent, name, child in list(_places(model.module)):
        use = seen.get(child)
        if use is not None:
            replacement = next((each for each in make(child, use) if _agrees(each, use)), None)
            if replacement is not None:
                setattr(parent, name, replacement.eval())
                seen[replacement] = use


def _nothing_lies_between(one: "_Use", other: "_Use") -> bool:
    """Whether the second of two modules was given what the first gave, and the same positions."""
    tables = [use.tables for use in (one, other)]
    return (
        _tensors(one.output)[0] is other.inputs
        and None not in tables
        and all(a is b for a, b in zip(*tables, strict=True))
    )


def _places(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Parent, name and module of all modules within one."""
    for parent in module.modules():
        for name, child in parent.named_children():
            yield parent, name, child


# -- watching ----------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class _Use:
    """A call of a module: what went in, what came out, and the attention calls within."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    calls: Sequence[Call]

    @property
    def inputs(self) -> torch.Tensor | None:
        """The hidden states that went in."""
        first = self.args[0] if self.args else self.kwargs.get("hidden_states")
        return first if isinstance(first, torch.Tensor) else None

    @property
    def position_embeddings(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosines and sines `[T, R]`, if that is what went in."""
        tables = self.tables
        return None if tables is None else (tables[0][0], tables[1][0])

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same as it went in, `[1, T, R]`."""
        given = self.args[1] if len(self.args) > 1 else self.kwargs.get("position_embeddings")
        if not isinstance(given, tuple) or len(given) != 2 or given[0].dim() != 3:
            return None
        return given


_Uses: TypeAlias = dict[torch.nn.Module, _Use]
_Parts: TypeAlias = Callable[[], dict[str, Any]]
_Make: TypeAlias = Callable[[torch.nn.Module, _Use], Iterator[torch.nn.Module]]


def _watch(model: PagedModel) -> tuple[_Uses, torch.Tensor]:
    """Run a model over tokens at positions from the first to the last, and see what its parts do.

    Returns:
        For each module that was called once, that call; and the logits.
    """
    witness = Witness()
    uses: dict[torch.nn.Module, list[_Use]] = {}
    with _hooked(model.module, witness, uses):
        logits = _logits(model, witness)
    return {each: of_it[0] for each, of_it in uses.items() if len(of_it) == 1}, logits


def _logits(model: PagedModel, witness: Witness | None = None) -> torch.Tensor:
    """`[WATCHED_TOKENS, vocabulary]`, of tokens at positions from the first to the last."""
    tokens = torch.arange(1, WATCHED_TOKENS + 1)
    positions = torch.linspace(0, model.max_len - 1, WATCHED_TOKENS).long()
    every = torch.arange(WATCHED_TOKENS)
    return model.logits(tokens % model.vocab_size, positions, witness or Witness(), every)


@contextmanager
def _hooked(
    module: torch.nn.Module, witness: Witness, uses: dict[torch.nn.Module, list[_Use]]
) -> Iterator[None]:
    """Note all calls of modules within this one that have no hooks of their own."""
    begun: list[int] = []

    def enter(_module: Any, _args: Any) -> None:
        begun.append(len(witness.calls))

    def leave(called: Any, args: Any, kwargs: Any, output: Any) -> None:
        use = _Use(args, kwargs, output, witness.calls[begun.pop() :])
        uses.setdefault(called, []).append(use)

    handles = []
    for each in module.modules():
        if not each._forward_hooks and not each._forward_pre_hooks:
            handles.append(each.register_forward_pre_hook(enter))
            handles.append(each.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def _agrees(module: torch.nn.Module, use: _Use) -> bool:
    """Whether a module gives in this use what the one before it gave."""
    witness = Witness()
    with attending(witness):
        try:
            output = module(*use.args, **use.kwargs)
        except (TypeError, RuntimeError, ValueError, AssertionError):
            return False  # it is called in another way, or with other shapes, than was assumed
    return _same(_tensors(use.output), _tensors(output)) and (
        [call.options for call in witness.calls] == [call.options for call in use.calls]
        and all(
            _same((one.q, one.k, one.v), (other.q, other.k, other.v))
            for one, other in zip(witness.calls, use.calls, strict=True)
        )
    )


def _tensors(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def _same(expected: Sequence[Any], actual: Sequence[Any]) -> bool:
    return len(expected) == len(actual) and all(map(_close, expected, actual))


def _close(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool((one - other).abs().max() <= RELATIVE_ERROR * one.abs().max())


# -- recognising -------------------------------------------------------------------------------


def _norms(module: torch.nn.Module, use: _Use) -> Iterator[torch.nn.Module]:
    """What an RMS norm with these parts may be: some families store `weight - 1`."""
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    numbers = (getattr(module, name, None) for name in _EPSILON_NAMES)
    eps = next((number for number in numbers if isinstance(number, float)), None)
    if weight is None or weight.dim() != 1 or parameters or eps is None or len(use.args) != 1:
        return
    yield RMSNorm(weight, eps)
    yield RMSNorm(weight + 1, eps)


@torch.inference_mode()
def _rotaries(module: torch.nn.Module, use: _Use) -> Iterator[torch.nn.Module]:
    """What a rotary embedding may be whose frequencies do not depend on how far positions go."""
    inv_freq = dict(module.named_buffers()).get("inv_freq")
    scaling = getattr(module, "attention_scaling", None)
    if inv_freq is None or inv_freq.dim() != 1 or not isinstance(scaling, float | int):
        return
    given = (*use.args, *use.kwargs.values())
    if len(given) != 2 or {*use.kwargs} - {"position_ids"}:
        return
    found = RotaryEmbedding(inv_freq, scaling)
    # It has been watched at positions up to the last.
    near = given[0], torch.arange(WATCHED_TOKENS)[None]
    if _same(_tensors(module(*near)), found(*near)):
        yield found


def _mlps(module: torch.nn.Module, use: _Use) -> Iterator[torch.nn.Module]:
    """What a gated MLP with these parts may be: which of two is the gate, and its activation."""
    linears, others = _parts(module)
    if len(linears) != 3 or len(use.args) != 1 or use.calls:
        return
    *pair, down = sorted(linears, key=lambda linear: linear.out_features == linears[0].in_features)
    activations = [None, *others]
    shapes = {(each.in_features, each.out_features) for each in pair}
    if shapes != {(down.out_features, down.in_features)}:
        return
    for gate, up in (pair, pair[::-1]):
        for activation in activations:
            yield GatedMLP(gate, up, down, activation)


def _attentions(module: torch.nn.Module, use: _Use) -> Iterator[torch.nn.Module]:
    """What an attention module with these parts may be."""
    linears, others = _parts(module)
    norms = [each for each in others if next(each.parameters(), None) is not None]
    norms += [each for each in others if isinstance(each, RMSNorm)]
    if len(linears) != 4 or len(use.calls) != 1 or len(norms) not in (0, 2):
        return
    (call,) = use.calls
    for rotates in (True, False):
        found = _projections(linears, (norms[0], norms[1]) if norms else None, rotates, use)
        if found is not None:
            (out,) = set(linears) - {found.q, found.k, found.v}
            yield FusedAttention(found, out, call)


def _layers(module: torch.nn.Module, use: _Use) -> Iterator[torch.nn.Module]:
    """What a decoder layer with these parts may be: which of its norms comes first."""
    children = list(module.children())
    attention = [each for each in children if isinstance(each, FusedAttention)]
    mlps = [each for each in children if isinstance(each, GatedMLP)]
    norms = [each for each in children if isinstance(each, RMSNorm)]
    if (len(attention), len(mlps), len(norms), len(children)) != (1, 1, 2, 4):
        return
    if len(use.args) > 1 or module._parameters:
        return
    for first, second in (norms, norms[::-1]):
        yield FusedLayer(
            (first, second), attention[0], mlps[0], returns_tuple=isinstance(use.output, tuple)
        )


def _parts_of(model: PagedModel, layers: Sequence[FusedLayer], seen: _Uses) -> _Parts | None:
    """The parts of a model, if what each was given is what another gave, and there is no more."""
    whole = seen.get(model.module)
    if whole is None or not layers or any(not layer.follows for layer in layers[1:]):
        return None
    first, last = seen[layers[0]], seen[layers[-1]]
    if first.inputs is None or first.tables is None:
        return None
    places = [each for each in _places(model.module) if each[2] in seen]

    def place(does: Callable[[_Use], bool]) -> Any:
        return next((each for each in places if does(seen[each[2]])), None)

    norm = place(lambda part: part.inputs is _tensors(last.output)[0])
    found = {
        "embedding": place(lambda part: part.output is first.inputs),
        "positions": place(lambda part: part.output is first.tables),
        "norm": norm,
        "head": norm and place(lambda part: _is_head(part, seen[norm[2]], whole)),
    }
    if None in found.values():
        return None
    parts = (*layers, *(child for _, _, child in found.values()))
    around = set(model.module.modules()) - {each for part in parts for each in part.modules()}
    if any(each not in seen and type(each) is not torch.nn.ModuleList for each in around):
        return None  # it has a hook, or is called in other passes than this one
    # Where they are, not what they are: packing replaces them, and lets go of their weights.
    named = {role: (parent, name) for role, (parent, name, _) in found.items()}
    return lambda: {
        "layers": layers,
        **{role: getattr(parent, name) for role, (parent, name) in named.items()},
    }


def _is_head(use: _Use, norm: _Use, whole: _Use) -> bool:
    """Whether a module makes the logits of what the norm gave, and nothing else happens to them."""
    pairs = (use.inputs, norm.output), (use.output, getattr(whole.output, "logits", None))
    tensors = all(isinstance(each, torch.Tensor) for pair in pairs for each in pair)
    return tensors and all(torch.equal(*pair) for pair in pairs)


def _parts(
    module: torch.nn.Module,
) -> tuple[list[torch.nn.Linear], list[torch.nn.Module]]:
    """The plain linear layers of a module, if it has no parameters but those of its children."""
    if module._parameters:
        return [], []
    children = list(module.children())
    linears = [each for each in children if is_plain(each)]
    return linears, [each for each in children if not is_plain(each)]


@torch.inference_mode()
def _projections(
    linears: Sequence[torch.nn.Linear], norms: Norms | None, rotates: bool, use: _Use
) -> Projections | None:
    """Which of the layers make Q, K and V; None if it cannot be told."""
    inputs, tables, (call,) = use.inputs, use.position_embeddings, use.calls
    if inputs is None or (rotates and tables is None):
        return None
    q_norm, k_norm = norms or (None, None)

    def makes(linear: torch.nn.Linear, expected: torch.Tensor, norm: Any, *, turned: bool) -> bool:
        if linear.out_features != expected[0].numel() or linear.in_features != inputs.shape[-1]:
            return False
        heads: torch.Tensor = linear(inputs).view_as(expected)
        heads = heads if norm is None else normed(norm, heads)
        if turned and tables is not None:
            cpu_rows.rotate(heads, *tables)
        return _close(expected, heads)

    found = []
    for expected, norm, turned in (
        (call.v, None, False),
        (call.q, q_norm, rotates),
        (call.k, k_norm, rotates),
    ):
        rest = (each for each in linears if each not in found)
        match = next((each for each in rest if makes(each, expected, norm, turned=turned)), None)
        if match is None:
            return None
        found.append(match)
    v, q, k = found
    return Projections(q, k, v, norms, rotates)
