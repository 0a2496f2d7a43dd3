"""Models in the form that computes fastest, kept on disk."""

import io
import logging
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from kvpage import SamplingParams, building, model_cache
from kvpage.errors import ConfigError
from kvpage.fused_modules import FusedModel
from kvpage.model_cache import CacheEntry
from kvpage.packed_linear import PackedLinear, PanelLinear
from kvpage.pretrained import Pretrained, load_pretrained
from tests.model.families import PROMPTS, WholeSequence, logits_of, unchanged
from tests.model.folders import write_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A model that a test may change."""
    place = tmp_path / "model"
    place.mkdir()
    for file in written.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pretrained]:
    """Loads with a cache of its own, in panels."""
    monkeypatch.setattr("kvpage.packed_linear.fastest_form", lambda _: PanelLinear)

    def loaded(model: str | Path, **options: Any) -> Pretrained:
        return load_pretrained(model, **{"cache_dir": tmp_path / "cache", **options})

    return loaded


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places of models that were built."""
    places: list[str] = []
    build = building.build

    def noted(source: Any, place: str, **options: Any) -> Any:
        places.append(place)
        return build(source, place, **options)

    monkeypatch.setattr(building, "build", noted)
    return places


def logits(loaded: Pretrained) -> torch.Tensor:
    """Behind sequences of several lengths."""
    return torch.stack([logits_of(loaded.model, p, WholeSequence(unchanged)) for p in PROMPTS])


def kept_file(tmp_path: Path) -> Path:
    [file] = (tmp_path / "cache" / "ready").iterdir()
    return file


@pytest.mark.parametrize("weights", [None, "int8"])
def test_what_is_kept_is_the_same_model(
    weights: Any, folder: Path, load: Callable[..., Pretrained], builds: list[str]
) -> None:
    """To the last bit; and it was not built."""
    built, restored = (load(folder, weights=weights) for _ in range(2))
    assert builds == [str(folder)]
    assert isinstance(restored.model.module, FusedModel)
    assert torch.equal(logits(built), logits(restored))
    for name in ("layers", "max_len", "vocab_size", "eos_token_ids", "default_params", "dtype"):
        assert getattr(restored.model, name) == getattr(built.model, name)
    assert restored.model.eos_token_ids == (5, 7)
    assert restored.model.default_params == SamplingParams(temperature=0.6, top_k=9)
    assert restored.name == built.name
    assert type(restored.tokenizer) is type(built.tokenizer)
    assert restored.tokenizer("w3 w9") == built.tokenizer("w3 w9")


def test_layers_are_one_call_again(folder: Path, load: Callable[..., Pretrained]) -> None:
    """What is made of the weights as they lie in memory is made anew."""
    built, restored = (load(folder).model.module for _ in range(2))
    for module in (built, restored):
        assert [each.run is not None for each in module.layers] == [True, False]
        assert [each.is_done_before for each in module.layers] == [False, True]


PROGRAM = """
import sys
from kvpage.pretrained import load_pretrained
load_pretrained(sys.argv[1], cache_dir=sys.argv[2])
print("torch" in sys.modules, "transformers.modeling_utils" in sys.modules)
"""


def test_code_for_models_is_not_imported(
    folder: Path, load: Callable[..., Pretrained], tmp_path: Path
) -> None:
    """That is most of a start."""
    load(folder)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "cache")],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False"]


def rewrite_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes())


def add_a_file(folder: Path) -> None:
    (folder / "generation_config.json").unlink()


@pytest.mark.parametrize("change", [rewrite_weights, add_a_file])
def test_another_model_is_built_and_kept(
    change: Callable[[Path], None],
    folder: Path,
    load: Callable[..., Pretrained],
    builds: list[str],
    tmp_path: Path,
) -> None:
    """Whatever has changed in its folder; it takes the place of the first."""
    load(folder)
    change(folder)
    changed, restored = load(folder), load(folder)
    assert len(builds) == 2
    assert changed.model.default_params == restored.model.default_params
    assert len(kept_file(tmp_path).read_bytes()) > 10_000


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("kvpage.model_cache.version", lambda library: f"next after that of {library}"),
        ("kvpage.model_cache.__file__", "another/package/model_cache.py"),
        ("kvpage.kernels.simd.LANES", 4),
    ],
)
def test_other_code_builds_anew(
    place: str,
    value: Any,
    folder: Path,
    load: Callable[..., Pretrained],
    builds: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of libraries or of kvpage, or for vectors of another length; and is used from then on."""
    load(folder)
    monkeypatch.setattr(place, value)
    load(folder)
    assert len(builds) == 2
    load(folder)
    assert len(builds) == 2


def test_a_link_to_nothing_is_no_file_of_a_model(
    folder: Path, load: Callable[..., Pretrained], builds: list[str]
) -> None:
    """Whatever transformers has no need of."""
    (folder / "flax_model.msgpack").symlink_to(folder / "not-downloaded")
    load(folder)
    load(folder)
    assert len(builds) == 1


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def no_header(file: Path) -> None:
    file.write_bytes(b"[3]\n")


def other_header(file: Path) -> None:
    file.write_bytes(b'{"stamp": 3}\n')


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(b"\n") + 100] ^= 1
    file.write_bytes(data)


def make_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("damage", [cut, empty, no_header, other_header, flip_a_bit, make_a_folder])
def test_a_damaged_file_is_of_no_use(
    damage: Callable[[Path], None],
    folder: Path,
    load: Callable[..., Pretrained],
    builds: list[str],
    tmp_path: Path,
) -> None:
    """The model is built as before."""
    built = load(folder)
    damage(kept_file(tmp_path))
    assert torch.equal(logits(built), logits(load(folder)))
    assert len(builds) == 2


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def test_code_of_others_is_not_written() -> None:
    """Only what can be read again."""
    with pytest.raises(pickle.PicklingError, match=r"it needs os\.getenv"):
        model_cache._Pickler(io.BytesIO()).dump(Call(os.getenv, "HOME"))


@pytest.mark.parametrize(
    "named",
    [
        b"cos\nsystem\n",
        b"ctorch\nload\n",
        b"ctorch.nn.modules.module\nwarnings\n",
        b"\x80\x04ckvpage.model\ninspect.os.system\n",
        b"ckvpage.cli.serve\nread_api_keys\n",
    ],
)
def test_code_of_others_is_not_called(named: bytes) -> None:
    """A file in a cache is no way to run a program, by whatever name."""
    with mmap.mmap(-1, 4096) as memory, pytest.raises(pickle.UnpicklingError, match="no part of"):
        model_cache._Unpickler(named + b"(Vtrue\ntR.", memory).load()


def is_kept(tmp_path: Path) -> bool:
    return (tmp_path / "cache" / "ready").exists()


@pytest.mark.parametrize("model_type", ["gemma2", "gpt2"])
def test_a_model_with_modules_of_others_is_not_kept(
    model_type: str, load: Callable[..., Pretrained], tmp_path: Path, caplog: Any
) -> None:
    """It needs transformers to be."""
    with caplog.at_level(logging.DEBUG, logger="kvpage"):
        load(write_model(tmp_path / "model", model_type))
    assert "not kept ready: it needs transformers." in caplog.text
    assert not is_kept(tmp_path)


def test_weights_in_a_layout_of_onednn_are_not_kept(
    folder: Path, load: Callable[..., Pretrained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but oneDNN can tell what they are."""
    monkeypatch.setattr("kvpage.packed_linear.fastest_form", lambda _: PackedLinear)
    load(folder)
    assert not is_kept(tmp_path)


def test_a_large_model_is_not_kept(
    folder: Path, load: Callable[..., Pretrained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take as much room once more."""
    monkeypatch.setattr(model_cache, "MAX_BYTES", 1000)
    load(folder)
    assert not is_kept(tmp_path)


def test_another_type_of_numbers_has_nothing_to_do_with_it(
    folder: Path,
    load: Callable[..., Pretrained],
    builds: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is neither kept nor found."""
    load(folder)
    monkeypatch.setattr(CacheEntry, "keep", lambda *_: pytest.fail("it was kept"))
    assert load(folder, dtype="bfloat16").model.dtype == torch.bfloat16
    assert len(builds) == 2


def test_nor_has_a_gpu(
    folder: Path, load: Callable[..., Pretrained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is taken if there is one and nothing else was asked for."""
    loaded = load(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(building, "build", lambda *_, **__: (loaded.model, loaded.tokenizer))
    assert load(folder).model is loaded.model
    assert load(folder, device="cpu").model is not loaded.model


def test_a_cache_that_cannot_be_written_is_told(
    folder: Path, load: Callable[..., Pretrained], tmp_path: Path, caplog: Any
) -> None:
    """The model works all the same, and nothing is left behind."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "ready").write_text("a file")
    load(folder)
    assert "the model cannot be kept ready in" in caplog.text


@pytest.mark.skipif(sys.platform == "win32", reason="files have no limit there")
def test_half_a_file_is_never_seen(
    folder: Path, load: Callable[..., Pretrained], tmp_path: Path, caplog: Any
) -> None:
    """A disk that is full leaves nothing."""
    import resource

    keep, limits = CacheEntry.keep, resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_a_small_disk(*args: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            keep(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheEntry, "keep", on_a_small_disk)
        load(folder)
    assert "the model cannot be kept ready in" in caplog.text
    assert list((tmp_path / "cache" / "ready").iterdir()) == []


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A cache of the hub, offline, with the model in a revision; its folder."""
    cache = tmp_path / "hub"
    snapshot = cache / "models--somebody--tiny" / "snapshots" / ("1" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (cache / "models--somebody--tiny" / "refs").mkdir()
    (cache / "models--somebody--tiny" / "refs" / "main").write_text("1" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(cache))
    return snapshot


def test_a_model_of_the_hub_is_kept(
    hub: Path, load: Callable[..., Pretrained], builds: list[str]
) -> None:
    """As long as its revision is the current one."""
    built, restored = (load("somebody/tiny") for _ in range(2))
    assert builds == ["somebody/tiny"]
    assert torch.equal(logits(built), logits(restored))
    hub.rename(hub.with_name("2" * 40))
    (hub.parent.parent / "refs" / "main").write_text("2" * 40)
    load("somebody/tiny")
    assert len(builds) == 2


def test_a_model_that_the_hub_does_not_have_is_one_sentence(
    hub: Path, load: Callable[..., Pretrained]
) -> None:
    """That of loading."""
    assert hub.is_dir()
    with pytest.raises(ConfigError, match="model 'somebody/else' cannot be loaded"):
        load("somebody/else")
