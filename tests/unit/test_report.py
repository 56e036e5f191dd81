import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.synthetic_run import CONFIG, HOSTILE, write_results, write_run, write_tuning

from draftmill import plots
from draftmill.report import write_report
from draftmill.report_items import ITEMS
from draftmill.report_provenance import redact
from draftmill.statistics import throughput

CAPTIONS = Path(__file__).parents[2] / "workflow" / "report"


class Tags(HTMLParser):
    """Every element of a page, its attributes, and the text outside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.text += data


def read(page: Path) -> Tags:
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    return tags


def make_report(results: Path, **shape: Any) -> dict[str, Tags]:
    write_run(results, **shape)
    write_results(results)
    generated = sorted((results / "generated").glob("*.parquet"))
    throughput(generated, results / "fleet", {}, results / "throughput.json", results / "throughput.parquet")
    write_report(results, CONFIG, results / "report")
    return {item.name: read(results / "report" / f"{item.name}.html") for item in ITEMS}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tags]:
    return make_report(tmp_path_factory.mktemp("results"), pause_s=(600.0,), turns=120, shards=4)


def test_every_item_is_written_and_holds_its_caption(pages: dict[str, Tags]) -> None:
    for item in ITEMS:
        assert item.title in pages[item.name].text
        assert item.caption in pages[item.name].text


def test_captions_are_those_of_the_items() -> None:
    for item in ITEMS:
        caption = (CAPTIONS / f"{item.name}.rst").read_text(encoding="utf-8")
        assert " ".join(caption.split()) == item.caption, (
            f"workflow/report/{item.name}.rst differs from report.py"
        )


def test_text_of_users_and_models_stays_text(pages: dict[str, Tags]) -> None:
    shown = pages["conversations"]
    assert HOSTILE.replace("\u202e", "\\u202e").strip() in shown.text
    for page in pages.values():
        assert not [tag for tag, _ in page.tags if tag == "img"]
        assert not [
            attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)
        ]
        scripts = [attributes for tag, attributes in page.tags if tag == "script"]
        assert sum("type" not in attributes for attributes in scripts) == 1, (
            "the page's own script and no other"
        )


def test_pages_load_nothing(pages: dict[str, Tags]) -> None:
    for page in pages.values():
        assert not [tag for tag, attributes in page.tags if {"src", "href"} & attributes.keys()]
        policies = [
            a.get("content") or "" for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
        ]
        assert len(policies) == 1 and policies[0].startswith("default-src 'none'")


def test_secrets_are_blacked_out(pages: dict[str, Tags]) -> None:
    for page in pages.values():
        assert "hunter2" not in page.text
    assert "--disable-radix-cache" in pages["config"].text and "HF_TOKEN" in pages["config"].text


def test_the_first_page_has_five_figures_and_says_what_bound_the_run(pages: dict[str, Tags]) -> None:
    first = pages["overview"]
    assert [tag for tag, _ in first.tags].count("dt") == 5
    assert "120 turns" in first.text and "state-bound" in first.text and "What to change" in first.text
    assert "2 parts" in first.text and "10 min" in first.text


def test_one_conversation_from_each_finish_reason_and_reject_reason(pages: dict[str, Tags]) -> None:
    shown = pages["conversations"].text
    for title in (
        "Accepted, finish reason stop",
        "Accepted, finish reason length",
        "Rejected: loop",
        "Rejected: empty",
    ):
        assert shown.count(title) == 1


def test_every_plot_is_drawn_for_wide_and_narrow_pages(pages: dict[str, Tags]) -> None:
    for name, plots_expected in {
        "throughput": 1,
        "occupancy": 3,
        "token-lengths": 2,
        "shard-times": 1,
    }.items():
        classes = [attributes.get("class") for tag, attributes in pages[name].tags if tag == "svg"]
        assert classes == ["wide", "narrow"] * plots_expected


def test_a_run_of_many_servers_and_shards_stays_small(tmp_path: Path) -> None:
    pages = make_report(tmp_path, turns=800, shards=200, servers=12, capacity=4)
    assert "other servers" in pages["throughput"].text
    assert "median" in pages["occupancy"].text
    assert sum(path.stat().st_size for path in (tmp_path / "report").iterdir()) < 1_000_000


def test_an_empty_dataset_has_a_report_too(tmp_path: Path) -> None:
    write_run(tmp_path, turns=2, shards=1, servers=1)
    write_results(tmp_path, reject_every=1)
    throughput([], tmp_path / "fleet", {}, tmp_path / "throughput.json", tmp_path / "throughput.parquet")
    (tmp_path / "validation.json").write_text(json.dumps({"turns": 0, "accepted": 0, "rejected": 0}))
    write_report(tmp_path, {}, tmp_path / "report")
    assert len(list((tmp_path / "report").iterdir())) == len(ITEMS)


def test_tuning_shows_what_won_and_what_failed(tmp_path: Path) -> None:
    write_tuning(tmp_path)
    pages = make_report(tmp_path, turns=10)
    shown = pages["tuning"].text
    assert "radix cache off (adopted)" in shown and "as asked (adopted)" not in shown
    assert "failed: out of memory at start" in shown and "model.state_dtype: bfloat16" in shown


def test_token_limits_are_no_secrets() -> None:
    config = {
        "max_tokens": 5,
        "stop_token_ids": [1],
        "min_supervised_tokens": 2,
        "api_key": "x",
        "hf_token": "y",
    }
    shown = redact(config)
    assert isinstance(shown, dict)
    assert [shown[name] for name in ("max_tokens", "stop_token_ids", "min_supervised_tokens")] == [5, [1], 2]
    assert "x" not in shown["api_key"] and "y" not in shown["hf_token"]


@given(st.floats(1e-6, 1e12), st.integers(2, 12))
def test_ticks_are_round_few_and_inside(high: float, count: int) -> None:
    ticks = plots.nice_ticks(0.0, high, count)
    assert 1 <= len(ticks) <= count + 1
    assert ticks[0] == 0.0 and ticks[-1] <= high * 1.000001


@given(st.text())
def test_readings_cannot_end_their_script(name: str) -> None:
    series = [plots.Series(name + "</script>", [1.0])]
    try:
        data = plots.readings(0.0, 1.0, [0.0], [name], series, plots.counts("x"))
    except TypeError:  # a lone surrogate is no text
        return
    assert data.count("</script") == 1 and data.endswith("</script>")
