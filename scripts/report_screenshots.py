"""Screenshots of a report for docs/: light, dark, and on a screen of 400 pixels.

The browser is that of the tests (tests/support/chromium.py).

Example, after `make quickstart`:
  python -m scripts.report_screenshots runs/quickstart/report/index.html
"""

import argparse
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.support.chromium import open_browser

FOLDER = Path(__file__).parents[1] / "docs" / "report"


@dataclass(frozen=True)
class Shot:
    """One picture. question: show the first gained question, opened, instead of the top of the page."""

    name: str
    scheme: Literal["light", "dark"]
    width: int
    height: int
    question: bool = False


SHOTS = (
    Shot("light", "light", 1100, 760),
    Shot("dark", "dark", 1100, 760),
    Shot("narrow", "light", 400, 760),
    Shot("question", "light", 1100, 1000, question=True),
)


def take(browser: Browser, page_path: Path, shot: Shot) -> bytes:
    """The picture as PNG."""
    page = browser.new_page(color_scheme=shot.scheme, viewport={"width": shot.width, "height": shot.height})
    page.goto(page_path.resolve().as_uri())
    page.wait_for_selector("html[data-ready]")
    if shot.question:
        # The second prompt length, at fewer positions, so that answers and prompt fit into one picture.
        page.select_option("#question-view", "1")
        page.select_option("#outcome", "gained")
        page.click(".question summary")
        page.wait_for_selector(".question[open] .prompt mark")
        page.evaluate("document.getElementById('questions').scrollIntoView()")
    data = page.screenshot()
    page.close()
    return data


def compress(data: bytes) -> bytes:
    """The picture in 128 colors, which are enough for a page of text and lines."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("RGB").quantize(128).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def main() -> None:
    """Write docs/report/NAME.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, metavar="PAGE", help="index.html of a study's report")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright, open_browser(playwright) as browser:
        for shot in SHOTS:
            (FOLDER / f"{shot.name}.png").write_bytes(compress(take(browser, options.page, shot)))


if __name__ == "__main__":
    main()
