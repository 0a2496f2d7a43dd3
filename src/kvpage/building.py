"""Build models as transformers does, and bring them into the form that computes fastest."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvpage.adapters import attach_adapters
from kvpage.attention import ATTENTION_NAME, register_attention
from kvpage.config import Adapters
from kvpage.errors import ConfigError
from kvpage.fusion import accelerate
from kvpage.kernels.cpu_threads import in_a_thread_that_ends
from kvpage.model import PagedModel, check_supported, model_class_of
from kvpage.packed_linear import pack_linears
from kvpage.quantised_linear import check_int8, quantise_weights


def build(
    source: str | Path,
    place: str,
    *,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    weights: str | None,
    adapters: Adapters,
    compiles: bool,
) -> tuple[PagedModel, Any]:
    """A model and its tokenizer.

    Args:
        source: a hub id, a folder, or a `.gguf` file.
        place: the same, or the folder that the file is converted to if that is not there yet.
        dtype: see `load_pretrained`, as for all others.
        device: likewise.
        weights: likewise.
        adapters: likewise.
        compiles: compile the layers, instead of what else would make them fast.

    Raises:
        OSError, ImportError: it cannot be read.
        ConfigError: `weights` cannot be had here, or an adapter cannot.
        UnsupportedModelError: its attention cannot be paged.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if weights == "int8":
        check_int8(target, dtype or torch.float32)
    if isinstance(source, Path) and not Path(place).is_dir():
        _convert_gguf(source, Path(place))

    def load() -> Any:
        with _no_progress_bars():
            module = AutoModelForCausalLM.from_pretrained(
                place, dtype=_dtype(dtype, target), attn_implementation=ATTENTION_NAME
            )
        module = module.to(target)
        attach_adapters(module, adapters)
        return module

    config = AutoConfig.from_pretrained(place)
    check_supported(config, model_class_of(config))
    register_attention()
    if compiles:
        paged = in_a_thread_that_ends(partial(_compiled, load))
    else:
        paged = in_a_thread_that_ends(partial(_paged, load, tuple(adapters), weights))
    return paged, AutoTokenizer.from_pretrained(place)


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    # bf16 matrix products on most CPUs are several times slower than float32.
    return dtype or (torch.float32 if device.type == "cpu" else "auto")


def _paged(load: Callable[[], Any], adapters: Sequence[str], weights: str | None) -> PagedModel:
    """A paged model of our own; on a CPU, in the form that computes fastest.

    Args:
        load: builds the model. Called again if a family turns out to look into its layers, where
            others are now: it is then served as it is.
        adapters: names of those that it has.
        weights: see `load_pretrained`.
    """
    model = PagedModel(load(), adapters)
    model_type = model.module.config.model_type
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return model
    if accelerate(
        model, quantise_weights if weights == "int8" else pack_linears, exact=weights is None
    ):
        return model
    if weights == "int8":
        raise ConfigError(
            f"weights='int8' is not possible for model type {model_type!r}, whose "
            "code looks into its layers; leave weights out"
        )
    return PagedModel(load(), adapters)


def _compiled(load: Callable[[], Any]) -> PagedModel:
    from kvpage.compiled import compile_layers

    model = PagedModel(load())
    compile_layers(model)
    return model


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
