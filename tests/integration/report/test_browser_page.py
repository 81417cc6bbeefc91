"""The report page in a real Chromium: no errors, nothing asked of the network, everything there to see."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import BrowserPage, browser_page, find_browser
from PIL import Image

from flexfloor.cli.report import main
from tests.synthetic_run import make_run

pytestmark = pytest.mark.integration

SECTIONS = ("summary", "pareto", "timelines", "curves", "lengths", "decisions", "runs")
SCRIPT = "<script>console.error('injected')</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserPage]:
    browser = find_browser()
    if browser == "none":
        pytest.skip("FLEXFLOOR_CHROMIUM=none: the report page was NOT looked at in a browser")
    if browser is None:
        pytest.fail("no Chromium: run scripts/browser.sh, or set FLEXFLOOR_CHROMIUM=none to leave this out")
    with browser_page(browser, tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of six steps, whose prompts try to be markup."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "static", num_steps=6, is_elastic=False, prompt_prefix=SCRIPT)
    make_run(folder / "elastic", num_steps=6, prompt_prefix=SCRIPT)
    output = folder / "report.html"
    assert main([str(folder / "static"), str(folder / "elastic"), "--output", str(output)]) == 0
    return output


@pytest.fixture
def opened(page: BrowserPage, report: Path) -> BrowserPage:
    page.problems.clear()
    page.requests.clear()
    page.open(report)
    return page


def test_a_page_with_an_error_is_noticed(page: BrowserPage, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<script>console.error('one'); missing.thing();</script>")
    page.problems.clear()
    page.open(tmp_path / "bad.html")
    assert any("one" in problem for problem in page.problems)
    assert any("missing is not defined" in problem for problem in page.problems)


def test_the_page_has_no_errors_and_asks_for_nothing(opened: BrowserPage, report: Path) -> None:
    assert opened.problems == []
    asked = [url for url in opened.requests if not url.startswith("data:")]
    assert asked == [report.resolve().as_uri()]


def test_every_section_takes_room_on_the_page(opened: BrowserPage) -> None:
    for section in SECTIONS:
        height = opened.evaluate(f"document.getElementById('{section}').getBoundingClientRect().height")
        assert height > 100, section


def test_nothing_is_wider_than_the_window(opened: BrowserPage) -> None:
    opened.screenshot(1160, 900)
    assert opened.evaluate("document.documentElement.scrollWidth") <= 1160


def test_texts_of_a_timeline_do_not_lie_on_each_other(opened: BrowserPage) -> None:
    overlaps = opened.evaluate(
        """(() => {
          const found = [];
          for (const svg of document.querySelectorAll('svg.ff')) {
            const texts = [...svg.querySelectorAll('text')].filter(text => text.getClientRects().length);
            const boxes = texts.map(text => text.getBoundingClientRect());
            boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b, j) => {
              const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
              const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
              if (wide > 1 && high > 4) found.push([texts[i].textContent, texts[i + j + 1].textContent]);
            }));
          }
          return found;
        })()"""
    )
    assert overlaps == []


def test_another_step_is_shown_when_it_is_chosen(opened: BrowserPage) -> None:
    shown = "[...document.querySelectorAll('div.step')].filter(p => p.offsetHeight).map(p => p.dataset.step)"
    assert opened.evaluate(shown) == ["0"]
    opened.evaluate("document.querySelectorAll('button[data-step]')[2].click()")
    assert opened.evaluate(shown) == ["5"]
    opened.evaluate(
        "(() => { const choice = document.getElementById('step-choice'); choice.value = '3';"
        " choice.dispatchEvent(new Event('change')); })()"
    )
    assert opened.evaluate(shown) == ["3"]
    assert opened.evaluate("document.querySelectorAll('div.step[data-step=\"3\"] svg').length") == 2
    assert opened.problems == []


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_a_picture_of_the_page_is_not_blank(opened: BrowserPage, scheme: str, is_dark: bool) -> None:
    opened.prefer(scheme)
    picture = Image.open(io.BytesIO(opened.screenshot(1160, 2000))).convert("RGB")
    counts = sorted(picture.getcolors(maxcolors=1 << 24), reverse=True)
    assert len(counts) > 50
    assert (sum(counts[0][1]) < 3 * 60) is is_dark
    assert counts[0][0] < 0.97 * picture.width * picture.height
    keep = os.environ.get("FLEXFLOOR_KEEP_PICTURES")
    if keep:
        picture.save(Path(keep) / f"report-{scheme}.png")
