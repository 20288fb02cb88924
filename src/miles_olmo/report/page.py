"""The page around the plots: one HTML file that loads nothing and runs nothing.

Everything that came from a run passes through `text` on its way into the page: a completion may hold
markup, control characters or marks that reverse the reading direction. A content security policy says
once more that neither scripts nor other addresses are wanted.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import miles_olmo
from miles_olmo.records.samples import Sample, printable
from miles_olmo.records.series import RunSeries
from miles_olmo.report.facts import Tile, facts, tiles
from miles_olmo.report.plots import LinePlot, LoadPlot, Plot
from miles_olmo.report.theme import SCHEMES

NUM_SAMPLES = 6
"""Answers shown of a run, from the best to the worst."""
LONGEST_TEXT = 1500
"""Characters of a prompt or an answer; longer ones are cut, with the number left out."""
DOCTYPE = "<!doctype html>"
"""How every page begins."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, slots=True)
class DrawnPlot:
    """A plot as the page shows it."""

    plot: Plot
    svg: str
    """Empty when no run has data."""
    notes: tuple[str, ...]
    """Why runs have no data."""


def text(value: Any) -> str:
    """A value of a run as text of the page."""
    return html.escape(printable(str(value)), quote=True)


def render_page(runs: Sequence[RunSeries], drawn: Sequence[DrawnPlot]) -> str:
    """The whole page.

    Args:
        runs: The run, and those it is compared with.
        drawn: All plots, in order.
    """
    title = " and ".join(series.status.run_id for series in runs)
    sections = list(dict.fromkeys(item.plot.section for item in drawn))
    body = [*_header(runs, sections)]
    for section in sections:
        body.append(f'<h2 id="{_anchor(section)}">{section}</h2><div class="plots">')
        body += [_plot(item, len(runs)) for item in drawn if item.plot.section == section]
        body.append("</div>")
    body += [*_counters(runs), *_samples(runs), *_facts(runs)]
    return (
        f'{DOCTYPE}\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)} · miles report</title><style>{_style()}</style></head>\n"
        f"<body><main>\n{chr(10).join(body)}\n"
        f"<footer>miles-olmo {miles_olmo.__version__} · metrics are explained in "
        "docs/reference/metrics.md</footer>\n</main></body></html>\n"
    )


def _style() -> str:
    light, dark = ("".join(f"--{n}:{c[i]};" for n, c in SCHEMES.items()) for i in (0, 1))
    fonts = (
        "--font:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;"
        "--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
    )
    sheet = files("miles_olmo.report").joinpath("page.css").read_text(encoding="utf-8")
    return f":root{{{light}{fonts}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n{sheet}"


def _anchor(section: str) -> str:
    return section.lower().replace(" ", "-")


def _header(runs: Sequence[RunSeries], sections: Iterable[str]) -> Iterator[str]:
    yield '<header><div class="runs">'
    for number, series in enumerate(runs, 1):
        status = series.status
        swatch = f'<span class="swatch run-{number}"></span>' if len(runs) > 1 else ""
        yield (
            f'<div class="run">{swatch}<h1>{text(status.run_id)}</h1>'
            f'<span class="state {status.outcome}">{status.outcome}</span>'
            f'<span class="muted">step {status.step} of {status.total_steps}</span></div>'
        )
    links = [*sections, "Counters", "Samples", "The run"]
    anchors = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in links)
    yield f"</div><nav>{anchors}</nav></header>"
    for series in runs:
        yield from _alerts(series, len(runs))
    yield '<div class="tiles">' + "".join(map(_tile, tiles(runs))) + "</div>"


def _alerts(series: RunSeries, num_runs: int) -> Iterator[str]:
    status = series.status
    of_run = f"{text(status.run_id)}: " if num_runs > 1 else ""
    if status.error:
        clauses = [status.error.get(key) for key in ("code", "what", "why", "fix")]
        shown = "; ".join(text(clause) for clause in clauses if clause)
        yield f'<div class="card alert"><p><b>{of_run}{status.outcome}:</b> {shown}</p></div>'
    if status.skipped_steps and status.skipped_steps == len(series.metrics.of("train")):
        yield (
            f'<div class="card alert"><p><b>{of_run}Nothing was trained:</b> every step was skipped, '
            "because no group carried signal.</p></div>"
        )
    if status.problems:
        lines = "".join(f"<p>{text(problem)}</p>" for problem in status.problems[:20])
        yield f'<div class="card alert"><p><b>{of_run}Damaged records</b></p>{lines}</div>'


def _tile(tile: Tile) -> str:
    classes = [""] if len(tile.values) == 1 else [f" run-{n}" for n in range(1, 3)]
    values = "".join(
        f'<div class="value{cls}">{text(value)}</div>'
        for cls, value in zip(classes, tile.values, strict=False)
    )
    return (
        f'<div class="tile"><div class="label">{text(tile.label)}</div>{values}'
        f'<div class="hint">{text(tile.hint)}</div></div>'
    )


def _plot(item: DrawnPlot, num_runs: int) -> str:
    plot, notes = item.plot, "".join(f'<p class="note">{text(note)}</p>' for note in item.notes)
    is_wide = isinstance(plot, LoadPlot) or (not isinstance(plot, LinePlot) and num_runs > 1)
    if not item.svg:
        return f'<figure class="card plot empty" id="{plot.name}"><h3>{plot.title}</h3>{notes}</figure>'
    return (
        f'<figure class="card plot{" wide" if is_wide else ""}" id="{plot.name}">{item.svg}'
        f"<figcaption>{plot.caption}</figcaption>{notes}</figure>"
    )


def _counters(runs: Sequence[RunSeries]) -> Iterator[str]:
    """What happened stands open, what did not is one click away."""
    yield '<h2 id="counters">Counters</h2>'
    rows = list(zip(*(series.counters for series in runs), strict=True))
    happened = [row for row in rows if any(counter.count for counter in row)]
    rest = [row for row in rows if row not in happened]
    yield '<div class="card"><div class="scroll">'
    if happened:
        yield _counter_table(happened, runs)
    else:
        yield (
            "<details open><summary>Nothing was dropped, retried, skipped or restarted.</summary>"
            "</details>"
        )
    yield "</div>"
    if rest:
        yield f"<details><summary>{len(rest)} counters are 0 or were not recorded</summary>"
        yield f'<div class="scroll">{_counter_table(rest, runs)}</div></details>'
    yield "</div>"


def _counter_table(rows: Sequence[tuple], runs: Sequence[RunSeries]) -> str:
    names = [s.status.run_id for s in runs] if len(runs) > 1 else ["count"]
    head = "".join(f'<th class="number">{text(name)}</th>' for name in names)
    lines = []
    for row in rows:
        counts = "".join(
            f'<td class="number">{f"{c.count:,}" if c.is_recorded else "–"}</td>' for c in row
        )
        first = row[0]
        lines.append(
            f"<tr><td>{text(first.meaning)}<br><code class='muted'>{text(first.name)}</code></td>"
            f'{counts}<td class="muted">{text(first.unit)}</td></tr>'
        )
    body = "".join(lines)
    return (
        f"<table><thead><tr><th>what</th>{head}<th></th></tr></thead><tbody>{body}</tbody></table>"
    )


def _samples(runs: Sequence[RunSeries]) -> Iterator[str]:
    yield '<h2 id="samples">Samples</h2>'
    for series in runs:
        chosen = spread(series.samples)
        of_run = f"{text(series.status.run_id)}: " if len(runs) > 1 else ""
        if not chosen:
            yield f'<div class="card plot empty"><p class="note">{of_run}no step left samples.</p></div>'
            continue
        yield (
            f'<p class="muted">{of_run}{len(chosen)} of {len(series.samples)} answers of step '
            f"{chosen[0].step}, from the best to the worst.</p>"
        )
        yield '<div class="samples">' + "".join(map(_sample, chosen)) + "</div>"


def spread(samples: Sequence[Sample], count: int = NUM_SAMPLES) -> list[Sample]:
    """At most `count` samples, evenly spread from the highest reward to the lowest."""
    ranked = sorted(samples, key=lambda sample: (-sample.reward, sample.sample_id))
    if len(ranked) <= count:
        return ranked
    return [ranked[round(i * (len(ranked) - 1) / (count - 1))] for i in range(count)]


def _sample(sample: Sample) -> str:
    facts = (
        f"{sample.finish_reason} · {sample.num_tokens} tokens · version {sample.version} · "
        f"{sample.prompt_id} · {sample.sample_id}"
    )
    return (
        f'<div class="card sample"><div class="facts"><b>reward {sample.reward:g}</b> · {text(facts)}'
        f'</div><div class="label">prompt</div><pre>{_shortened(sample.prompt)}</pre>'
        f'<div class="label">answer</div><pre>{_shortened(sample.completion)}</pre></div>'
    )


def _shortened(value: str) -> str:
    left_out = len(value) - LONGEST_TEXT
    if left_out <= 0:
        return text(value)
    return f"{text(value[:LONGEST_TEXT])}\n… {left_out:,} more characters"


def _facts(runs: Sequence[RunSeries]) -> Iterator[str]:
    columns = [facts(series) for series in runs]
    yield '<h2 id="the-run">The run</h2><div class="card scroll"><table><tbody>'
    for label in columns[0]:
        cells = "".join(f'<td class="mono">{text(column[label])}</td>' for column in columns)
        yield f"<tr><th>{text(label)}</th>{cells}</tr>"
    yield "</tbody></table></div>"
