"""The page of all runs: its data, and what a browser shows of it."""

from __future__ import annotations

import html
import importlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from report_helpers import browse
from script_helpers import ROOT, script

pytestmark = pytest.mark.slow

HOSTILE = """</script><img src=x onerror=document.title=1>&amp;"'\u2028"""


@pytest.fixture(scope="module")
def all_runs() -> ModuleType:
    """The module that makes the page."""
    script("evidence/pages.py")
    return importlib.import_module("tables.all_runs")


@pytest.fixture(scope="module")
def page(all_runs: ModuleType) -> str:
    return str(all_runs.page())


def data_of(page: str) -> list[dict[str, Any]]:
    (text,) = re.findall(r'<script type="application/json" id="runs">(.*?)</script>', page, re.DOTALL)
    found: list[dict[str, Any]] = json.loads(text)
    for source in found:
        source["records"] = [source["common"] | record for record in source["records"]]
        for key in ("versions", "quantities"):
            source[key] = found[source[key]][key] if isinstance(source[key], int) else source[key]
    return found


def by_seed(number: list[Any]) -> dict[str, Any]:
    """A number's values by seed; a list has those of seeds 0, 1 and so on."""
    ours = number[1]
    return ours if isinstance(ours, dict) else {str(seed): value for seed, value in enumerate(ours)}


def committed() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((ROOT / "evidence" / "results").glob("*/*.json")):
        yield path.relative_to(ROOT).as_posix(), json.loads(path.read_text())


def probed(page: str, address: str, probe: str, folder: Path, width: int = 1000) -> Any:
    """What a probe, the body of a function, returns in a browser that has opened the page in a frame of this width."""
    after = "</script>\n</body>"
    assert page.count(after) == 1
    note = f"</script><script>parent.postMessage(JSON.stringify((() => {{ {probe} }})()), '*');</script>\n</body>"
    (folder / "page.html").write_text(page.replace(after, note), encoding="utf-8")
    # A window has a least width of its own, a frame has none.
    frame = f"""<body><pre></pre>
      <script>onmessage = (event) => {{ document.querySelector("pre").textContent = event.data; }};</script>
      <iframe src="page.html{address}" style="width: {width}px; height: 3000px; border: 0"></iframe></body>"""
    (folder / "frame.html").write_text(frame, encoding="utf-8")
    shown = browse(folder / "frame.html", folder / "profile")
    (found,) = re.findall(r"<pre>(.*?)</pre>", shown, re.DOTALL)
    return json.loads(html.unescape(found))


def test_the_page_is_small_and_loads_nothing(page: str) -> None:
    assert len(page.encode()) < 600_000
    tags = page.replace(re.findall(r'id="runs">(.*?)</script>', page, re.DOTALL)[0], "")
    assert not re.findall(r"https?:", tags.replace("http://www.w3.org/2000/svg", ""))
    assert "default-src 'none'" in tags


def test_the_page_has_every_number_run_curve_and_commit_of_every_result(page: str) -> None:
    by_file = {source["file"]: source for source in data_of(page)}
    checks = {"quantities": check_item, "runs": check_study}
    made: Counter[str] = Counter()
    for file, result in committed():
        source = by_file[file]
        assert source["versions"].endswith(f"commit {result['commit']}"), file
        for kind in checks.keys() & result.keys():
            checks[kind](source, result)
            made[kind] += 1
    assert min(made.values()) > 5


def check_item(source: dict[str, Any], result: dict[str, Any]) -> None:
    shown = {
        (record["method"], record["column"], source["quantities"][number[0]][0]): [
            by_seed(number),
            *(number + [None] * 3)[2:4],
        ]
        for record in source["records"]
        for number in record["numbers"]
    }
    wanted = {
        (result["rows"][c["row"]], result["columns"][c["column"]], q["label"]): [c["ours"], c["paper"], c["paper_std"]]
        for q in result["quantities"].values()
        for c in q["cells"]
        if c["ours"]
    }
    assert shown == wanted
    assert source["command"] == result["command"]
    for curve in result.get("curves", ()):
        names = result["rows"][curve["row"]], result["columns"][curve["column"]]
        (record,) = [one for one in source["records"] if (one["method"], one["column"]) == names]
        shown_curves = {one[0]: one for one in record.get("curves", ())}
        check_curve(source, shown_curves.get(str(curve["seed"])), curve)


def check_study(source: dict[str, Any], result: dict[str, Any]) -> None:
    finals = {
        (record["method"], seed): value
        for record in source["records"]
        for number in record["numbers"]
        for seed, value in by_seed(number).items()
        if number[0] == 0
    }
    assert finals == {(r["method"], str(r["seed"])): pytest.approx(100 * r["accuracy"][-1]) for r in result["runs"]}
    curves = {(r["method"], c[0]): c for r in source["records"] for c in r.get("curves", ())}
    for run in result["runs"]:
        check_curve(source, curves.get((run["method"], str(run["seed"]))), run)


def check_curve(source: dict[str, Any], shown: list[Any] | None, made: dict[str, Any]) -> None:
    """A curve keeps its ends; one of two points shows no more than the numbers, and is left out."""
    if len(made["rounds"]) < 3:
        assert shown is None
        return
    assert shown is not None
    rounds, by_round = source["rounds"][shown[1]], dict(zip(made["rounds"], made["accuracy"], strict=True))
    assert shown[2] == pytest.approx([100 * by_round[number] for number in rounds], abs=0.0051)
    assert (rounds[0], rounds[-1]) == (made["rounds"][0], made["rounds"][-1])


def test_the_file_of_several_studies_stands_on_the_page_once(page: str, tmp_path: Path) -> None:
    sources = data_of(page)
    file = "evidence/studies/map.toml"
    texts = [source["settings"][file] for source in sources if file in source["settings"]]
    whole, *places = texts

    assert whole == (ROOT / file).read_text(encoding="utf-8").strip()
    assert len(places) > 1
    assert all(sources[place]["settings"][file] == whole for place in places)
    probe = f"""const later = sources.filter((one) => typeof one.settings["{file}"] === "number")[0];
      return body({{...later.records[0], source: later}}).textContent;"""
    assert whole in probed(page, "", probe, tmp_path)


def test_long_curves_are_thinned_and_keep_their_ends(all_runs: ModuleType) -> None:
    rounds, values = all_runs._thinned(range(201), [0.5 * k for k in range(201)])
    assert rounds == [0, *range(0, 201, 4)][1:]
    assert values == [0.5 * k for k in rounds]
    assert all_runs._thinned([0, 5], [1.0, 2.0]) == ([0, 5], [1.0, 2.0])
    ends = all_runs._thinned(range(0, 122), range(122))[0]
    assert (ends[0], ends[-1], len(ends)) == (0, 121, 42)


def test_numbers_are_rounded_as_on_the_other_pages(page: str, tmp_path: Path) -> None:
    numbers = [(76.25, 1), (76.75, 1), (85.05, 1), (0.125, 2), (2.675, 2), (-2.5, 0), (1.5, 0), (93.44, 1)]
    probe = f"return {json.dumps(numbers)}.map(([value, digits]) => shown(value, digits));"
    assert probed(page, "", probe, tmp_path) == [f"{value:.{digits}f}" for value, digits in numbers]


def test_a_filtered_line_shows_the_numbers_of_the_result(page: str, tmp_path: Path) -> None:
    probe = """
      const pick = (id, value) => { at(id).value = value; at(id).dispatchEvent(new Event("change")); };
      pick("paper", "Mix2FLD"); pick("item", "mix2fld/choice-t-max"); pick("method", "FL, asymmetric");
      pick("data", "mnist5k");
      const lines = [...document.querySelectorAll("#records > li > details")];
      lines.forEach((one) => { one.open = true; one.dispatchEvent(new Event("toggle")); });
      return {count: at("count").textContent, hash: location.hash,
        data: [...at("data").options].map((one) => one.value),
        titles: lines.map((one) => one.querySelector("b").textContent),
        values: lines.map((one) => one.querySelector(".value").textContent),
        cells: lines.map((one) => [...one.querySelector("tbody tr").querySelectorAll("td")]
          .map((cell) => cell.textContent)),
        command: lines[0].querySelector("pre").textContent};"""
    found = probed(page, "", probe, tmp_path)
    result = json.loads((ROOT / "evidence/results/mix2fld/choice-t-max-laptop.json").read_text())
    cells = {
        c["column"]: c["ours"]
        for c in result["quantities"]["accuracy"]["cells"]
        if result["rows"][c["row"]] == "FL, asymmetric"
    }
    assert found["count"].startswith(f"{len(cells)} of ")
    assert found["titles"] == [f"FL, asymmetric, {result['columns'][column]}" for column in cells]
    for value, row, ours in zip(found["values"], found["cells"], cells.values(), strict=True):
        assert value.startswith(f"{statistics.mean(ours.values()):.1f}")
        assert row == [value.removesuffix(" %"), "", *(f"{number:.1f}" for number in ours.values())]
    assert found["data"] == ["", "mnist", "mnist5k"]
    assert found["command"] == result["command"]
    assert found["hash"] == "#paper=Mix2FLD&item=mix2fld%2Fchoice-t-max&method=FL%2C+asymmetric&data=mnist5k"


def test_an_address_opens_the_page_filtered_and_a_curve_is_drawn(page: str, tmp_path: Path) -> None:
    probe = """
      const one = document.querySelector("#records details"); one.open = true; one.dispatchEvent(new Event("toggle"));
      const path = one.querySelector("svg .curve").getAttribute("d");
      return {count: at("count").textContent, chosen: at("item").value, path,
        rows: [...one.querySelectorAll(":scope details tbody tr")].map((row) => row.textContent),
        lines: one.querySelectorAll(".curve").length};"""
    found = probed(page, "#item=study+fedmix-cifar10&method=fedmix", probe, tmp_path)
    runs = json.loads((ROOT / "evidence/results/studies/fedmix-cifar10.json").read_text())["runs"]
    (run,) = [run for run in runs if run["method"] == "fedmix"]
    assert found["count"].startswith("1 of ")
    assert found["chosen"] == "study fedmix-cifar10"
    assert found["lines"] == 1
    assert found["rows"] == [f"{r}{100 * a:.2f}" for r, a in zip(run["rounds"], run["accuracy"], strict=True)]
    assert found["path"].count("L") == len(run["rounds"]) - 1


def test_no_text_of_a_result_is_read_as_html(
    all_runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "studies").mkdir()
    run = {"method": HOSTILE, "seed": 0, "rounds": [0, 1, 2], "accuracy": [0.1, 0.2, 0.3], "loss": [1.0], "costs": {
        "bytes_up": 0, "bytes_down": 0, "seconds": 1.0}}  # fmt: skip
    failed = [{"method": HOSTILE, "seed": 1, "failed": 1, "reason": HOSTILE}]
    result = {"command": HOSTILE, "versions": {"fedblend": HOSTILE}, "data": {"name": HOSTILE}, "runs": [run]}
    (tmp_path / "studies" / "odd.json").write_text(json.dumps(result | {"failed": failed}))
    monkeypatch.setattr(all_runs, "RESULTS", tmp_path)
    monkeypatch.setattr(all_runs, "item_results", lambda: [])

    page = all_runs.page()

    assert page.count("<img") == 0
    probe = """
      const one = document.querySelector("#records details"); one.open = true; one.dispatchEvent(new Event("toggle"));
      return {images: document.images.length, title: one.querySelector("b").textContent,
        text: one.textContent, command: one.querySelector("pre").textContent};"""
    found = probed(page, "", probe, tmp_path)
    assert found["images"] == 0
    assert found["title"] == found["command"] == HOSTILE
    assert f"Seed 1 failed in round 1: {HOSTILE}" in found["text"]


def test_the_page_fits_a_phone(page: str, tmp_path: Path) -> None:
    probe = """
      [...document.querySelectorAll("#records > li > details")].slice(0, 3).forEach((one) => {
        one.open = true; one.dispatchEvent(new Event("toggle"));
        one.querySelectorAll("details").forEach((inner) => { inner.open = true; });
      });
      return [document.documentElement.clientWidth, document.documentElement.scrollWidth];"""
    shown, needed = probed(page, "#search=cifar10+study", probe, tmp_path, 390)
    assert needed == shown <= 390
