"""The page of a report: whole, offline, the same for the same records, and safe for any text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from recorded_runs import begin, end, launcher, make_run, write_steps

from miles_olmo.api import report
from miles_olmo.base.errors import UsageError
from miles_olmo.cli.main import main
from miles_olmo.records.metrics import MetricsLog
from miles_olmo.report.plots import PLOTS

SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """What a browser would make of a page: its tags, its text, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data") and value[:1] != "#":
                self.loaded.append(value)
            assert not name.startswith("on"), f"{tag} has {name}"

    def handle_data(self, data):
        self.texts.append(data)


def figures(page: str) -> dict[str, ElementTree.Element]:
    """The drawing of each plot that has one."""
    found = re.findall(r'<figure [^>]*id="([\w-]+)">(<svg.*?</svg>)', page, re.DOTALL)
    return {name: ElementTree.fromstring(svg) for name, svg in found}


def words(svg: ElementTree.Element) -> set[str]:
    return {element.text or "" for element in svg.iter(f"{SVG}text")}


def note_of(page: str, plot: str) -> str:
    found = re.search(rf'id="{plot}">.*?<p class="note">(.*?)</p>', page, re.DOTALL)
    assert found is not None, f"{plot} has no note"
    return found[1]


def page_of(directory, **options) -> str:
    return Path(report(directory, **options).path).read_text(encoding="utf-8")


def test_every_plot_has_a_title_axes_with_units_and_data(tmp_path):
    page = page_of(make_run(tmp_path / "run").root)
    drawn = figures(page)
    assert list(drawn) == [plot.name for plot in PLOTS]
    for plot in PLOTS:
        shown = words(drawn[plot.name])
        assert plot.title in shown and plot.x_label in shown
        assert getattr(plot, "y_label", "uniform shares") in shown
        assert not any("$" in word for word in shown), "a formula that nobody typesets"
        marks = [*drawn[plot.name].iter(f"{SVG}path"), *drawn[plot.name].iter(f"{SVG}image")]
        assert any(len(mark.get("d", "")) > 60 or mark.tag == f"{SVG}image" for mark in marks)
    assert "No data" not in page.replace('content: "No data: "', "")


def test_the_page_loads_nothing_and_runs_nothing(tmp_path):
    page = Page(page_of(make_run(tmp_path / "run").root))
    assert "script" not in page.tags and "link" not in page.tags and "iframe" not in page.tags
    assert all(value.startswith("data:image/png;base64,") for value in page.loaded)


def test_the_same_records_give_the_same_bytes_whatever_matplotlib_is_set_to(tmp_path):
    import matplotlib

    run = make_run(tmp_path / "run")
    first = report(run.root, output=tmp_path / "a" / "index.html", png=True)
    matplotlib.rcParams["lines.linewidth"] = 9
    second = report(run.root, output=tmp_path / "b" / "index.html", png=True)
    assert matplotlib.rcParams["lines.linewidth"] == 9
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"index.html", *(f"{plot.name}.png" for plot in PLOTS)}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert [plot.png is not None for plot in first.plots] == [True] * len(PLOTS)
    assert first.num_bytes == second.num_bytes == (tmp_path / "a" / "index.html").stat().st_size


HOSTILE = [
    "</script><script>alert(1)</script>",
    "</pre><img src=x onerror=alert(1)>",
    "<!-- \" onload='x' ]]>",
    "a\u202eb\x00c\ud800d\x1b[31m",
]


def test_text_of_a_model_stays_text(tmp_path):
    completion = " ".join(HOSTILE)
    run = begin(tmp_path / "run", {"name": completion, "train": {"steps": 1}})
    write_steps(run, range(1, 2), completion=completion)
    error = {"code": "E315", "what": completion, "why": "", "fix": ""}
    launcher(run).append(
        "run-failed", {"attempt": 1, "error": {**error, "what": completion.replace("\ud800", "")}}
    )
    page = Page(page_of(run.root))
    assert "script" not in page.tags and "img" not in page.tags
    assert all(value.startswith("data:image/png;base64,") for value in page.loaded)
    shown = "".join(page.texts)
    assert all(text.split("\u202e")[0] in shown for text in HOSTILE)
    assert not set("\u202e\x00\x1b") & set(shown)


def test_names_with_signs_that_matplotlib_or_html_would_read_are_shown_as_they_are(tmp_path):
    first, second = make_run(tmp_path / "_a$x$<b>"), make_run(tmp_path / "other&")
    page = page_of(first.root, compare=second.root, output=tmp_path / "index.html")
    drawn = figures(page)
    assert {"_a$x$<b>", "other&"} <= words(drawn["reward"])
    assert "<b>" not in re.sub(r"<b>(Damaged|reward)", "", page)


def test_a_run_without_warmup_evaluation_and_experts_says_so(tmp_path):
    run = begin(tmp_path / "run", {"name": "x", "train": {"steps": 2}})
    with MetricsLog(run.metrics) as metrics:
        metrics.append("train", 1, 1, {"rollout/reward": 0.5})
    end(run)
    page = page_of(run.root)
    assert note_of(page, "accuracy") == "The manifest has no [evaluation]."
    assert note_of(page, "warmup-loss") == "The manifest has no [warmup]."
    assert "expert_load.jsonl" in note_of(page, "expert-load")
    assert "another version" in note_of(page, "entropy")
    assert list(figures(page)) == ["reward"]


def test_a_run_of_no_step_is_a_page_of_notes(tmp_path):
    page = page_of(make_run(tmp_path / "run", start=False).root)
    assert figures(page) == {}
    assert note_of(page, "reward") == "Training left no measurement before the run crashed."
    assert "no step left samples" in page


def test_a_run_that_skipped_every_step_says_that_it_trained_nothing(tmp_path):
    run = begin(tmp_path / "run", {"name": "x", "train": {"steps": 2}})
    with MetricsLog(run.metrics) as metrics:
        for step in (1, 2):
            metrics.append("train", step, 1, {"rollout/reward": 0.0, "rollout/skipped_step": 1.0})
    end(run)
    page = page_of(run.root)
    assert "Every step was skipped" in note_of(page, "entropy") and "Nothing was trained" in page


def test_damaged_records_are_named_and_the_rest_is_shown(tmp_path):
    run = make_run(tmp_path / "run")
    lines = run.metrics.read_bytes().split(b"\n")
    run.metrics.write_bytes(b"\n".join([*lines[:9], b"{oops", *lines[9:-2], lines[-2][:20]]))
    run.expert_load.write_bytes(b"[1]\n" + run.expert_load.read_bytes())
    run.samples(20).write_bytes(b"{}\n")
    page = page_of(run.root)
    assert "metrics.jsonl:10: not a metrics row" in page
    assert "expert_load.jsonl:1: not an expert load row" in page and "E533" in page
    assert len(figures(page)) == len(PLOTS)


def test_two_runs_share_the_plots_and_a_legend_tells_them_apart(tmp_path):
    first = make_run(tmp_path / "first")
    second = begin(tmp_path / "second", {"name": "x", "train": {"steps": 2}})
    with MetricsLog(second.metrics) as metrics:
        for step in (1, 2):
            metrics.append("train", step, 1, {"rollout/reward": 0.1 * step})
    end(second)
    page = page_of(first.root, compare=second.root)
    drawn = figures(page)
    assert {"first", "second"} <= words(drawn["reward"])
    assert note_of(page, "entropy").startswith("second: ")
    assert "first" in words(drawn["entropy"])  # alone, but it must still be clear whose line it is


def test_the_command_says_what_it_wrote_and_what_has_no_data(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "runs" / "tiny-1")
    arguments = ["report", "tiny", "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["miles", *arguments, "--json"])
    with pytest.raises(SystemExit, match="0"):
        main()
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "miles-olmo/report/v1" and document["run_ids"] == ["tiny-1"]
    assert Path(document["path"]) == run.root / "report" / "index.html"
    run.expert_load.unlink()
    monkeypatch.setattr(sys, "argv", ["miles", *arguments])
    with pytest.raises(SystemExit, match="0"):
        main()
    shown = capsys.readouterr().out
    assert "index.html" in shown and re.search(r"without data:\n  Expert load +The run left", shown)


def test_a_run_is_not_compared_with_itself(tmp_path):
    run = make_run(tmp_path / "run", start=False)
    with pytest.raises(UsageError, match="E360"):
        report(run.root, compare=tmp_path / "." / "run")


def test_an_output_that_cannot_be_written_is_a_usage_error(tmp_path):
    run = make_run(tmp_path / "run", start=False)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"E604.*--output"):
        report(run.root, output=tmp_path / "file" / "index.html")


def test_a_file_that_is_no_page_is_not_replaced(tmp_path):
    run = make_run(tmp_path / "run", start=False)
    plan = run.plan.read_bytes()
    for output in (run.plan, Path()):
        with pytest.raises(UsageError, match=r"E604.*no page"):
            report(run.root, output=output)
    assert run.plan.read_bytes() == plan
    page = tmp_path / "page.html"
    assert report(run.root, output=page).path == report(run.root, output=page).path


def test_without_matplotlib_the_command_names_what_to_install(tmp_path):
    run = make_run(tmp_path / "run", start=False)
    program = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv[0] = 'miles'\n"
        "from miles_olmo.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "report", str(run.root)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("E610") and "[report]" in done.stderr
