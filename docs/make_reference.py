"""Write `docs/reference/api.md` from the docstrings of everything that `kvpage` exports.

Usage: python docs/make_reference.py [--check]
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import attrs

import kvpage
from kvpage import errors, hookspecs

TARGET = Path(__file__).parent / "reference" / "api.md"

HEAD = """# Public names

Made from the docstrings by `python docs/make_reference.py`; edit those, not this file.
"""


def main() -> int:
    """Write the page, or with `--check` say whether it is up to date."""
    page = reference()
    if "--check" in sys.argv:
        return 0 if TARGET.read_text() == page else 1
    TARGET.write_text(page)
    return 0


def reference() -> str:
    """The page."""
    names = [name for name in kvpage.__all__ if not _is_error(getattr(kvpage, name))]
    parts = [HEAD, *(_entry(name, getattr(kvpage, name)) for name in names)]
    parts += ["## The plugin hook\n", _entry("kvpage_allocators", hookspecs.kvpage_allocators)]
    parts += ["## Errors\n", _doc(errors), *_error_entries()]
    return "\n".join(parts)


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def _error_entries() -> list[str]:
    found = [name for name in kvpage.__all__ if _is_error(getattr(kvpage, name))]
    return [f"* `{name}`: {_doc(getattr(kvpage, name)).splitlines()[0]}" for name in found] + [""]


def _entry(name: str, value: Any) -> str:
    lines = [f"### `{name}{_signature(value)}`\n", _doc(value)]
    if inspect.isclass(value):
        lines += [_member(name, *member) for member in _public_members(value)]
    return "\n".join(lines)


def _public_members(value: type) -> list[tuple[str, Any]]:
    return [
        (name, member)
        for name, member in vars(value).items()
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, property | classmethod))
        and inspect.getdoc(member)
    ]


def _member(owner: str, name: str, member: Any) -> str:
    signature = "" if isinstance(member, property) else _signature(member)
    return f"#### `{owner}.{name}{signature}`\n\n{_doc(member)}"


def _signature(value: Any) -> str:
    target = getattr(value, "__func__", value)
    if not callable(target) or (inspect.isclass(target) and not attrs.has(target)):
        return ""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return ""
    parameters = [
        p.replace(annotation=p.empty, default=p.default if _short(p) else ...)
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _short(parameter: inspect.Parameter) -> bool:
    """Keep a default value that reads well."""
    empty = parameter.default is parameter.empty
    return empty or isinstance(parameter.default, (int, float, str, bool, tuple, type(None)))


def _doc(value: Any) -> str:
    """A docstring as Markdown: sections become bold words, their lines a list."""
    lines: list[str] = []
    in_section = False
    for line in (inspect.getdoc(value) or "").replace("::\n", ":\n").splitlines():
        if line.rstrip(":") in ("Args", "Attributes", "Returns", "Raises") and line.endswith(":"):
            in_section = True
            lines += [f"**{line.rstrip(':')}**", ""]
        elif in_section and line.startswith("    ") and not line.startswith("     "):
            lines.append(f"* {line.strip()}")
        else:
            in_section = in_section and (not line or line.startswith(" "))
            lines.append(line.strip() if in_section else line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
