"""Compiles variants of the Triton kernels for GPUs that are not there, and reads what they cost.

    python tests/kernels/variants.py           the table of docs/reference/kernel.md
    python tests/kernels/variants.py --names   the names of all variants, one a line
    python tests/kernels/variants.py --json sm_90/decode sm_80/decode    some, one JSON a line
    python tests/kernels/variants.py --batches 1 2 16    how many variants steps of these sizes need

The arguments are made by the launchers' own functions from tensors without memory, so what is
compiled here is what a launch would compile. Registers and spills of NVIDIA come from the tools
in Triton's wheel, those of AMD from the assembly.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from kvpage.kernels import cache_write, paged_attention
from kvpage.kernels.arguments import AttentionCall
from kvpage.kernels.device_work import Launch
from kvpage.kernels.work import AttentionBatch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FAMILIES: dict[str, paged_attention.GpuFamily] = {
    "sm_80": "mma",
    "sm_90": "wgmma",
    "gfx942": "amd",
}
TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}
BF16 = torch.bfloat16


@attrs.frozen
class Model:
    """What selects a variant: an attention layer, a pool, and the options of its calls."""

    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False


@attrs.frozen
class Cost:
    """What a compiled variant takes of a GPU.

    Attributes:
        registers: of a thread; on AMD, vector registers.
        spills: instructions that spill registers to memory, or on AMD registers so spilled
            (scalar registers, which spill to vector registers there, not counted).
        shared_bytes: shared memory of a program.
    """

    registers: int
    spills: int
    shared_bytes: int


LLAMA = Model((32, 8), (128, 128))
MODELS = {
    "": LLAMA,
    ", block 128": attrs.evolve(LLAMA, block_size=128),
    ", fp16": attrs.evolve(LLAMA, dtype=torch.float16),
    ", int8 pools": attrs.evolve(LLAMA, kv_dtype=torch.int8),
    ", e5m2 pools": attrs.evolve(LLAMA, kv_dtype=torch.float8_e5m2),
    ", e4m3 pools": attrs.evolve(LLAMA, kv_dtype=torch.float8_e4m3fn),
    ", d64 9/3 heads": Model((9, 3), (64, 64)),
    ", d64 window sinks": Model((64, 8), (64, 64), window=128, sinks=True),
    ", d256 window softcap": Model((8, 4), (256, 256), window=4096, softcap=50.0),
    ", d192/128": Model((16, 16), (192, 128)),
    ", d80 alibi": Model((32, 32), (80, 80), alibi=True),
    ", fp32 d64": Model((9, 3), (64, 64), dtype=torch.float32),
}
KERNELS = ("decode", "extend", "merge", "write")
SMALL_KERNELS = ("merge", "write")
"""Not worth compiling for every model."""


def variants() -> Iterator[str]:
    """The names of all variants, `target/kernel, model`."""
    for target in TARGETS:
        for kernel in KERNELS:
            for model in MODELS:
                if target == "sm_80" and "e4m3" in model:
                    continue  # Triton refuses it; see quantisation.fp8_dtype
                if kernel not in SMALL_KERNELS or model in {"", ", int8 pools"}:
                    yield f"{target}/{kernel}{model}"


def compile_variant(name: str) -> Cost:
    """Compile a variant and read its cost."""
    target, kernel, model = re.fullmatch(r"(\w+)/(\w+)(.*)", name).groups()  # type: ignore[union-attr]
    function, arguments, options = launch_of(kernel, MODELS[model], target)
    compiled = triton.compile(
        source(function, arguments), target=TARGETS[target], options=dict(options)
    )
    if target.startswith("gfx"):
        return amd_cost(compiled.asm["amdgcn"], compiled.metadata.shared)
    return nvidia_cost(compiled.asm["cubin"], compiled.metadata.shared)


def launch_of(kernel: str, model: Model, target: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A kernel, its arguments by name, and its options, as the launchers would have them."""
    call = call_of(model)
    k = meta(8, *call.k_pool.shape[1:], dtype=model.dtype)
    v = meta(8, *call.v_pool.shape[1:], dtype=model.dtype)
    if kernel == "write":
        slots = meta(8, dtype=torch.int64)
        arguments = cache_write.write_arguments(
            k, v, call.k_pool, call.v_pool, slots, call.kv_scales
        )
        return cache_write._write, arguments, cache_write.COMPILE_OPTIONS
    tilings = paged_attention.default_tilings(call, FAMILIES[target])
    shape = tilings.shape(call.group_size, model.window)
    tiling, cut = (tilings.extend, shape.extend) if kernel == "extend" else (
        tilings.decode, shape.decode)  # fmt: skip
    launch = Launch(meta(4, 8, dtype=torch.int32), meta(4, 4, dtype=torch.int32), 4, cut.queries)
    out = meta(8, call.num_heads, call.value_dim, dtype=model.dtype)
    partials = paged_attention.partial_arguments(call, launch)
    if kernel == "merge":
        arguments = paged_attention.merge_arguments(call, out, launch)
        return paged_attention._merge, arguments | partials, paged_attention.COMMON_OPTIONS
    table = meta(64, dtype=torch.int32)
    arguments = paged_attention.attend_arguments(call, out, table, launch, tiling)
    options = paged_attention.compile_options(tiling)
    return paged_attention._attend, arguments | partials, options


def call_of(model: Model) -> AttentionCall:
    """A call of the model's attention layer, on tensors without memory."""
    num_heads, num_kv_heads = model.heads
    kv_dtype = model.kv_dtype or model.dtype
    scales = (meta(num_kv_heads),) * 2 if kv_dtype.itemsize == 1 else None
    nobody = np.zeros(0, np.int32)
    return AttentionCall(
        meta(8, num_heads, model.dims[0], dtype=model.dtype),
        meta(1024, num_kv_heads, model.dims[0], dtype=kv_dtype),
        meta(1024, num_kv_heads, model.dims[1], dtype=kv_dtype),
        AttentionBatch(np.zeros((1, 1), np.int32), nobody, nobody, nobody, model.block_size),
        scale=0.1,
        window=model.window,
        softcap=model.softcap,
        sinks=meta(num_heads) if model.sinks else None,
        alibi_slopes=meta(num_heads) if model.alibi else None,
        kv_scales=(scales[0], scales[1]) if scales else None,
    )


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def source(function: Any, arguments: Mapping[str, Any]) -> ASTSource:
    """The source of a variant, with the types and alignments that a launch would find."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(function.params):
        value = arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]  # as of all that torch allocates
        elif parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    return ASTSource(function, signature, constants, attributes)


def nvidia_cost(cubin: bytes, shared_bytes: int) -> Cost:
    """Registers from the cubin's header, spills from its code: loads and stores of local memory."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = output_of(tools / "cuobjdump", "-res-usage", file.name)
        code = output_of(tools / "nvdisasm", "-c", file.name)
    registers = max(int(n) for n in re.findall(r"REG:(\d+)", usage))
    return Cost(registers, len(re.findall(r"\b(?:STL|LDL)\b", code)), shared_bytes)


def amd_cost(assembly: str, shared_bytes: int) -> Cost:
    """Vector registers and spills from the assembly's metadata."""
    registers, spills = (
        int(re.search(rf"\.{name}:\s+(\d+)", assembly).group(1))  # type: ignore[union-attr]
        for name in ("vgpr_count", "vgpr_spill_count")
    )
    return Cost(registers, spills, shared_bytes)


class AbsentGpu:
    """What Triton's launcher asks of a GPU before it compiles."""

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return TARGETS["sm_90"]

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """The only one."""
        return device


def variants_of_batches(kernel: str, sizes: list[int]) -> int:
    """How many variants the launcher compiles for steps of these numbers of tokens.

    Q, K and V are `[heads, T, D]` transposed, whose strides depend on T.
    """
    driver.set_active(AbsentGpu())
    function, arguments, options = launch_of(kernel, MODELS[""], "sm_90")
    compiled = set()
    for size in sizes:
        varied = {
            name: torch.empty(4096, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        for name in varied:
            if name.endswith("_head_stride"):
                varied[name] = size * 128 // 16
        if "num_tokens" in varied:
            varied["num_tokens"] = size
        compiled.add(id(function.run(grid=(size, 8, 1), warmup=True, **varied, **options)))
    return len(compiled)


def output_of(*command: str | Path) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(arguments: list[str]) -> None:
    """Print one JSON a line for the variants that are named, or all names, or the table of all."""
    if arguments == ["--names"]:
        print(*variants(), sep="\n")
        return
    if arguments[:1] == ["--json"]:
        for name in arguments[1:]:
            print(json.dumps({"name": name, **attrs.asdict(compile_variant(name))}), flush=True)
        return
    if arguments[:1] == ["--batches"]:
        sizes = [int(size) for size in arguments[1:]]
        print(json.dumps({kernel: variants_of_batches(kernel, sizes) for kernel in KERNELS}))
        return
    print(f"Triton {triton.__version__}.\n\n| variant | registers | spills | shared memory, KiB |")
    print("|---|---|---|---|")
    for name in variants():
        cost = compile_variant(name)
        kib = f"{cost.shared_bytes / 1024:.1f}"
        print(f"| {name} | {cost.registers} | {cost.spills} | {kib} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
