"""Result files, written again and again while a command runs."""

import os
from pathlib import Path

from kvpage.errors import ConfigError


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written: nothing is worse than an error after five minutes.

    Raises:
        ConfigError: it cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: the folder allows no new files")


def replace(path: Path, text: str) -> None:
    """Write `text` whole, so that a reader never finds half a file.

    Raises:
        ConfigError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
