"""The pictures of docs/report.md and docs/results.md: pages photographed by a system Chromium.

    python -m docs.images.report_pictures [FOLDER]

FOLDER holds `sst2` and `trec6`, each with a model and its squisher.safetensors, as `fine_tune.py` makes them; without it only the
page of the experiments' results is photographed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import Browser

HERE = Path(__file__).parent


def main() -> None:
    """Make the picture of the results, and with a folder two reports and five pictures."""
    browser = Browser()
    if sys.argv[1:]:
        reports(browser, Path(sys.argv[1]))
    browser.close()


def reports(browser: Browser, runs: Path) -> None:
    """Make two reports and five pictures of them."""
    command = Path(sys.executable).with_name("squisher")
    sst2, trec6 = (runs / task for task in ("sst2", "trec6"))
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder, "one.html"), Path(folder, "two.html")
        subprocess.run([command, "report", sst2, "--model", sst2, "--out", one], check=True)
        subprocess.run([command, "report", sst2, trec6, "--model", sst2, "--model", trec6, "--out", two], check=True)
        photograph(browser, one, "report-light", "#content", 0, 1180)
        photograph(browser, one, "report-atlas", "#atlas", 0, 1000)
        photograph(browser, two, "report-dark", "#overview", -330, 1180, scheme="dark")
        photograph(browser, two, "report-agreement", "#agreement", 0, 1290)
        photograph(browser, two, "report-phone", "#content", 0, 844, width=390)


def photograph(
    browser: Browser,
    page: Path,
    name: str,
    start: str,
    offset: int,
    height: int,
    width: int = 1280,
    scheme: str = "light",
) -> None:
    """Take one picture, from an element of the page on."""
    browser.resize(width, 900, mobile=width < 500)
    browser.prefer(scheme)
    browser.open(page)
    if browser.complaints:
        raise SystemExit(f"The page complains: {browser.complaints}")
    browser.run("document.querySelector('.top').style.position = 'static'")
    top = (
        browser.run(f"document.querySelector('{start}').getBoundingClientRect().top + scrollY")
        if start != "#content"
        else 0
    )
    picture = HERE / f"{name}.png"
    browser.picture(picture, {"x": 0, "y": max(0, top + offset), "width": width, "height": height})
    if picture.stat().st_size > 300_000:
        raise SystemExit(f"{picture.name} is larger than 300 KB.")


if __name__ == "__main__":
    main()
