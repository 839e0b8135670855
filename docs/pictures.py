"""Take the pictures of README and documentation of a finished run, in headless Chromium.

    python docs/pictures.py runs/demo --group g000011
    python docs/pictures.py runs/guided --group g000034 --guided

Choose a group whose attempts diverge early, some of them right; with `--guided` one with guided attempts.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.ray_jobs.browser import chromium, viewer  # noqa: E402

IMAGES = ROOT / "docs" / "images"
_SETTLED_MS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """`place` is the address in the viewer; `part` the element that is shown, the whole window where it is empty."""

    name: str
    place: str
    part: str = ""
    width: int = 1280
    height: int = 800
    scheme: str = "light"


def pictures(group: str, *, guided: bool) -> tuple[Picture, ...]:
    place = f"#/group/{group}"
    of_group = Picture(name="viewer-group", place=place, part=".picture", width=1100, height=1300)
    if guided:
        trajectory = Picture(name="viewer-trajectory", place=f"#/t/{group}%2Fguided%2F0", height=1150)
        return replace(of_group, name="viewer-guided"), trajectory
    dark = replace(of_group, name="viewer-group-dark", scheme="dark")
    return of_group, dark, Picture(name="viewer-curves", place="#/", height=1000)


def _take(browser: Browser, address: str, picture: Picture) -> None:
    size = {"width": picture.width, "height": picture.height}
    page = browser.new_page(viewport=size, color_scheme=picture.scheme)  # type: ignore[arg-type]
    page.goto(f"{address}{picture.place}")
    page.wait_for_timeout(_SETTLED_MS)
    shown = page.locator(picture.part).first if picture.part else page
    shown.screenshot(path=IMAGES / f"{picture.name}.png")
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--group", required=True)
    parser.add_argument("--guided", action="store_true", help="take the pictures of guided attempts")
    options = parser.parse_args()
    executable = chromium()
    if executable is None:
        sys.exit("no Chromium here: install one, as with `apt-get install chromium`")
    with sync_playwright() as playwright, viewer(options.run) as address:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        for picture in pictures(options.group, guided=options.guided):
            _take(browser, address, picture)
        browser.close()


if __name__ == "__main__":
    main()
