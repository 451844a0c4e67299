"""The table of results in the README quotes the rows of the benchmarks; its links lead to files; it stays short."""

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf8")
NETWORKS = {
    "ResNet-20, CIFAR-10, 80 % zeros": ("resnet20", "0.8"),
    "MLPNet, MNIST, 98 %": ("mlpnet", "0.98"),
    "MobileNetV1 0.75, ImageNet, 40 %": ("mobilenet", "0.4"),
    "MobileNetV1 0.75, ImageNet, 70 %": ("mobilenet", "0.7"),
    "Llama of 260 thousand parameters, 50 %": ("llama_stories260K", "0.5"),
}
METHODS = {
    "dense": ["dense"],
    "CHITA: 1 stage, 15 stages": ["CHITA", "CHITA, 15 stages"],
    "`fast`": ["fast"],
    "`best`": ["best"],
}


def scores():
    """Scores by network, sparsity, method and seed; the dense network as a method."""
    found = defaultdict(dict)
    for line in (ROOT / "benchmarks" / "results" / "networks.jsonl").read_text(encoding="utf8").splitlines():
        row = json.loads(line)
        found[row["network"], row["level"], row["method"]][row["seed"]] = row["score"]
        if "dense" in row:
            found[row["network"], row["level"], "dense"][row["seed"]] = row["dense"]
    return found


def table():
    lines = README.partition("## Results")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip().replace("**", "") for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return cells[0], cells[2:]


def test_numbers_of_the_landing_page_are_those_of_the_readme():
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf8")
    sentence = page.partition("A ResNet-20 for CIFAR-10")[2].partition("([all results]")[0]
    rows = [cell for row in table()[1] if row[0].startswith(("ResNet-20", "Llama of 260")) for cell in row[1:]]
    numbers = re.findall(r"\d+\.\d+", sentence)
    assert len(numbers) == 6
    assert not [number for number in numbers if number not in rows]


@pytest.mark.parametrize("row", table()[1], ids=lambda row: row[0])
def test_readme_quotes_the_rows_of_the_benchmarks(row):
    found, (heads, _) = scores(), table()
    network, level = NETWORKS[row[0]]
    for head, cell in zip(heads[1:], row[1:], strict=True):
        methods = METHODS.get(head, [head])
        quoted = cell.split(", ") if cell else [""] * len(methods)
        for method, figure in zip(methods, quoted, strict=True):
            measured = found.get((network, level, method))
            if figure in ("", "-"):
                assert measured is None, f"{method} was measured and is left out"
                continue
            decimals = len(figure.partition(".")[2])
            assert abs(float(figure) - mean(measured.values())) <= 0.51 * 10**-decimals, (method, figure)


def test_readme_quotes_the_gradient_steps():
    """Least and most of the rows in the table; MLPNet has no blocks and is named apart."""
    file, levels = ROOT / "benchmarks" / "results" / "networks.jsonl", set(NETWORKS.values())
    rows = [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]
    own = [row for row in rows if (row["network"], row["level"]) in levels and row["method"] in ("fast", "best")]
    steps = {
        method: [row["steps"] for row in own if row["method"] == method and row["network"] != "mlpnet"]
        for method in ("fast", "best")
    }
    bare = {row["method"]: row["steps"] for row in own if row["network"] == "mlpnet"}
    text = " ".join(README.split())
    for method, found in steps.items():
        assert f"{min(found):,} to {max(found):,}" in text, method
    assert f"(MLPNet: {bare['fast']:,} and {bare['best']:,})" in text


def test_readme_is_short():
    assert len(README.splitlines()) <= 200


def test_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    missing = [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()]
    assert len(links) > 20
    assert not missing


GRID = {
    ("mlpnet", "ALPS-like ADMM", "best"): "ALPS-like ADMM 90.4",
    ("mlpnet", "ours (ADMM)", "best"): "ours 90.2",
    ("mlpnet", "magnitude", "best"): "magnitude 88.7",
    ("mlpnet", "SparseGPT", "best"): "SparseGPT 87.6",
    ("resnet20", "ours (ADMM)", "+ blocks"): "ours 90.0",
    ("resnet20", "ALPS-like ADMM", "+ blocks"): "ALPS-like ADMM 89.5",
    ("resnet20", "SparseGPT", "+ blocks"): "SparseGPT 88.5",
    ("resnet20", "magnitude", "+ blocks"): "magnitude 86.4",
    ("resnet20", "global magnitude", "one shot"): "from 52.8",
    ("resnet20", "global magnitude", "one shot, batch norm on altered images"): "to 79.1",
    ("resnet20", "CHITA", "one shot"): "CHITA from 58.6",
    ("resnet20", "CHITA", "one shot, batch norm on altered images"): "to 78.7",
}


def test_readme_quotes_the_grid_of_solvers_and_recipes():
    """Seed 0, as the README says."""
    file = ROOT / "benchmarks" / "results" / "grid.jsonl"
    if not file.exists():
        pytest.skip("the grid has no rows yet")
    rows = [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]
    found = {(row["network"], row["solver"], row["recipe"]): row["score"] for row in rows if row["seed"] == 0}
    text = " ".join(README.split())
    for key, quoted in GRID.items():
        assert quoted in text
        assert abs(float(quoted.split()[-1]) - found[key]) <= 0.051, key
