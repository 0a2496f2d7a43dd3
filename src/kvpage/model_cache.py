"""Models in the form that computes fastest, kept on disk: the next start need not build them.

Most of a start is Python: transformers' code for models is imported, builds one, and kvpage watches
it, replaces its modules and packs their weights. What computes then may be kvpage's own modules and
tensors alone (`FusedModel`). Such a model is written to a file, and to use it again, of
transformers only the tokenizer is needed. The tensors are read by a thread while torch is imported.

A file holds a line of JSON, the modules as `pickle` writes them with the places of tensors in their
stead, and the tensors. It is of use until something changes that it was made from: the files of
the model, the code of kvpage, the versions of libraries, the length of vectors. `pickle` can name
any function and have it called: what is not a part of such models is neither written nor read.
"""

import contextlib
import io
import json
import logging
import mmap
import os
import pickle
import platform
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs

if TYPE_CHECKING:
    import torch

    from kvpage.model import PagedModel

MAX_BYTES = 2**31
"""Larger models are not kept: that would take as much room on disk once more."""

_ALIGNMENT = 64
"""Of tensors, in bytes: a line of the cache."""

_LIBRARIES = ("torch", "transformers", "numba")

_PARTS = frozenset(
    {
        "kvpage.fused_modules", "kvpage.packed_linear", "kvpage.quantised_linear",
        "kvpage.kernels", "kvpage.kernels.cpu_product", "kvpage.model", "kvpage.probe",
        "kvpage.sampling", "torch.nn.functional",
    }
)  # fmt: skip
"""What a file may name is defined in these, or is a module of torch."""

_logger = logging.getLogger("kvpage")


class CacheEntry:
    """Where a model is kept.

    Args:
        source: a folder, a `.gguf` file, or a hub id.
        weights: see `load_pretrained`.
        cache_dir: of kvpage.

    Attributes:
        path: the file.
        stamp: tells what it must have been made from; None if no files of the model are here yet.
    """

    def __init__(self, source: str | Path, weights: str | None, cache_dir: Path) -> None:
        of_source = source if isinstance(source, str) else str(source.resolve())
        name = f"{Path(of_source).stem}-{digest(of_source, str(weights))}"
        self.path = cache_dir / "ready" / name
        files = _of_hub(source, asks=self.path.exists()) if isinstance(source, str) else source
        self.stamp = None if files is None else digest(*_made_from(files))

    def begin_reading(self) -> "Kept | None":
        """Begin to read the file, if it is there and of use."""
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context(self.path.open("rb"))
                header = _Header(**json.loads(file.readline()))
                modules = file.read(header.modules_bytes)
                size = os.fstat(file.fileno()).st_size
            except (OSError, ValueError, TypeError):
                return None
            begin = _aligned(file.tell())
            made = (header.stamp, header.modules_digest, size)
            if made != (self.stamp, _bytes_digest(modules), begin + header.tensors_bytes):
                return None
            file.seek(begin)
            opened.pop_all()
            return Kept(header, modules, file)

    def keep(self, model: "PagedModel", tokenizer: Any) -> None:
        """Write the file, if the model is one that can be kept; what fails is logged.

        Args:
            model: as it was built, on a CPU.
            tokenizer: its tokenizer, of which only the class is written.
        """
        modules = io.BytesIO()
        pickler = _Pickler(modules)
        try:
            pickler.dump(model)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            _logger.debug("the model is not kept ready: %s", error)
            return
        of_tokenizer = type(tokenizer).__module__, type(tokenizer).__name__
        if (
            self.stamp is None
            or pickler.tensors_bytes > MAX_BYTES
            or not of_tokenizer[0].startswith("transformers.")
        ):
            return
        from kvpage.kernels.simd import LANES

        header = _Header(
            stamp=self.stamp,
            lanes=LANES,
            tokenizer=of_tokenizer,
            modules_bytes=modules.tell(),
            modules_digest=_bytes_digest(modules.getvalue()),
            tensors_bytes=pickler.tensors_bytes,
        )
        try:
            self._write(header, modules.getvalue(), pickler.storages)
        except OSError as error:
            _logger.warning("the model cannot be kept ready in %s: %s", self.path.parent, error)

    def _write(
        self, header: "_Header", modules: bytes, storages: "Mapping[int, torch.UntypedStorage]"
    ) -> None:
        """The whole file, or nothing."""
        import torch

        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=self.path.parent, prefix=".writing-")
        try:
            with open(handle, "wb") as file:
                file.write(json.dumps(attrs.asdict(header)).encode() + b"\n" + modules)
                tensors = _aligned(file.tell())
                for begin, storage in storages.items():
                    file.seek(tensors + begin)
                    numbers = torch.empty(0, dtype=torch.uint8).set_(storage)
                    file.write(numbers.numpy().data)
                file.truncate(tensors + header.tensors_bytes)
            Path(scratch).replace(self.path)
        finally:
            Path(scratch).unlink(missing_ok=True)


class Kept:
    """A model whose file is being read.

    Args:
        header: of the file.
        modules: as they were written.
        file: at the tensors; closed when they are read.
    """

    def __init__(self, header: "_Header", modules: bytes, file: BinaryIO) -> None:
        self._header, self._modules = header, modules
        self._memory = _large_pages(header.tensors_bytes)
        self._is_read = False
        self._reader = threading.Thread(
            target=self._read, args=(file,), name="kvpage-read", daemon=True
        )
        self._reader.start()

    def _read(self, file: BinaryIO) -> None:
        with file, memoryview(self._memory) as memory, contextlib.suppress(OSError):
            self._is_read = file.readinto(memory) == len(memory)  # type: ignore[attr-defined]

    def restore(self, place: str) -> "tuple[PagedModel, Any] | None":
        """The model and its tokenizer, once all is read; None if it is of no use here.

        Args:
            place: where the tokenizer is.
        """
        from kvpage.kernels.simd import LANES

        if self._header.lanes != LANES:
            return None
        module, name = self._header.tokenizer
        tokenizer = getattr(import_module(module), name).from_pretrained(place)
        self._reader.join()
        if not self._is_read:
            return None
        return _Unpickler(self._modules, self._memory).load(), tokenizer


@attrs.frozen
class _Header:
    """The first line of a file.

    Attributes:
        stamp: tells what it was made from.
        lanes: numbers of a vector, on which the layout of weights depends.
        tokenizer: module and name of a class.
        modules_bytes: length of what follows.
        modules_digest: of what follows.
        tensors_bytes: length of what follows upon that, from the next multiple of `_ALIGNMENT`.
    """

    stamp: str
    lanes: int
    tokenizer: tuple[str, str]
    modules_bytes: int
    modules_digest: str
    tensors_bytes: int


class _Pickler(pickle.Pickler):
    """Writes places in the stead of tensors.

    Attributes:
        storages: the memory of tensors, at its place in the file.
        tensors_bytes: of all of them.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=5)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.tensors_bytes = 0
        self._places: dict[int, int] = {}

    def persistent_id(self, found: Any) -> "_Place | None":
        import torch

        if not isinstance(found, torch.Tensor):
            return None
        if found.layout != torch.strided or found.device.type != "cpu":
            raise pickle.PicklingError(f"a tensor is {found.layout} on {found.device}")
        begin = self._place(found.untyped_storage())
        begin += int(found.storage_offset()) * found.element_size()
        return begin, found.dtype, tuple(found.shape), found.stride()

    def _place(self, storage: "torch.UntypedStorage") -> int:
        address = storage.data_ptr()
        if address not in self._places:
            self._places[address] = begin = _aligned(self.tensors_bytes)
            self.storages[begin] = storage
            self.tensors_bytes = begin + storage.nbytes()
        return self._places[address]

    def reducer_override(self, found: Any) -> Any:
        named = hasattr(found, "__qualname__")  # classes and functions are written by their names
        if named and not _is_part(found):
            raise pickle.PicklingError(f"it needs {found.__module__}.{found.__qualname__}")
        return NotImplemented


_Place = tuple[int, "torch.dtype", tuple[int, ...], tuple[int, ...]]
"""Where a tensor begins among all, its type, shape and strides."""


class _Unpickler(pickle.Unpickler):
    """Puts tensors where their places were written; all of them share one memory."""

    def __init__(self, modules: bytes, memory: mmap.mmap) -> None:
        import torch

        super().__init__(io.BytesIO(modules))
        self._numbers = torch.frombuffer(memory, dtype=torch.uint8)

    def persistent_load(self, place: _Place) -> "torch.Tensor":
        begin, dtype, shape, strides = place
        typed = self._numbers[: len(self._numbers) // dtype.itemsize * dtype.itemsize].view(dtype)
        return typed.as_strided(shape, strides, begin // dtype.itemsize)

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module.partition(".")[0] in ("kvpage", "torch", "collections"):
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or (hasattr(found, "__module__") and _is_part(found)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a model")


def _is_part(found: Any) -> bool:
    """Whether a class or function is one that models that can be kept are made of."""
    import torch

    if found in (OrderedDict, torch.device) or found.__module__ in _PARTS:
        return True
    of_torch = str(found.__module__).startswith("torch.nn.modules.")
    return of_torch and isinstance(found, type) and issubclass(found, torch.nn.Module)


def _of_hub(model: str, *, asks: bool) -> Path | None:
    """The files of a hub id that have been downloaded.

    Args:
        model: the id.
        asks: ask the hub which revision is the current one, as transformers does at each start.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        config = (hf_hub_download if asks else try_to_load_from_cache)(model, "config.json")
    except (OSError, ValueError):  # those of huggingface_hub are such; loading has its own words
        return None
    return Path(config).parent if isinstance(config, str) else None


def _made_from(files: Path) -> Iterator[str]:
    """All that a kept model depends on, but the processor."""
    yield platform.python_version()
    yield from (f"{name} {version(name)}" for name in _LIBRARIES)
    own = Path(__file__).parent.rglob("*.py")
    for file in (*sorted(own), *(sorted(files.iterdir()) if files.is_dir() else [files])):
        if file.exists():  # and not a link to nothing
            state = file.stat()
            yield f"{file} {state.st_size} {state.st_mtime_ns}"


def digest(*parts: str) -> str:
    """A short name for these texts, for files."""
    return _bytes_digest("\n".join(parts).encode())


def _bytes_digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _large_pages(size: int) -> mmap.mmap:
    """Memory of this process alone, on large pages where the system has them."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a wish
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
