"""Reports as JSON and back."""

import json
import math

import pytest
from sample_reports import SCORES, make_finetuned, make_report

from iobs import report
from iobs.cli.running import write_card
from iobs.core import formats
from iobs.errors import DataError


def test_report_without_polished_round_is_read(tmp_path):
    made = make_finetuned()
    values = made.as_dict()
    for entry in values["rounds"]:
        del entry["parent"]
    (tmp_path / "report.json").write_text(json.dumps(values), encoding="utf8")
    read = report.read_report(tmp_path / "report.json")
    assert read.best.layers == made.best.layers
    assert "Layers of the projection, before the fine-tuning of 600 steps" in report.render_page(read)


def test_report_round_trips_through_files(tmp_path):
    made = make_report(scores=SCORES)
    report.write_report(made, tmp_path)
    assert report.read_report(tmp_path / "report.json") == made
    assert (tmp_path / "report.html").read_text(encoding="utf8").startswith("<!doctype html>")


def test_nonfinite_numbers_round_trip_as_strings(tmp_path):
    made = make_report(scores={"validation": {"perplexity": math.inf, "kl": -math.inf}})
    report.write_report(made, tmp_path)
    text = (tmp_path / "report.json").read_text(encoding="utf8")
    assert "Infinity" in json.loads(text, parse_constant=pytest.fail)["scores"]["validation"]["perplexity"]
    assert report.read_report(tmp_path / "report.json") == made
    (back,) = formats.from_json(formats.to_json([math.nan]))
    assert math.isnan(back)


def test_names_that_are_no_utf8_do_not_stop_a_report(tmp_path):
    made = make_report()
    made.settings["model"] = made.settings["command"] = "caf\udce9"  # as Python reads a name in Latin-1
    report.write_report(made, tmp_path)
    assert report.read_report(tmp_path / "report.json") == made
    assert "caf\\udce9" in (tmp_path / "report.html").read_text(encoding="utf8")
    write_card(made, None, tmp_path, tmp_path / "README.md")
    assert "caf\\udce9" in (tmp_path / "README.md").read_text(encoding="utf8")


@pytest.mark.parametrize("content", ["{", "[]", '{"rounds": []}', None])
def test_read_report_refuses_other_files(tmp_path, content):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(DataError, match=r"report\.json"):
        report.read_report(tmp_path / "report.json")
