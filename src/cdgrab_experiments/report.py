"""A folder of runs in, a page out: one HTML file that holds everything it shows, and the figures beside it.

Charts are drawn by a short script of our own (`templates/page.js`) instead of a charting library: a page stays below
100 KB for a typical experiment where plotly alone would add five megabytes to every one, which matters on a phone and
in a repository; and that nothing leaves the page can be read off the script. The page's security policy says so to the
browser too: it may run this script and no other, and ask nobody for anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cdgrab_experiments import published, records, words
from cdgrab_experiments.beside import beside_the_paper
from cdgrab_experiments.compare import Comparison, compare
from cdgrab_experiments.curves import PARTS, Band, Curve, curves, time_split
from cdgrab_experiments.estimates import Estimate
from cdgrab_experiments.glance import glance, stands_in
from cdgrab_experiments.looks import looks
from cdgrab_experiments.markdown import markdown
from cdgrab_experiments.plots import by_workers, task_title, write_figures
from cdgrab_experiments.whole_files import write_whole

# Longer runs are thinned out: nobody sees more points than a chart has pixels.
POINTS = 240
TONES = {outcome: words_of.capitalize() for outcome, words_of in words.OUTCOMES.items()}
SCALES = [("zoomed", "Zoomed"), ("linear", "Linear"), ("log", "Log")]
BALANCE = {"herding_bound": "Herding bound", "imbalance": "Imbalance"}
SETUP = ("batch_size", "epochs", "optimizer", "lr", "momentum", "weight_decay", "schedule", "partition", "workers")


def write_report(folder: Path, out: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """Write the page, the table behind it and the figures; return the page.

    Args:
        folder: Where runs are, at any depth.
        out: The folder to write into, made if it is not there: `report.html`, `comparison.md`, `figures/*.png|pdf`.
        say: Is told of every run that is left out because it cannot be read; page and table say so too.

    Raises:
        ValueError: If `folder` has no runs that can be read.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; expected one with runs, as `cdgrab run` and `cdgrab compare` write"
        )
    runs, damaged = records.load_readable(folder)
    if not runs and not damaged:
        raise ValueError(f"no run.json anywhere in {folder}; make runs with `cdgrab run` or `cdgrab compare` first")
    if not runs:
        raise ValueError("; ".join(damaged))
    for line in damaged:
        say(f"Left out: {line}")
    comparisons = compare(runs)
    out.mkdir(parents=True, exist_ok=True)
    write_figures(comparisons, out / "figures")
    write_whole(out / "comparison.md", markdown(comparisons, damaged))
    write_whole(out / "report.html", page(comparisons, damaged))
    return out / "report.html"


def page(comparisons: Sequence[Comparison], left_out: Sequence[str] = ()) -> str:
    """The page as text. Everything that comes from records is escaped, in tags by the template and in data here."""
    environment = Environment(
        loader=PackageLoader("cdgrab_experiments"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    chosen = looks(name for comparison in comparisons for name in comparison.runs)
    numbers = {name: i for i, name in enumerate(chosen)}
    data: dict[str, Any] = {}
    overviews = []
    for i, group in enumerate(by_workers(comparisons)):
        overview, data[f"workers-{i}"] = _overview(f"workers-{i}", group, numbers)
        overviews.append(overview)
    sections = []
    for i, comparison in enumerate(comparisons):
        lines = curves(comparison.runs)
        sections.append(_section(f"setting-{i}", comparison, lines))
        data[f"setting-{i}"] = _chart_data(comparison, lines, numbers)
    script = _text(environment, "page.js")
    num_runs = sum(len(runs) for comparison in comparisons for runs in comparison.runs.values())
    versions = sorted({str(run.info.environment.get("cdgrab", "unknown")) for run in _all_runs(comparisons)})
    return environment.get_template("page.html").render(
        title="Data orders compared",
        subtitle=f"{_count(num_runs, 'run')} in {_count(len(comparisons), 'setting')}, "
        f"made with cdgrab {', '.join(versions)}",
        style=Markup(environment.get_template("page.css").render(looks=list(chosen.values()))),
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        data=Markup(_json(data)),
        looks=numbers,
        sections=sections,
        overviews=overviews,
        glance=glance(comparisons),
        left_out=left_out,
        tones=TONES,
        scales=SCALES,
        citation=published.CITATION,
    )


def _section(key: str, comparison: Comparison, lines: dict[str, Curve]) -> dict[str, Any]:
    quantities = {name for line in lines.values() for name in line.bands()}
    runs = _all_runs([comparison])
    data = list(dict.fromkeys(run.info.data for run in runs if run.info.data))
    split = {name: parts for name, mine in comparison.runs.items() if (parts := time_split(mine))}
    part_names = [*PARTS.values(), "other"]
    used = [(i, name) for i, name in enumerate(part_names) if any(parts.get(name, 0) > 0 for parts in split.values())]
    return {
        "key": key,
        "title": comparison.title,
        "rival": comparison.rival,
        "data": data,
        "stand_in": stands_in(comparison),
        "verdicts": words.verdicts(comparison),
        "notes": comparison.notes,
        "names": list(lines),
        "quantities": quantities,
        "known": "above" in quantities,
        "metric": comparison.any_run.info.metric,
        "balance": [(name, title) for name, title in BALANCE.items() if name in quantities],
        "hits": any(row.reached for row in comparison.rows if row.contender != comparison.rival),
        "bars": _bars(split, part_names),
        "key_parts": used,
        "table": words.table(comparison),
        "legend": words.LEGEND.format(comparison.rival),
        "published": beside_the_paper(comparison),
        "commands": list(dict.fromkeys(run.info.command for run in runs if run.info.command)) or ["not recorded"],
        "facts": _facts(comparison),
    }


def _bars(split: dict[str, dict[str, float]], names: list[str]) -> list[dict[str, Any]]:
    longest = max((sum(parts.values()) for parts in split.values()), default=1.0)
    bars = []
    for contender, parts in split.items():
        said = ", ".join(f"{part} {words.number(value, 3)} s" for part, value in parts.items() if value > 0)
        widths = [(names.index(part), f"{100 * value / longest:.2f}") for part, value in parts.items() if value > 0]
        total = words.number(sum(parts.values()), 3)
        label = f"{contender}: {total} seconds per epoch ({said})"
        bars.append({"name": contender, "total": total, "label": label, "parts": widths})
    return bars


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    setting, runs = comparison.setting, _all_runs([comparison])
    facts = [(name.replace("_", " "), str(getattr(setting, name))) for name in SETUP]
    examples = sorted({f"{run.info.num_examples:,} units, gradients of length {run.info.dim:,}" for run in runs})
    facts.append(("problem", "; ".join(examples)))
    facts += [
        (f"seeds, {contender}", ", ".join(map(str, mine)) + ("" if mine else "none"))
        for contender, mine in comparison.runs.items()
    ]
    keys = dict.fromkeys(key for run in runs for key in run.info.environment)
    for key in keys:
        values = dict.fromkeys(str(run.info.environment.get(key, "not recorded")) for run in runs)
        facts.append((key, "; ".join(values)))
    return facts


def _overview(key: str, group: Sequence[Comparison], numbers: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    known = all(row.above is not None for comparison in group for row in comparison.rows if row.final)
    names = list(dict.fromkeys(row.contender for comparison in group for row in comparison.rows if row.final))
    ordered = sorted(group, key=lambda comparison: comparison.setting.workers)
    series = []
    for name in names:
        points: list[tuple[int, Estimate]] = []
        for comparison in ordered:
            row = comparison.row(name)
            final = None if row is None else row.above if known else row.final
            if final is not None:
                points.append((comparison.setting.workers, final))
        ends = [(final.mean, final.deviation or 0.0) for _, final in points]
        band = [[m for m, _ in ends], [m - d for m, d in ends], [m + d for m, d in ends]]
        workers = [workers for workers, _ in points]
        bands = {"loss": [_numbers(row) for row in band]}
        series.append({"name": name, "look": numbers[name], "workers": workers, "bands": bands})
    what = "Final loss above the minimum" if known else "Final training loss"
    words_for = {"key": key, "title": task_title(group[0]), "names": names, "known": known}
    return {**words_for, "what": f"{what}, mean ± deviation"}, {"rival": group[0].rival, "series": series}


def _chart_data(comparison: Comparison, lines: dict[str, Curve], numbers: dict[str, int]) -> dict[str, Any]:
    series = []
    for name, line in lines.items():
        kept = np.unique(np.linspace(0, len(line.epochs) - 1, min(POINTS, len(line.epochs))).round().astype(int))
        row = comparison.row(name)
        hit = None
        if row and row.epochs and row.reached == row.tried:
            means = [row.epochs.mean, row.seconds.mean if row.seconds else math.nan]
            hit = dict(zip(("epochs", "seconds"), _numbers(means), strict=True))
        series.append(
            {
                "name": name,
                "look": numbers[name],
                "epochs": _numbers(line.epochs[kept]),
                "seconds": _numbers(line.seconds[kept]),
                "bands": {quantity: _band(band, kept) for quantity, band in line.bands().items()},
                "hit": hit,
            }
        )
    rival = comparison.row(comparison.rival)
    ends = {"loss": rival.final, "above": rival.above} if rival else {}
    target = {name: _numbers([end.mean])[0] for name, end in ends.items() if end is not None}
    return {"rival": comparison.rival, "target": target, "series": series}


def _band(band: Band, kept: Any) -> list[list[float | None]]:
    return [_numbers(edge[kept]) for edge in (band.mean, band.low, band.high)]


def _numbers(values: Iterable[float]) -> list[float | None]:
    """Seven digits are more than a chart can show; JSON knows no NaN."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in map(float, values)]


def _json(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in, whatever the names in it are."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _all_runs(comparisons: Iterable[Comparison]) -> list[records.Run]:
    return [run for comparison in comparisons for mine in comparison.runs.values() for run in mine.values()]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
