"""The HTML report: well-formed, self-contained, nothing from a file gets out of its text, bounded in size."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

from lxml import html
from native_algorithms import timed, two_nodes

from taccl.profiles.load import load_topology
from taccl.profiles.topology import Link, Topology
from taccl.synth.algorithm import Algorithm
from taccl.synth.collective import build
from taccl.synth.export.html import Entry, report_html
from taccl.synth.lower import lower_exact
from taccl.synth.simulate import Simulation, simulate

HOSTILE = "</title><script>alert(1)</script>\" onload='x' &amp; \x00"


def entry(
    algorithm: Algorithm, topology: Topology, measurements: Any = (), title: str = "one", own: bool = True
) -> Entry:
    program = lower_exact(algorithm, topology).program
    simulation = simulate(program, topology, algorithm.size_bytes, collective=algorithm.collective)
    return Entry(title, topology, simulation, algorithm if own else None, measurements)


TWO = two_nodes()
# Its program takes exactly its time, so the report draws the schedule, which knows the chunks.
SCATTER = timed(TWO, build("reducescatter", 4), "ring")
ROWS = [
    {"size_bytes": 4096, "time_us": 20.0, "reference_time_us": 40.0, "predicted_us": 10.0, "wrong": 0,
     "mode": "in place"},
    {"size_bytes": 8192, "time_us": 30.0, "reference_time_us": None, "predicted_us": None, "wrong": 3},
    {"size_bytes": 16384, "time_us": float("nan")},
]  # fmt: skip


def parsed(page: str) -> Any:
    """The tree; libxml2 may complain about nothing but the element names that HTML 4 lacks."""
    parser = html.HTMLParser(encoding="utf-8")
    root = html.document_fromstring(page.encode(), parser=parser)
    wrong = [e for e in parser.error_log if e.type_name != "HTML_UNKNOWN_TAG"]
    assert wrong == [], wrong
    return root


def texts(root: Any, path: str) -> list[str]:
    return [" ".join(found.text_content().split()) for found in root.xpath(path)]


def self_contained(page: str) -> None:
    root = parsed(page)
    assert not root.xpath("//script | //link | //img | //iframe | //object | //embed | //base | //@src")
    assert all(target.startswith("#") for target in root.xpath("//a/@href"))
    assert "http" not in re.sub(r"http-equiv", "", page)
    assert not re.search(r"url\(|@import", page)
    assert not [name for e in root.iter() for name in e.attrib if name.startswith("on")]


def test_report_says_what_was_found() -> None:
    page = report_html([entry(SCATTER, TWO, ROWS)], "a title")
    self_contained(page)
    root = parsed(page)
    assert texts(root, "//title")[0] == "a title"
    said = " ".join(texts(root, "//section[@id='e0']"))
    for fact in (
        "reducescatter of 1 MB",
        "4 chunks of 250 KB",
        "feasible",
        "half of it",
        "65.64 µs",
        "50.00 %",
    ):
        assert fact in said, fact
    rows = [[cell.text_content() for cell in row.xpath("td")] for row in root.xpath("//h3[last()]/..//tr")]
    assert ["4 KiB", "in place", "10 µs", "20 µs", "2.00", "40 µs", "2.00", "0"] in rows
    assert ["8 KiB", "", "", "30 µs", "", "", "", "3"] in rows
    assert ["16 KiB", "", "", "", "", "", "", "not checked"] in rows
    assert ["seed", "7"] in rows


def test_every_message_and_every_link_is_drawn() -> None:
    root = parsed(report_html([entry(SCATTER, TWO)]))
    tips = texts(root, "//title")
    for message in SCATTER.messages:
        route = f"{message.src}→{message.dst} chunk"
        assert any(tip.startswith(route) for tip in tips), route
    assert sum("reduces" in tip for tip in tips) == sum(m.op == "reduce" for m in SCATTER.messages)
    for rank in range(4):
        assert root.xpath(f"//circle[@class='rank']/following-sibling::text[text()='{rank}']")
    # Both directions of a pair are one wire.
    assert len(root.xpath("//figure/svg/line[contains(@class,'wire')]")) == len(TWO.links) // 2


def test_nothing_from_a_file_becomes_markup() -> None:
    links = tuple(replace(link, kind=HOSTILE) for link in TWO.links)
    ports = tuple(replace(port, name=f"{i}{HOSTILE}") for i, port in enumerate(TWO.ports))
    topology = replace(TWO, name=HOSTILE, links=links, ports=ports, source=HOSTILE)
    algorithm = replace(
        SCATTER,
        name=HOSTILE,
        engine=HOSTILE,
        certificate=replace(SCATTER.certificate, bound_by=HOSTILE, proved_by=HOSTILE),
        provenance={HOSTILE: HOSTILE, "deep": {"x": [HOSTILE]}},
    )
    rows = [{"size_bytes": 1, "time_us": 1.0, "mode": HOSTILE, "wrong": HOSTILE}]
    made = [entry(algorithm, topology, rows, HOSTILE), entry(algorithm, topology, title=HOSTILE, own=False)]
    page = report_html(made, HOSTILE)
    self_contained(page)
    assert "<script" not in page and "\x00" not in page
    assert "alert(1)" in parsed(page).text_content()


def test_several_entries_are_listed_and_share_drawings() -> None:
    made = [entry(SCATTER, TWO, title="first"), entry(SCATTER, TWO, title="second", own=False)]
    root = parsed(report_html(made))
    assert texts(root, "//nav/a") == ["first", "second"]
    assert list(root.xpath("//nav/a/@href")) == ["#e0", "#e1"]
    assert len(root.xpath("//section[starts-with(h2, 'Topology')]")) == 1
    # A program alone has a time and no certificate.
    assert "half of it" not in texts(root, "//section[@id='e1']")[0]


def test_same_entries_same_bytes() -> None:
    assert report_html([entry(SCATTER, TWO, ROWS)]) == report_html([entry(SCATTER, TWO, ROWS)])


def test_light_and_dark() -> None:
    assert "prefers-color-scheme:dark" in report_html([entry(SCATTER, TWO)])


def test_nothing_to_do_takes_no_time() -> None:
    """No messages, no time: no division by it."""
    topology = Topology("one", ((0,),), ())
    algorithm = replace(SCATTER, collective=build("allgather", 1), messages=(), time_fs=0)
    page = report_html([entry(algorithm, topology)])
    self_contained(page)


def test_thousands_of_messages_stay_readable() -> None:
    """The page says how much of it is shown, and stays below what a browser takes with ease."""
    topology = load_topology("torus2d:8x8")
    algorithm = timed(topology, build("alltoall", 64), "direct")
    assert len(algorithm.messages) > 10_000
    # Time lines are those of the schedule; no program of a GPU could hold so many steps.
    page = report_html([Entry("big", topology, priced(algorithm, topology), algorithm)])
    self_contained(page)
    assert len(page) < 6_000_000
    assert re.search(r"The \d+ busiest of \d+ rows", page)


def priced(algorithm: Algorithm, topology: Topology) -> Simulation:
    busy = (0,) * (len(topology.links) + len(topology.ports))
    return Simulation(algorithm.collective, algorithm.size_bytes, algorithm.time_fs, (), busy, -1, ())


def test_many_ranks_are_not_drawn() -> None:
    ranks = 600
    links = tuple(Link(r, (r + 1) % ranks, Fraction(1), Fraction(1), Fraction(1)) for r in range(ranks))
    topology = Topology("wide", tuple((r,) for r in range(ranks)), links)
    algorithm = timed(topology, build("broadcast", ranks), "ring")
    page = report_html([Entry("wide", topology, priced(algorithm, topology), algorithm)])
    self_contained(page)
    assert "600 ranks are too many to draw" in page
