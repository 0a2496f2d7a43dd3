"""A comparison as HTML, JSON and a picture."""

import io
import json
import re
from base64 import b64decode
from html.parser import HTMLParser

import numpy as np
from PIL import Image

from kvpage.comparison import html_report, json_document
from kvpage.comparison.bitmap import OWNERS, RESERVED_OPACITY, film_png
from kvpage.comparison.charts import Axis, Line, line_chart
from kvpage.comparison.figures import FIGURES, seconds, size
from tests.comparison.found import FILM, comparison, interrupted, result

FOUND = comparison(
    [
        result("fixed/8", 99, 100, 101),
        result("fixed/16", 90, 91, 92),
        result("contiguous:reserve=request/8", 40, 41, 42),
        result("dynamic/8", 50, failure="allocator 'dynamic' raised <b>RuntimeError</b>"),
    ]
)

VOID = {"meta", "img", "br", "link", "input"}


class _Balanced(HTMLParser):
    """Checks that elements are closed in order; keeps what would be fetched, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_whole_and_fetches_nothing() -> None:
    """No script, no style sheet, no font; pictures are inside it."""
    page = html_report(FOUND, command="kvpage compare")
    parsed = _Balanced(page)
    assert parsed.open == []
    assert all(source.startswith("data:image/png;base64,") for source in parsed.fetched)
    assert len(parsed.fetched) == 3
    assert "<script" not in page
    assert not re.search(r"url\(|@import|https?://", page)


def test_the_page_has_every_figure_of_every_candidate() -> None:
    """In its table, with what failed and why."""
    text = " ".join(_Balanced(html_report(FOUND)).texts)
    for found in FOUND.measured:
        assert all(figure.median(found) in text for figure in FIGURES)
    assert "allocator 'dynamic' raised <b>RuntimeError</b>" in text


def test_names_are_escaped() -> None:
    """Models, machines, commands and errors are text."""
    page = html_report(FOUND, command="kvpage compare --model '<script>'")
    assert "<fast>" not in page
    assert "<b>" not in page
    assert "<script" not in page


def test_a_page_of_nothing_yet_is_a_page() -> None:
    """As after an interruption in the first run."""
    parsed = _Balanced(html_report(interrupted(comparison([result("fixed/8")]))))
    text = " ".join(parsed.texts)
    assert "The comparison was interrupted: 0 of 3 runs are measured." in text
    assert parsed.open == []


def test_the_document_is_json() -> None:
    """With every run, and the medians."""
    document = json.loads(json.dumps(json_document(FOUND, command="kvpage compare")))
    first = document["results"][0]
    assert first["label"] == "fixed/8"
    assert first["median"]["tokens/s"] == 100
    assert [run["throughput"] for run in first["runs"]] == [99, 100, 101]
    assert first["runs"][0]["first_token_s"]["p50"] == 0.2
    assert len(first["runs"][0]["series"]) == 2
    assert document["verdict"]["best"] == "fixed/8"
    assert document["results"][3]["failure"].startswith("allocator 'dynamic' raised")


def picture() -> "np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]":
    encoded = film_png(FILM).removeprefix("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(b64decode(encoded))).convert("RGBA"))


def test_a_film_is_a_picture_of_owners_over_time() -> None:
    """Three blocks downwards: free, held by the first owner, reserved by the same."""
    pixels = picture()
    assert pixels.shape[0] == 3
    assert pixels[0, 0, 3] == 0
    assert tuple(pixels[1, 0]) == (*OWNERS[0], 255)
    assert tuple(pixels[2, 0]) == (*OWNERS[0], RESERVED_OPACITY)


def test_a_column_lasts_until_the_next_one() -> None:
    """Moments 0, 1 and 3: the second column takes two thirds of the width."""
    pixels = picture()
    second = (pixels[1] == (*OWNERS[1], 255)).all(axis=1)
    assert abs(second.mean() - 2 / 3) < 0.01


def test_figures_are_shown_in_units_that_read_well() -> None:
    """Three digits."""
    shown = [seconds(0.000031), seconds(0.0123), seconds(1.2345), size(532), size(3 * 2**20)]
    assert shown == ["31 µs", "12.3 ms", "1.23 s", "532 B", "3.0 MiB"]


def test_axes_have_round_ticks() -> None:
    """Linear and logarithmic ones."""
    assert Axis(0, 3.7, "", str).ticks() == [0, 1, 2, 3]
    assert Axis(0.03, 40, "", str, "log").ticks() == [0.1, 1, 10]
    assert Axis(2, 60, "", str, "log").ticks() == [2, 5, 10, 20, 50]


def test_a_line_goes_from_corner_to_corner() -> None:
    """From the lowest left to the highest right place of the plot."""
    chart = line_chart(
        [Line([(0, 0), (10, 1)], "s0", "a line")],
        Axis(0, 10, "s", str),
        Axis(0, 1, "", str),
        title="a chart",
    )
    assert "<title>a line</title>" in chart
    (points,) = re.findall(r'points="([^"]*)"', chart)
    (left, bottom), (right, top) = (map(float, point.split(",")) for point in points.split())
    assert left < right
    assert top < bottom
