"""`iobs reproduce` from the command line."""

import json

from checks import one_error

from iobs.paper import Experiment, Results, Row


def test_reproduce_lists_and_runs_experiments(run, monkeypatch):
    entry = Experiment(
        "table9",
        "Table 9",
        "an example",
        lambda request: Results("perplexity", [Row("50 %", "I-OBS", 11.0, float(request.seed))], ["A note."]),
        "a small network",
    )
    for module in ("iobs.paper.registry", "iobs.cli.reproduce"):
        monkeypatch.setattr(f"{module}.experiments", lambda: [entry])
    assert "table9" in run("reproduce").output
    text = run("reproduce", "table9", "--seed", 7).output
    assert all(part in text for part in ("published", "11", "7", "A note."))
    assert json.loads(run("reproduce", "table9", "--json").stdout)["rows"][0]["published"] == 11.0
    assert "table9" in one_error(run("reproduce", "table10", code=2))
