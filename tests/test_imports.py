"""What keeps the imports of torch and transformers from stopping the host."""

import subprocess
import sys

PROGRAM = """
import gc, sys

collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))

from kvpage.imports import import_model_libraries

collections.clear()
import_model_libraries()
during = len(collections)
maps = open("/proc/self/maps").read() if sys.platform == "linux" else "libtorch_python"
print(during, gc.isenabled(), gc.get_freeze_count() > 100_000, "transformers" in sys.modules)
import_model_libraries()  # all is there: nothing is frozen again
print(len(collections) - during, "libtorch_python" in maps)
"""

PRELOAD = """
import sys

from kvpage.imports import _preload

_preload("torch", "lib/libtorch_python.so")
print("torch" in sys.modules, "libtorch_python" in open("/proc/self/maps").read())
_preload("no_such_package", "lib/none.so")
_preload("torch", "lib/no_such_library.so")
"""


def output_of(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_the_collector_pauses_during_the_imports_and_is_on_again() -> None:
    """A full pass over what they create would stop every thread for hundreds of milliseconds."""
    during, enabled, frozen, imported, again, mapped = output_of(PROGRAM)
    assert (during, enabled, frozen, imported) == ("0", "True", "True", "True")
    assert (again, mapped) == ("0", "True")


def test_libraries_are_read_before_their_import() -> None:
    """By a call that releases the interpreter lock; what is not there is passed over."""
    if sys.platform == "linux":
        assert output_of(PRELOAD) == ["False", "True"]
