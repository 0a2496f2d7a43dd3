"""Vectors and register tiles for numba, written as LLVM IR.

numba has no vector type, and LLVM left to itself neither keeps a tile of sums in registers nor
uses 512-bit registers on every CPU that has them. So the few inner loops that decide the speed of
`cpu.py` are emitted here instruction by instruction; all else is ordinary numba code.

Memory is passed as integer addresses, so that one compiled kernel serves every shape. An argument
`pool` is any value of the type that says how a pool stores its numbers: float32 for float32,
uint16 for bfloat16, int16 for float16.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import default_manager
from numba.extending import intrinsic, models, overload, register_model

# The objects of numba and llvmlite have no types to speak of.
Builder: TypeAlias = Any
Value: TypeAlias = Any
Emitter: TypeAlias = Callable[..., Value]

_HAS_512_BITS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if _HAS_512_BITS else 8
# A tile keeps TILE_ROWS x TILE_VECTORS sums: 16 of 32 registers, or 12 of 16.
TILE_ROWS = 4
TILE_VECTORS = 4 if _HAS_512_BITS else 3

CACHE_LINE_BYTES = 64

_GROUP = 4
_BYTES_PER_FLOAT = 4
_BYTES_PER_ADDRESS = 8
_I1, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
_F32 = ir.FloatType()
_FLOATS = ir.VectorType(_F32, LANES)
_INTS = ir.VectorType(_I32, LANES)
_FOUR_INTS = ir.VectorType(_I32, _GROUP)
_LANE_NUMBERS = ir.Constant(_INTS, list(range(LANES)))

# bfloat16 is the upper half of a float32; float16 is a type that LLVM knows.
_STORED = {types.float32: _F32, types.uint16: _I16, types.int16: ir.HalfType()}
_BYTES_STORED = {types.float32: 4, types.uint16: 2, types.int16: 2}
_SUFFIX = {types.float32: "f32", types.uint16: "i16", types.int16: "f16"}


class _VectorType(types.Type):  # type: ignore[misc]
    """The numba type of `LANES` float32 numbers in a register."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _FLOATS)


_VECTOR = _VectorType()
_INT = types.int64
_ANY = object()


def _emitted(result: Any, *arguments: Any) -> Callable[[Emitter], Callable[..., Any]]:
    """Make a numba function of one that emits its instructions.

    Args:
        result: the numba type of what is emitted.
        arguments: numba types. Where one is `_ANY` the emitter is given the type, not the value.
    """

    def decorate(emit: Emitter) -> Callable[..., Any]:
        def typed(_typing: Any, *given: Any) -> tuple[Any, Emitter]:
            def generate(_context: Any, builder: Builder, _signature: Any, values: Any) -> Value:
                known = zip(arguments, given, values, strict=True)
                emitted = emit(builder, *(t if a is _ANY else v for a, t, v in known))
                return cgutils.voidptr_t(None) if result is types.none else emitted

            wanted = (t if a is _ANY else a for a, t in zip(arguments, given, strict=True))
            return result(*wanted), generate

        # numba reads the number of arguments off the signature; `builder` stands for the context.
        typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        typed.__name__ = emit.__name__
        typed.__doc__ = emit.__doc__
        return cast(Callable[..., Any], intrinsic(typed))

    return decorate


def _llvm(builder: Builder, name: str, result: Any, *arguments: Value) -> Value:
    """Call an intrinsic function of LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}")
    return builder.call(function, arguments)


# -- memory ------------------------------------------------------------------------------------


def _pointer(builder: Builder, address: Value, to: Any) -> Value:
    return builder.inttoptr(address, ir.PointerType(to))


def _load_floats(builder: Builder, address: Value) -> Value:
    return builder.load(_pointer(builder, address, _FLOATS), align=_BYTES_PER_FLOAT)


def _store_floats(builder: Builder, address: Value, floats: Value) -> None:
    builder.store(floats, _pointer(builder, address, _FLOATS), align=_BYTES_PER_FLOAT)


def _load_address(builder: Builder, addresses: Value, index: int) -> Value:
    at = builder.add(addresses, _I64(index * _BYTES_PER_ADDRESS))
    return builder.load(_pointer(builder, at, _I64), align=_BYTES_PER_ADDRESS)


def _as_floats(builder: Builder, stored: Value, pool: Any, floats: Any, ints: Any) -> Value:
    """Stored numbers, one or a vector of them, as float32."""
    if pool == types.float32:
        return stored
    if pool == types.int16:
        return builder.fpext(stored, floats)
    high_half = ir.Constant(ints, 16 if ints is _I32 else [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(stored, ints), high_half), floats)


def _load_stored(builder: Builder, address: Value, pool: Any, mask: Value | None = None) -> Value:
    """`LANES` numbers of a pool as float32; lanes outside of the mask are not read, but zero."""
    kind = ir.VectorType(_STORED[pool], LANES)
    at = _pointer(builder, address, kind)
    align = _BYTES_STORED[pool]
    if mask is None:
        stored = builder.load(at, align=align)
    else:
        name = f"masked.load.v{LANES}{_SUFFIX[pool]}.p0"
        stored = _llvm(builder, name, kind, at, _I32(align), mask, ir.Constant(kind, None))
    return _as_floats(builder, stored, pool, _FLOATS, _INTS)


def _broadcast_stored(builder: Builder, address: Value, pool: Any) -> Value:
    """One number of a pool in every lane."""
    stored = builder.load(_pointer(builder, address, _STORED[pool]), align=_BYTES_STORED[pool])
    return _broadcast(builder, _as_floats(builder, stored, pool, _F32, _I32))


def _broadcast(builder: Builder, scalar: Value) -> Value:
    kind = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * LANES))


@_emitted(_VECTOR, _INT)
def load(builder: Builder, address: Value) -> Value:
    """`LANES` floats from an address."""
    return _load_floats(builder, address)


@_emitted(types.none, _INT, _VECTOR)
def store(builder: Builder, address: Value, vector: Value) -> None:
    """`LANES` floats to an address."""
    _store_floats(builder, address, vector)


# How LLVM names the caches that something is wanted in.
FIRST_CACHE, SECOND_CACHE = 3, 2


def _prefetch(builder: Builder, address: Value, cache: int = FIRST_CACHE) -> None:
    """Ask for a cache line that is read soon. Any address is harmless."""
    at = _pointer(builder, address, ir.IntType(8))
    read, data = _I32(0), _I32(1)
    _llvm(builder, "prefetch.p0", ir.VoidType(), at, read, _I32(cache), data)


@_emitted(types.none, _INT)
def prefetch(builder: Builder, address: Value) -> None:
    """Ask for a cache line that is read soon."""
    _prefetch(builder, address)


@_emitted(_INT, _INT, _INT)
def add_atomically(builder: Builder, address: Value, term: Value) -> Value:
    """Add to the integer that several threads share; what it was before."""
    return builder.atomic_rmw("add", _pointer(builder, address, _I64), term, "seq_cst")


@_emitted(types.none, _INT, _INT, _INT, _INT)
def call_parallel(
    builder: Builder, parallel: Value, entry: Value, job: Value, threads: Value
) -> None:
    """Call OpenMP's `GOMP_parallel` at an address: `entry(job)` on so many threads at once."""
    arguments = [_I64, _I64, _I32, _I32]
    function = builder.inttoptr(parallel, ir.PointerType(ir.FunctionType(ir.VoidType(), arguments)))
    builder.call(function, [entry, job, builder.trunc(threads, _I32), _I32(0)])


@_emitted(types.none, _INT, _INT)
def call(builder: Builder, entry: Value, argument: Value) -> None:
    """Call a C function at an address: `entry(argument)`."""
    function = builder.inttoptr(entry, ir.PointerType(ir.FunctionType(ir.VoidType(), [_I64])))
    builder.call(function, [argument])


def typed_pointer(to: Any) -> Callable[..., Any]:
    """A numba function that makes of an address a pointer for `numba.carray`."""

    @_emitted(types.CPointer(to), _INT)
    def pointer(builder: Builder, address: Value) -> Value:
        return builder.inttoptr(address, default_manager[types.CPointer(to)].get_value_type())

    return pointer


# -- arithmetic --------------------------------------------------------------------------------


def _fused(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """`a * b + c`, in one instruction where the CPU has it."""
    return _llvm(builder, f"fmuladd.v{LANES}f32", _FLOATS, a, b, c)


def _floats(value: float) -> Value:
    return ir.Constant(_FLOATS, [value] * LANES)


@_emitted(_VECTOR, types.float32)
def splat(builder: Builder, scalar: Value) -> Value:
    """One number in every lane."""
    return _broadcast(builder, scalar)


@_emitted(_VECTOR, _VECTOR, _VECTOR)
def maximum(builder: Builder, a: Value, b: Value) -> Value:
    """The larger one of each lane, `b` where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@_emitted(_VECTOR, _VECTOR, _VECTOR, _VECTOR, _VECTOR)
def select_less(builder: Builder, a: Value, b: Value, yes: Value, no: Value) -> Value:
    """`yes` in the lanes where `a < b`, else `no`."""
    return builder.select(builder.fcmp_ordered("<", a, b), yes, no)


@_emitted(_VECTOR)
def lane_numbers(_builder: Builder) -> Value:
    """0, 1, 2, ..."""
    return ir.Constant(_FLOATS, [float(i) for i in range(LANES)])


@_emitted(_VECTOR, _VECTOR)
def magnitude(builder: Builder, x: Value) -> Value:
    """The absolute value of each lane."""
    return builder.select(builder.fcmp_ordered("<", x, _floats(0.0)), builder.fneg(x), x)


@_emitted(_VECTOR, _VECTOR)
def exp(builder: Builder, x: Value) -> Value:
    """The exponential of numbers up to 0, within 2e-7 of its value; 0 below -87.

    The range reduction and polynomial of `expf` in Cephes (Moshier, 1989).
    """
    exponent = builder.fmul(x, _floats(1.44269504))
    n = _llvm(builder, f"roundeven.v{LANES}f32", _FLOATS, exponent)
    # ln 2 in two parts: the first has so few bits that its product with n is exact.
    rest = _fused(builder, n, _floats(-0.693359375), x)
    rest = _fused(builder, n, _floats(2.12194440e-4), rest)
    series = _floats(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        series = _fused(builder, series, rest, _floats(coefficient))
    series = _fused(builder, series, builder.fmul(rest, rest), rest)
    series = builder.fadd(series, _floats(1.0))
    shift = builder.shl(builder.fptosi(n, _INTS), ir.Constant(_INTS, [23] * LANES))
    scaled = builder.add(builder.bitcast(series, _INTS), shift)
    tiny = builder.fcmp_ordered("<", x, _floats(-87.0))
    return builder.select(tiny, _floats(0.0), builder.bitcast(scaled, _FLOATS))


def _folded(builder: Builder, vector: Value, fold: Emitter) -> Value:
    """All lanes made one by halving; the order never depends on the data."""
    width = LANES
    while width > 1:
        width //= 2
        upper = [(i + width) % LANES for i in range(LANES)]
        swapped = builder.shuffle_vector(vector, vector, ir.Constant(_INTS, upper))
        vector = fold(vector, swapped)
    return builder.extract_element(vector, _I32(0))


@_emitted(types.float32, _VECTOR)
def sum_of_lanes(builder: Builder, vector: Value) -> Value:
    """The sum of all lanes."""
    return _folded(builder, vector, builder.fadd)


@_emitted(types.float32, _VECTOR)
def largest_lane(builder: Builder, vector: Value) -> Value:
    """The largest lane."""
    return _folded(
        builder, vector, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)
    )


def _operate(symbol: Callable[[Any, Any], Any], instruction: str) -> None:
    """Give vectors one of Python's operators."""

    @_emitted(_VECTOR, _VECTOR, _VECTOR)
    def operate(builder: Builder, a: Value, b: Value) -> Value:
        return getattr(builder, instruction)(a, b)

    def typed(a: Any, b: Any) -> Callable[[Any, Any], Any] | None:
        if not (isinstance(a, _VectorType) and isinstance(b, _VectorType)):
            return None

        def implementation(a: Any, b: Any) -> Any:
            return operate(a, b)

        return implementation

    overload(symbol)(typed)


_operate(operator.add, "fadd")
_operate(operator.sub, "fsub")
_operate(operator.mul, "fmul")
_operate(operator.truediv, "fdiv")


# -- tiles of sums in registers ----------------------------------------------------------------


class _Sums:
    """Running sums, one vector each. LLVM turns the stack slots into registers."""

    def __init__(self, builder: Builder, start: Sequence[Value]) -> None:
        self._builder = builder
        self._slots = [cgutils.alloca_once(builder, _FLOATS) for _ in start]
        for slot, value in zip(self._slots, start, strict=True):
            builder.store(value, slot)

    def add_product(self, index: int, a: Value, b: Value) -> None:
        slot = self._slots[index]
        total = _fused(self._builder, a, b, self._builder.load(slot))
        self._builder.store(total, slot)

    def values(self) -> list[Value]:
        return [self._builder.load(slot) for slot in self._slots]


@contextmanager
def _counted(builder: Builder, count: Value) -> Iterator[Value]:
    with cgutils.for_range(builder, count, intp=_I64) as loop:
        yield loop.index


def _advanced(builder: Builder, address: Value, index: Value, stride_bytes: int) -> Value:
    return builder.add(address, builder.mul(index, _I64(stride_bytes)))


def _offset(builder: Builder, address: Value, offset_bytes: int) -> Value:
    return builder.add(address, _I64(offset_bytes)) if offset_bytes else address


def _sums_of_four(builder: Builder, vectors: list[Value]) -> Value:
    """The sum of each of four vectors, in a vector of four.

    Adding neighbouring lanes of two vectors leaves half as many vectors with sums of both; shuffles
    that cross groups of four lanes are the slow ones, so the groups are added last.
    """
    while len(vectors) > 1:
        even, odd = (ir.Constant(_INTS, _pairs_within_groups(parity)) for parity in (0, 1))
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    groups = [
        builder.shuffle_vector(*vectors * 2, ir.Constant(_FOUR_INTS, list(range(at, at + _GROUP))))
        for at in range(0, LANES, _GROUP)
    ]
    while len(groups) > 1:
        groups = [builder.fadd(a, b) for a, b in zip(groups[::2], groups[1::2], strict=True)]
    return groups[0]


def _pairs_within_groups(parity: int) -> list[int]:
    """Of each group of four lanes, the even or the odd ones of two vectors."""
    return [
        vector + group + lane
        for group in range(0, LANES, _GROUP)
        for vector in (0, LANES)
        for lane in range(parity, _GROUP, 2)
    ]


def _prefetch_bytes(builder: Builder, address: Value, count: int, cache: int) -> None:
    for at in range(0, count, CACHE_LINE_BYTES):
        _prefetch(builder, _offset(builder, address, at), cache)


# How many keys before its use a row is asked for: into the second cache, later into the first. One
# core alone can wait for few lines in the first.
FAR_AHEAD, AHEAD = 32, 16
KEYS_AT_ONCE = 4


def _ask_for_rows(
    builder: Builder, rows: Value, n: Value, together: Value, offset: Value, count: int
) -> None:
    """While a part of row `n` is used, ask for as much of what will be used some rows later.

    Not for the same part: memory is fastest in the order of addresses. Each of `together` rows, a
    power of two, asks for a share of what lies at `rows`; all parts of all of them, for everything.

    Args:
        builder: of instructions.
        rows: address of int64 addresses.
        n: number of the row.
        together: so many rows, from a multiple of it on, lie one behind another.
        offset: bytes from a row to the part.
        count: bytes of the part.
    """
    place = builder.and_(n, builder.sub(together, _I64(1)))
    first = _advanced(builder, rows, builder.sub(n, place), _BYTES_PER_ADDRESS)
    at = builder.add(builder.mul(offset, together), builder.mul(place, _I64(count)))
    for ahead, cache in ((FAR_AHEAD, SECOND_CACHE), (AHEAD, FIRST_CACHE)):
        row = _load_address(builder, first, ahead)
        _prefetch_bytes(builder, builder.add(row, at), count, cache)


def dot_products(heads: int) -> Callable[..., Any]:
    """Make a numba function: dot products of so many queries with `KEYS_AT_ONCE` rows of a pool.

    Its arguments are the address of the queries float32[heads, dims] (dims padded with zeros to a
    multiple of `LANES`) and the bytes from one to the next, the address of the rows
    int64[KEYS_AT_ONCE], the bytes from a row to its first number, dims, the address of the result
    float32[heads, KEYS_AT_ONCE] and the bytes from head to head, how many rows are `together` for
    `_ask_for_rows` (at most `KEYS_AT_ONCE`), and the pool.
    """

    @_emitted(types.none, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _ANY)
    def products(
        builder: Builder,
        q: Value,
        q_bytes: Value,
        rows: Value,
        offset: Value,
        dims: Value,
        to: Value,
        to_bytes: Value,
        together: Value,
        pool: Any,
    ) -> None:
        queries = [builder.add(q, builder.mul(q_bytes, _I64(head))) for head in range(heads)]
        keys = [builder.add(_load_address(builder, rows, i), offset) for i in range(KEYS_AT_ONCE)]
        sums = _Sums(builder, [_floats(0.0)] * (heads * KEYS_AT_ONCE))
        chunk_bytes = LANES * _BYTES_STORED[pool]

        def add(chunk: Value, mask: Value | None) -> None:
            chunks = [
                _load_floats(builder, _advanced(builder, query, chunk, LANES * _BYTES_PER_FLOAT))
                for query in queries
            ]
            for i, key in enumerate(keys):
                numbers = _load_stored(
                    builder, _advanced(builder, key, chunk, chunk_bytes), pool, mask
                )
                for head in range(heads):
                    sums.add_product(head * KEYS_AT_ONCE + i, numbers, chunks[head])

        whole = builder.sdiv(dims, _I64(LANES))
        with _counted(builder, builder.sdiv(whole, _I64(2))) as pair:
            chunk = builder.mul(pair, _I64(2))
            at = builder.add(offset, builder.mul(chunk, _I64(chunk_bytes)))
            for i in range(KEYS_AT_ONCE):
                _ask_for_rows(builder, rows, _I64(i), together, at, 2 * chunk_bytes)
            add(chunk, None)
            add(builder.add(chunk, _I64(1)), None)
        with builder.if_then(builder.trunc(whole, _I1)):
            add(builder.sub(whole, _I64(1)), None)
        left = builder.srem(dims, _I64(LANES))
        with builder.if_then(builder.icmp_signed("!=", left, _I64(0))):
            add(whole, _first_lanes(builder, left))
        found = sums.values()
        for head in range(heads):
            first = head * KEYS_AT_ONCE
            four = _sums_of_four(builder, found[first : first + KEYS_AT_ONCE])
            at = builder.add(to, builder.mul(to_bytes, _I64(head)))
            builder.store(four, _pointer(builder, at, four.type), align=_BYTES_PER_FLOAT)

    return products


def _first_lanes(builder: Builder, count: Value) -> Value:
    """A mask of the lanes below `count`."""
    return builder.icmp_signed("<", _LANE_NUMBERS, _broadcast(builder, builder.trunc(count, _I32)))


VALUE_VECTORS = 4


def weighted_rows(heads: int, vectors: int) -> Callable[..., Any]:
    """Make a numba function: add rows of a pool, each times a weight of so many heads, to sums.

    Its arguments are the address of the weights float32[heads, count] and the bytes from head to
    head, the address of the rows int64[count], count, the bytes from a row to its first number, how
    many numbers there are from there (read if `vectors` is 1: then the last may be fewer than a
    vector), the address of the sums float32[heads, vectors * LANES] and the bytes from head to
    head, how many rows are `together` for `_ask_for_rows`, and the pool.
    """

    @_emitted(types.none, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _ANY)
    def add_weighted(
        builder: Builder,
        weights: Value,
        weights_bytes: Value,
        rows: Value,
        count: Value,
        offset: Value,
        dims: Value,
        to: Value,
        to_bytes: Value,
        together: Value,
        pool: Any,
    ) -> None:
        mask = _first_lanes(builder, dims) if vectors == 1 else None
        vector_bytes = LANES * _BYTES_STORED[pool]
        lines = [builder.add(to, builder.mul(to_bytes, _I64(head))) for head in range(heads)]
        firsts = [
            builder.add(weights, builder.mul(weights_bytes, _I64(head))) for head in range(heads)
        ]
        sums = _Sums(builder, [v for line in lines for v in _load_line(builder, line, vectors)])
        with _counted(builder, count) as n:
            place = _advanced(builder, rows, n, _BYTES_PER_ADDRESS)
            _ask_for_rows(builder, rows, n, together, offset, vectors * vector_bytes)
            row = builder.add(_load_address(builder, place, 0), offset)
            shares = [
                _broadcast_stored(
                    builder, _advanced(builder, first, n, _BYTES_PER_FLOAT), types.float32
                )
                for first in firsts
            ]
            for j in range(vectors):
                numbers = _load_stored(builder, _offset(builder, row, j * vector_bytes), pool, mask)
                for head, share in enumerate(shares):
                    sums.add_product(head * vectors + j, numbers, share)
        found = sums.values()
        for head, line in enumerate(lines):
            for j in range(vectors):
                at = _offset(builder, line, j * LANES * _BYTES_PER_FLOAT)
                _store_floats(builder, at, found[head * vectors + j])

    return add_weighted


def _scores_tile(vectors: int, stride: int) -> Callable[..., Any]:
    """Make a numba function: `TILE_ROWS` keys times `vectors * LANES` queries, summed over dims."""

    @_emitted(types.none, _INT, _INT, _INT, _INT, _INT, _ANY)
    def scores(
        builder: Builder, rows: Value, offset: Value, dims: Value, q: Value, to: Value, pool: Any
    ) -> None:
        keys = [builder.add(_load_address(builder, rows, i), offset) for i in range(TILE_ROWS)]
        sums = _Sums(builder, [_floats(0.0)] * (TILE_ROWS * vectors))
        with _counted(builder, dims) as d:
            line = _advanced(builder, q, d, stride * _BYTES_PER_FLOAT)
            queries = _load_line(builder, line, vectors)
            for i, key in enumerate(keys):
                at = _advanced(builder, key, d, _BYTES_STORED[pool])
                number = _broadcast_stored(builder, at, pool)
                for j in range(vectors):
                    sums.add_product(i * vectors + j, number, queries[j])
        _store_tile(builder, sums.values(), to, vectors, stride)

    return scores


def _load_line(builder: Builder, line: Value, vectors: int) -> list[Value]:
    step = LANES * _BYTES_PER_FLOAT
    return [_load_floats(builder, _offset(builder, line, j * step)) for j in range(vectors)]


def _store_tile(
    builder: Builder, tile: Sequence[Value], to: Value, vectors: int, stride: int
) -> None:
    for index, vector in enumerate(tile):
        row, column = divmod(index, vectors)
        offset_bytes = (row * stride + column * LANES) * _BYTES_PER_FLOAT
        _store_floats(builder, _offset(builder, to, offset_bytes), vector)


def _values_tile(tile_dims: int, vectors: int, stride: int) -> Callable[..., Any]:
    """Make a numba function: `to = to * faded + sum over keys of value * weight`, for a tile."""

    @_emitted(types.none, _INT, _INT, _INT, _INT, _INT, _INT, _ANY)
    def add_values(
        builder: Builder,
        weights: Value,
        rows: Value,
        count: Value,
        offset: Value,
        faded: Value,
        to: Value,
        pool: Any,
    ) -> None:
        fade = _load_line(builder, faded, vectors)
        lines = [_offset(builder, to, i * stride * _BYTES_PER_FLOAT) for i in range(tile_dims)]
        before = [
            builder.fmul(part, fade[j])
            for line in lines
            for j, part in enumerate(_load_line(builder, line, vectors))
        ]
        sums = _Sums(builder, before)
        with _counted(builder, count) as n:
            line = _advanced(builder, weights, n, stride * _BYTES_PER_FLOAT)
            shares = _load_line(builder, line, vectors)
            row = builder.add(
                _load_address(builder, _advanced(builder, rows, n, _BYTES_PER_ADDRESS), 0), offset
            )
            for i in range(tile_dims):
                at = _offset(builder, row, i * _BYTES_STORED[pool])
                number = _broadcast_stored(builder, at, pool)
                for j in range(vectors):
                    sums.add_product(i * vectors + j, number, shares[j])
        _store_tile(builder, sums.values(), to, vectors, stride)

    return add_values


# Queries of a tile lie side by side in lanes: lines of QUERY_LANES floats, one or two tiles wide.
QUERY_LANES = 64 if _HAS_512_BITS else 48

# Arguments: addresses of int64[TILE_ROWS] rows, bytes from a row to its first number, dims,
# addresses of the queries float32[dims, QUERY_LANES] and of the scores float32[TILE_ROWS,
# QUERY_LANES], pool.
scores_wide = _scores_tile(TILE_VECTORS, QUERY_LANES)
scores_narrow = _scores_tile(1, QUERY_LANES)

# Arguments: addresses of the weights float32[count, QUERY_LANES] and int64[count] rows, count,
# bytes from a row to its first number, addresses of the factors float32[QUERY_LANES] for what is
# there already and of the sums float32[dims, QUERY_LANES], pool. One dim at a time, or TILE_ROWS.
add_values_wide = _values_tile(TILE_ROWS, TILE_VECTORS, QUERY_LANES)
add_values_wide_1 = _values_tile(1, TILE_VECTORS, QUERY_LANES)
add_values_narrow = _values_tile(TILE_ROWS, 1, QUERY_LANES)
add_values_narrow_1 = _values_tile(1, 1, QUERY_LANES)


# -- tiles of a matrix product -----------------------------------------------------------------

PANEL_VECTORS = 2
PANEL = PANEL_VECTORS * LANES
"""Outputs of a product that lie side by side in packed weights: `float32[inputs, PANEL]`."""


def _widened(builder: Builder, address: Value) -> Value:
    """`LANES` numbers from int8 as float32."""
    kind = ir.VectorType(ir.IntType(8), LANES)
    stored = builder.load(_pointer(builder, address, kind), align=1)
    return builder.sitofp(builder.sext(stored, _INTS), _FLOATS)


@_emitted(_VECTOR, _INT)
def load_bytes(builder: Builder, address: Value) -> Value:
    """`LANES` numbers from int8 at an address."""
    return _widened(builder, address)


def stack_floats(count: int) -> Callable[..., Any]:
    """Make a numba function: the address of so many floats that live as long as its caller."""

    @_emitted(_INT)
    def floats(builder: Builder) -> Value:
        place = cgutils.alloca_once(builder, _F32, size=_I64(count))
        return builder.ptrtoint(place, _I64)

    return floats


def product_tile(rows: int, *, of_bytes: bool = False) -> Callable[..., Any]:
    """Make a numba function: `to = start + x @ panel` for so many rows.

    Each output is summed over the inputs in their order, so what a row gives does not depend on
    how many rows a tile has.

    Its arguments are the address of `x` float32[rows, count] and the bytes from row to row, the
    address of the panel float32[count, PANEL], count, the addresses of `start` and of `to`
    float32[rows, PANEL], each with the bytes from row to row, and what to ask memory for in the
    meantime: an address and the bytes from one input to the next.

    Args:
        rows: of `x`.
        of_bytes: the panel is int8[count, PANEL].
    """
    bytes_per_weight = 1 if of_bytes else _BYTES_PER_FLOAT
    load_weights = _widened if of_bytes else _load_floats

    @_emitted(types.none, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _INT)
    def product(
        builder: Builder,
        x: Value,
        x_row_bytes: Value,
        panel: Value,
        count: Value,
        start: Value,
        start_row_bytes: Value,
        to: Value,
        to_row_bytes: Value,
        ahead: Value,
        ahead_bytes: Value,
    ) -> None:
        def line(address: Value, row_bytes: Value, row: int) -> Value:
            return builder.add(address, builder.mul(row_bytes, _I64(row)))

        begin = [
            vector
            for row in range(rows)
            for vector in _load_line(builder, line(start, start_row_bytes, row), PANEL_VECTORS)
        ]
        inputs = [line(x, x_row_bytes, row) for row in range(rows)]
        sums = _Sums(builder, begin)
        with _counted(builder, count) as k:
            later = builder.add(ahead, builder.mul(ahead_bytes, k))
            _prefetch(builder, later, SECOND_CACHE)
            place = _advanced(builder, panel, k, PANEL * bytes_per_weight)
            weights = [
                load_weights(builder, _offset(builder, place, j * LANES * bytes_per_weight))
                for j in range(PANEL_VECTORS)
            ]
            for row in range(rows):
                at = _advanced(builder, inputs[row], k, _BYTES_PER_FLOAT)
                number = _broadcast_stored(builder, at, types.float32)
                for j in range(PANEL_VECTORS):
                    sums.add_product(row * PANEL_VECTORS + j, number, weights[j])
        tile = sums.values()
        for row in range(rows):
            for j in range(PANEL_VECTORS):
                at = _offset(builder, line(to, to_row_bytes, row), j * LANES * _BYTES_PER_FLOAT)
                _store_floats(builder, at, tile[row * PANEL_VECTORS + j])

    return product
