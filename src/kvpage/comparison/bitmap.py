"""A memory film as a picture: PNG with a palette (W3C, PNG specification, 2003), as a data URI."""

import struct
import zlib
from base64 import b64encode

import numpy as np
import numpy.typing as npt

from kvpage.comparison.measuring import CACHED, FIRST_OWNER, FREE, OWNER_COLOURS
from kvpage.comparison.records import MemoryFilm

Colour = tuple[int, int, int, int]
"""Red, green, blue, opacity; 0 to 255."""

# Okabe and Ito's colours, which also those tell apart who see less of red and green, with two
# tints in place of their black and yellow, which vanish on a dark or a white page.
OWNERS = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
    (120, 110, 190),
    (150, 150, 60),
)
RESERVED_OPACITY = 85
CACHED_COLOUR = (128, 128, 128, 110)
WIDTH = 640


def film_png(film: MemoryFilm) -> str:
    """`data:image/png;base64,...`: time to the right, blocks downwards; free ones transparent."""
    return "data:image/png;base64," + b64encode(_png(_pixels(film), _palette())).decode()


def _pixels(film: MemoryFilm) -> npt.NDArray[np.uint8]:
    """`uint8[blocks, WIDTH]`: of each moment the column that was filmed last before it."""
    columns = np.frombuffer(b"".join(film.columns), np.uint8).reshape(len(film.columns), -1)
    width = WIDTH if len(film.times) > 1 else 1
    moments = np.linspace(0, film.times[-1], width)
    shown = np.searchsorted(film.times, moments, side="right") - 1
    pixels: npt.NDArray[np.uint8] = columns[shown.clip(0)].T
    return pixels


def _palette() -> list[Colour]:
    palette: list[Colour] = [(0, 0, 0, 0)] * (FIRST_OWNER + 2 * OWNER_COLOURS)
    palette[FREE] = (0, 0, 0, 0)
    palette[CACHED] = CACHED_COLOUR
    for owner, (red, green, blue) in enumerate(OWNERS):
        palette[FIRST_OWNER + 2 * owner] = (red, green, blue, 255)
        palette[FIRST_OWNER + 2 * owner + 1] = (red, green, blue, RESERVED_OPACITY)
    return palette


def _png(pixels: npt.NDArray[np.uint8], palette: list[Colour]) -> bytes:
    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits, palette
    unfiltered = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)
    colours = b"".join(bytes(colour[:3]) for colour in palette)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, content)
        for kind, content in (
            (b"IHDR", header),
            (b"PLTE", colours),
            (b"tRNS", bytes(colour[3] for colour in palette)),
            (b"IDAT", zlib.compress(unfiltered.tobytes(), 9)),
            (b"IEND", b""),
        )
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
