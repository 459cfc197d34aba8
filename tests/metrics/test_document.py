"""docs/metrics.md holds what a scrape holds, and nothing else."""

import re

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from drumline.metrics.document import main, renewed
from drumline.metrics.pages import Pages
from drumline.metrics.process import register_process
from tests.metrics.scraping import busy
from tests.processes import ROOT

DOCUMENT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| (gauge|counter|histogram) \| (.*) \| (.*) \|$", re.MULTILINE)
LABEL = re.compile(r"`(\w+)`(?: \(([^)]*)\))?")
ANY = {"scheduler", "version", "model", "precision", "backend"}
"""Labels of ours whose values no table can list."""


def page() -> str:
    registry = CollectorRegistry()
    busy(registry, "main")
    register_process(registry)
    return Pages(registry, health=list, ready=list).respond("GET", "/metrics").body.decode()


def test_the_document_is_of_now() -> None:
    assert renewed(DOCUMENT) == DOCUMENT, "run python -m drumline.metrics.document --output docs"


def test_every_family_of_a_scrape_is_in_the_document_and_the_other_way_round() -> None:
    lines = re.findall(r"^# TYPE (\w+) (\w+)$", page(), re.MULTILINE)
    documented = [(name, kind) for name, kind, _, _ in ROW.findall(DOCUMENT)]
    assert sorted(documented) == sorted(lines)
    helps = dict(re.findall(r"^# HELP (\w+) (.*)$", page(), re.MULTILINE))
    assert {name: said.rstrip(".") for name, _, _, said in ROW.findall(DOCUMENT)} == {
        name: said.rstrip(".") for name, said in helps.items()
    }


def test_labels_values_and_buckets_are_those_of_a_scrape() -> None:
    seen: dict[str, dict[str, set[str]]] = {}
    bounds: dict[str, set[float]] = {}
    for family in text_string_to_metric_families(page()):
        for sample in family.samples:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = seen.setdefault(name, {})
            for label, value in sample.labels.items():
                if label == "le":
                    bounds.setdefault(name, set()).add(float(value))
                else:
                    labels.setdefault(label, set()).add(value)
    for name, _, labels, _ in ROW.findall(DOCUMENT):
        told = {label: set(values.split(", ")) if values else None for label, values in LABEL.findall(labels)}
        own = name.startswith("drumline_")
        expected = {label: values if own and label not in ANY else None for label, values in seen[name].items()}
        assert told == expected, name
    documented = {
        name: {*map(float, row[2].split()), float("inf")}
        for row in re.findall(r"^\| ((`\w+`(?:, )?)+) \| ([\d. ]+) \|$", DOCUMENT, re.MULTILINE)
        for name in re.findall(r"\w+", row[0])
    }
    assert documented == bounds


def test_what_it_imports_is_there() -> None:
    imports = re.findall(r"^from drumline\S* import .*$", DOCUMENT, re.MULTILINE)
    assert len(imports) == 3
    exec("\n".join(imports), {})


def test_it_renews_a_page_and_leaves_the_rest(tmp_path) -> None:
    stale = DOCUMENT.replace("# drumline's metrics", "# Mine").replace("Rows that hold a request.", "Rows.")
    (tmp_path / "metrics.md").write_text(stale, encoding="utf-8")
    main(["--output", str(tmp_path)])
    assert (tmp_path / "metrics.md").read_text(encoding="utf-8") == DOCUMENT.replace("# drumline's metrics", "# Mine")
    with pytest.raises(ValueError, match="the tables' place"):
        renewed("# A page without tables\n")
