"""Pictures of a comparison's report for the documents, at three widths and in both themes.

    python docs/make_screenshots.py kvpage-compare.html

Needs a Chromium: `CHROMIUM=/path/to/it` where it is not found by itself. With no report named,
measures one first: three strategies and four block sizes on the default model, some four minutes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = Path(__file__).parent / "images"

PICTURES = {
    "compare-light": ("light", 1180, 2450),
    "compare-dark": ("dark", 1180, 2450),
    "compare-phone": ("light", 500, 2600),
}
"""Theme, width and height in CSS pixels. Chromium opens no narrower window than 500."""


def main() -> None:
    """Take the pictures."""
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(sys.argv[1]) if len(sys.argv) > 1 else measured(Path(folder))
        for name, (theme, width, height) in PICTURES.items():
            page = themed(report.read_text("utf-8"), theme)
            source = Path(folder) / f"{name}.html"
            source.write_text(page, "utf-8")
            take(source, TARGET / f"{name}.png", width, height)


def measured(folder: Path) -> Path:
    """A report made now."""
    report = folder / "report.html"
    command = [sys.executable, "-c", "from kvpage.cli import main; main()", "compare"]
    subprocess.run([*command, "--html", report], check=True)
    return report


def themed(page: str, theme: str) -> str:
    """The page as it looks where the reader has chosen this theme."""
    if theme == "light":
        return page.replace("(prefers-color-scheme: dark)", "not all")
    return page.replace("(prefers-color-scheme: dark)", "all")


def take(page: Path, target: Path, width: int, height: int) -> None:
    """Let Chromium draw `page`."""
    subprocess.run(
        [
            chromium(),
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            f"--window-size={width},{height}",
            f"--screenshot={target.resolve()}",
            page.resolve().as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


def chromium() -> str:
    """The browser's program."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    found = [path for name in names if name and (path := shutil.which(name))]
    if not found:
        raise SystemExit("no Chromium found: set CHROMIUM to its path")
    return found[0]


if __name__ == "__main__":
    main()
