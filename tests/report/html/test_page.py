"""The page: it stands alone, and every figure on it is the plan's."""

import dataclasses
import html
import importlib.util
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import autopar
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.plan.layout import Layout
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.report_data import ReportData
from autopar.cost_model.memory.liveness import CATEGORIES
from autopar.report.event_names import EventNames
from autopar.report.html.alternatives import alternatives
from autopar.report.html.lanes import MOST_PIECES, WIDTH, lanes_of
from autopar.report.html.memory import MEANS
from autopar.report.html.mesh import held_bytes, portions_of, stored
from autopar.report.html.page import page
from tests.report.plans import ROWS, STRATEGIES, planned

PREDICTED = ("data", "sharded", "stages")


class Parsed(HTMLParser):
    """A page taken apart: open elements, figures by section, ids, links, scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.section = ""
        self.figures: dict[str, list[float]] = {}
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag != "meta":
            self.open.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[k] for k in ("href", "src") if k in given]
        if tag in ("section", "header"):
            self.section = given.get("id", tag)
        if tag == "data":
            self.figures.setdefault(self.section, []).append(float(given["value"]))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        where = self.open[-1] if self.open else ""
        self.text[where] = self.text.get(where, "") + data


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_page_stands_alone(name):
    parsed = Parsed(page(planned(name)))
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert parsed.links
    assert {link[1:] for link in parsed.links} <= set(parsed.ids)
    assert all(link.startswith("#") for link in parsed.links)


@pytest.mark.parametrize("name", PREDICTED)
def test_figures_are_those_of_the_plan(name):
    plan, shown = planned(name), Parsed(page(planned(name))).figures
    p = plan.prediction
    near = [pytest.approx(value, rel=1e-6) for value in (p.step_s, p.exposed_s, p.compute_s)]
    assert all(value in shown["header"] for value in near)
    assert {plan.world_size, p.peak_bytes, p.needed_bytes} <= set(shown["header"])
    brings = ROWS / p.step_s, p.work.utilisation(p.step_s, plan.world_size)
    assert all(pytest.approx(value, rel=1e-6) in shown["header"] for value in brings)
    assert set(filter(None, p.memory.values())) <= set(shown["memory"])
    for other in plan.runners_up:
        assert pytest.approx(other.step_s, rel=1e-6) in shown["others"]
        assert other.needed_bytes in shown["others"]
    groups = Counter()
    for item in p.exposures:
        groups[item.collective, item.axis, item.block] += item.exposed_s
    waits = shown.get("waits", [])
    assert all(pytest.approx(waited_s, rel=1e-6) in waits for waited_s in groups.values())
    assert not p.exposures or pytest.approx(sum(p.waits.values()), rel=1e-6) in waits
    assert set(p.provenance.values()) <= set(shown["sources"])
    for item in p.report_data.traffic:
        assert sum(n * times for n, times, _ in item.sent) in shown["traffic"]
    assert {n for _, n in plan.sent_bytes} <= set(shown["mesh"])


@pytest.mark.parametrize("name", PREDICTED)
def test_the_timeline_has_every_event_and_the_peak(name):
    p = planned(name).prediction
    data = json.loads(re.search(r'id="timeline">(.*?)</script>', page(planned(name)))[1])
    pieces = [piece for track in data["tracks"] for lane in track for piece in lane["pieces"]]
    drawn = Counter(piece[2] for piece in pieces)
    names = EventNames(p.events, p.report_data.calls)
    own = (event[0] if p.stages else names.of(event) for event in p.events)
    assert not Counter(own) - drawn
    assert max(start + width for start, width, *_ in pieces) == pytest.approx(WIDTH, rel=1e-4)
    held = [sum(column) for column in zip(*(row for _, row in data["memory"]["rows"]), strict=True)]
    assert max(held) == p.peak_bytes


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_a_rank_is_said_to_hold_is_its_share(name):
    plan = planned(name)
    for rank in range(plan.world_size):
        held = plan.pipeline.held(Layout(plan).coordinate(rank)["pp"]) if plan.pipeline else None
        own = {n: size for n, size in plan.parameter_bytes if held is None or n in held}
        expected = sum(Layout(plan).share_of(name) * size for name, size in own.items())
        assert held_bytes(plan, portions_of(plan), rank) == pytest.approx(expected)


def test_slices_of_all_ranks_make_the_whole():
    plan = planned("sharded")
    for portion in portions_of(plan):
        storage = dict(Layout(plan).storage)
        spans = {portion.interval(stored(plan, rank), storage) for rank in range(8)}
        assert sum(high - low for low, high in spans) == pytest.approx(1.0)


def test_up_to_1024_ranks_are_all_drawn_and_of_more_every_stage():
    plan = planned("stages")
    for dp, drawn in (256, 1024), (512, 1024):
        mesh = (("pp", 4), (DATA_AXIS, dp))
        text = page(dataclasses.replace(plan, mesh=mesh, world_size=4 * dp))
        data = json.loads(re.search(r'id="ranks">(.*?)</script>', text)[1])
        assert len(set(data["ranks"])) == drawn
        assert {rank // dp for rank in data["ranks"]} == {0, 1, 2, 3}
        picture = re.search(r'class="grid-of-ranks".*?</svg>', text)[0]
        assert picture.count("M") == drawn
        assert ("1,024 of 2,048 ranks are drawn" in text) == (dp == 512)
        assert len(text) < 1_000_000


def test_micro_batches_alone_are_no_stages_of_a_pipeline():
    assert "Stages of the pipeline" in page(planned("stages"))
    plan = dataclasses.replace(planned("sharded"), pipeline=Pipeline(1, "gpipe", 4))
    assert "Stages of the pipeline" not in page(plan)


def test_the_verdict_comes_first_and_ddp_and_fsdp_are_alternatives():
    plan = planned("stages")
    known = plan.search
    text = page(plan)
    first = re.search(r'<ul class="verdict">(.*?)</ul>', text)[1]
    assert f"{abs(known.gain(plan.prediction.step_s)):.1%}" in first
    assert text.index('class="verdict"') < text.index('class="tiles"')
    assert re.search(
        r"MFU: [\d.e+]+ FLOP a step ÷ \([\d.]+ [mµ]s × 8 ranks × [\d,]+ TFLOP/s\)", text
    )
    names = [other.name for other in alternatives(plan)]
    assert names[0] == plan.name
    assert {known.ddp.name, known.fsdp.name} <= set(names)
    assert {known.ddp.name, known.fsdp.name} == {
        "data parallel, buckets 4 MiB",
        "zero3, buckets 4 MiB",
    }
    cap = dataclasses.replace(plan, memory_cap=plan.prediction.needed_bytes - 1)
    assert "It does not fit:" in page(cap)


def test_a_plan_that_was_read_makes_the_same_page():
    plan = planned("sharded")
    again = autopar.Plan.from_dict(json.loads(plan.to_json()))
    assert page(again) == page(plan)
    copied = re.search(r"JSON, .*?<pre[^>]*>(.*?)</pre>", page(plan), re.S)[1]
    assert autopar.Plan.from_dict(json.loads(html.unescape(copied))) == plan


def test_without_a_picture_there_is_still_a_curve_and_without_prediction_a_word():
    plan = planned("data")
    bare = dataclasses.replace(plan.prediction, report_data=ReportData())
    text = page(dataclasses.replace(plan, prediction=bare))
    assert '"tensors"' in text
    assert 'id="traffic"' not in text
    assert "Nothing was predicted" in page(planned("fixed"))


def test_a_long_timeline_stays_small():
    p = planned("data").prediction
    row, step = p.events[0], 1e-3
    many = tuple((f"mm_{i}", *row[1:2], i * step, (i + 1) * step, row[4]) for i in range(40_000))
    long = dataclasses.replace(p, events=many, step_s=40_000 * step, report_data=ReportData())
    assert sum(len(lane.pieces) for lane in lanes_of(long)) <= MOST_PIECES
    assert len(page(dataclasses.replace(planned("data"), prediction=long))) < 1_000_000


def test_every_category_has_a_colour_and_a_meaning():
    assert set(MEANS) == set(CATEGORIES)
    assert all(f".c-{name.replace(' ', '-')} " in STYLE for name in CATEGORIES)


STYLE = (Path(autopar.__file__).parent / "report" / "html" / "page.css").read_text()


def colours(scheme):
    """Colours of the style sheet by variable."""
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    dark = dark.split("* {")[0]
    found = dict(re.findall(r"--(\w+): (#\w{6});", light if scheme == "light" else light + dark))
    hues = dict(re.findall(r"\.(h\d+) \{ --h: (#\w{6});", STYLE))
    return found | hues


def luminance(colour):
    """Relative luminance of WCAG 2."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted(map(luminance, (one, other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


TEXT = [(text, ground) for text in ("ink", "soft", "accent") for ground in ("paper", "card")]
TEXT += [("warn", "card"), ("paper", "ink"), ("ink", "faint"), ("soft", "faint")]
NAMED = [
    "forward",
    "backward",
    "update",
    "reduce",
    "gather",
    "scatter",
    "exchange",
    "spread",
    "F",
    "B",
    "I",
    "W",
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_that_of_wcag_aa(scheme):
    """Text at 4.5, and marks without text at 3 beside the card or each other's outline."""
    found = colours(scheme)
    for text, ground in TEXT:
        assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    for look in NAMED:
        assert contrast("#ffffff", found[look]) >= 4.5, look
    assert contrast("#1d2329", found["wait"]) >= 4.5


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FRAMED = """<!doctype html><title></title><iframe width={width} height=800 srcdoc="{page}"></iframe>
<script>onload = async () => {{
  const frame = document.querySelector("iframe"), inside = frame.contentDocument;
  const found = {{ wide: inside.documentElement.scrollWidth }};
  found.names = inside.querySelectorAll(".names span").length;
  if ("{axe}") {{
    const script = inside.createElement("script");
    script.src = "{axe}";
    await new Promise((done) => {{ script.onload = done; inside.head.append(script); }});
    const rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"];
    const result = await frame.contentWindow.axe.run(inside, {{ runOnly: rules }});
    found.violations = result.violations.map((rule) => [rule.id, rule.nodes[0].html]);
    found.passes = result.passes.length;
  }}
  document.title = JSON.stringify(found);
}};</script>"""
"""The page in a frame as wide as a phone: Chromium's own windows are at least 500 pixels wide."""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to draw the page")
@pytest.mark.parametrize(("name", "dark"), [("sharded", False), ("stages", True)])
def test_a_phone_shows_the_page_without_errors(name, dark, tmp_path):
    """No sideways scroll at 390 pixels, no message on the console, no violation found by axe."""
    axe = importlib.util.find_spec("axe_core_python")
    script = Path(axe.origin).with_name("axe.min.js").as_uri() if axe is not None else ""
    framed = FRAMED.format(page=html.escape(page(planned(name))), axe=script, width=390)
    (tmp_path / "frame.html").write_text(framed)
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    flags += " --disable-background-networking --disable-component-update --dump-dom"
    flags += " --enable-logging=stderr --virtual-time-budget=20000 --allow-file-access-from-files"
    flags += " --blink-settings=preferredColorScheme=0" if dark else ""
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'user'}"]
    command.append(f"file://{tmp_path / 'frame.html'}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr[-500:]
    found = json.loads(html.unescape(title[1]))
    assert found["wide"] <= 390
    assert found["names"] > 0  # the script has run
    assert "CONSOLE" not in done.stderr
    if script:
        assert found["violations"] == []
        assert found["passes"] > 10
