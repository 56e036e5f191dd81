"""The report's pages in a real browser: on a desk and on a phone, in the light and in the dark."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.report.browser import Browser, chromium, missing
from tests.synthetic_run import CONFIG, write_results, write_run, write_tuning

from draftmill.report import write_report
from draftmill.report_items import ITEMS
from draftmill.statistics import throughput

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

DRAWN = """
const seen = [];
for (const plot of document.querySelectorAll("figure.plot")) {
  const title = plot.querySelector("figcaption").textContent;
  const shapes = plot.querySelectorAll("svg :is(.line,.area,.column,.span path), .bar, .stack span");
  const sizes = [...shapes].map((shape) => shape.getBoundingClientRect());
  const large = sizes.filter((size) => size.width + size.height >= 2).length;
  const coloured = [...shapes].every((shape) => {
    const style = getComputedStyle(shape);
    return [style.fill, style.stroke, style.backgroundColor].some((c) => c !== "none" && c !== "rgba(0, 0, 0, 0)");
  });
  const pictures = [...plot.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().width > 0).length;
  seen.push([title, large, coloured, pictures, plot.querySelectorAll("svg").length]);
}
return seen;
"""
SIDEWAYS = """
const page = document.documentElement;
const wide = [...document.querySelectorAll("body *")].filter((element) =>
  element.scrollWidth > element.clientWidth + 1 && !element.closest("svg, output")
  && ["auto", "scroll"].includes(getComputedStyle(element).overflowX));
const out = [...document.querySelectorAll("main *")].filter((element) => {
  const box = element.getBoundingClientRect();
  const spilt = element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== "inline"
    && !element.closest("svg, output, .stack");
  return box.width > 0 && (box.right > innerWidth + 1 || spilt);
});
return [page.scrollWidth - innerWidth, wide.length, out.map((element) => element.outerHTML.slice(0, 80))];
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("results")
    write_run(results, turns=300, shards=6, servers=3, capacity=8, pause_s=(600.0,))
    write_results(results)
    write_tuning(results)
    generated = sorted((results / "generated").glob("*.parquet"))
    throughput(generated, results / "fleet", {}, results / "throughput.json", results / "throughput.parquet")
    write_report(results, CONFIG, results / "report")
    return results / "report"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 760, 360], ids=["desk", "tablet", "phone"])
def test_pages_draw_fit_and_stay_quiet(report: Path, browser: Browser, width: int, dark: bool) -> None:
    browser.look(width, 800, dark=dark)
    plots_seen = 0
    for item in ITEMS:
        browser.open(report / f"{item.name}.html")
        assert browser.messages() == [], item.name
        assert browser.ask("return document.title") == item.title, "no text of a model ran as a script"
        drawn = browser.ask(DRAWN)
        assert isinstance(drawn, list)
        for title, large, coloured, pictures, svgs in drawn:
            assert large > 0 and coloured, f"{item.name}: {title} is empty"
            assert pictures == svgs / 2, f"{item.name}: {title} shows one drawing of two"
            plots_seen += 1
        assert browser.ask(SIDEWAYS) == [0, 0, []], item.name
        shade = browser.ask("return getComputedStyle(document.body).backgroundColor")
        assert shade == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert plots_seen >= 12


def test_a_pointer_over_a_plot_reads_its_values(report: Path, browser: Browser) -> None:
    browser.look(1280, 800, dark=False)
    browser.open(report / "throughput.html")
    read = browser.ask(
        """
        const svg = document.querySelector("svg.wide"), box = svg.getBoundingClientRect();
        const at = {clientX: box.left + box.width / 3, clientY: box.top + 80, bubbles: true};
        svg.dispatchEvent(new PointerEvent("pointermove", at));
        const shown = document.querySelector("output");
        return [shown.hidden, shown.textContent];
        """
    )
    assert isinstance(read, list)
    assert read[0] is False
    assert "node1/slot0: 160" in read[1] and "together: 480" in read[1]


def test_print_shows_everything_on_white(report: Path, browser: Browser) -> None:
    browser.look(1000, 800, dark=True)
    browser.devtools("Emulation.setEmulatedMedia", media="print")
    browser.open(report / "throughput.html")
    assert browser.ask("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert (
        browser.ask("return document.querySelector('svg.wide').getBoundingClientRect().width > 600") is True
    )
    browser.devtools("Emulation.setEmulatedMedia", media="")
