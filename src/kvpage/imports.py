"""Import torch and transformers without stopping the host's event loop.

Importing them from a thread is not enough. Two things hold the interpreter lock for hundreds of
milliseconds at a time: the dynamic loader, while it reads libtorch, and the cyclic garbage
collector, which walks the million objects that the imports create, again and again. So the
libraries are loaded first by a foreign call, which releases the lock, and the collector pauses
during the imports. What exists then is frozen (`gc.freeze`), so that later collections do not walk
it, and thawed at the end of the process.
"""

import atexit
import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

_LIBRARIES = (("torch", "lib/libtorch_python.so"), ("triton", "_C/libtriton.so"))

TO_RESTORE = (
    "torch",
    "transformers.tokenization_utils_tokenizers",
    "kvpage.kernels.cpu",  # and numba with it
)
"""What a model that is kept ready needs (`kvpage.model_cache`): half of the time."""

TO_BUILD = (
    *TO_RESTORE,
    "transformers.modeling_utils",
    "transformers.models.auto",
    "transformers.models.llama.modeling_llama",  # what it imports, most families import
    "transformers.generation",
    "safetensors.torch",
)
"""What any other model needs."""


def import_model_libraries(modules: Sequence[str] = TO_BUILD) -> None:
    """Import what loading a model needs; quick if the host has imported it already."""
    if all(module in sys.modules for module in modules):
        return
    for package, library in _LIBRARIES:
        _preload(package, library)
    with _collector_paused():
        for module in modules:
            importlib.import_module(module)


def _preload(package: str, library: str) -> None:
    """Let the dynamic loader read a library while other threads run Python.

    A library that cannot be read this way is read by its import, with the error that belongs to it.
    """
    spec = find_spec(package)
    if spec is None or sys.platform == "win32":
        return
    load = ctypes.CDLL(None).dlopen  # unlike ctypes.CDLL(path), a call that releases the lock
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / library
        if path.is_file():
            load(os.fsencode(path), os.RTLD_NOW | os.RTLD_LOCAL)


@contextmanager
def _collector_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or libraries that count their objects at exit see leaks
        if was_enabled:
            gc.enable()
