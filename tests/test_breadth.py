"""The sweep over families: a row of each result, on networks that are quick to build."""

import pytest
from checks import benchmarks


@pytest.fixture(scope="module")
def breadth():
    """The script on the import path."""
    with benchmarks() as imported:
        yield imported("breadth")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "network", "dtype"),
    [
        ("CausalLM", "llama4_text", "float32"),
        ("CausalLM", "mamba", "bfloat16"),
        ("Seq2SeqLM", "t5", "float32"),
        ("MaskedLM", "bert", "bfloat16"),
        ("ImageClassification", "vit", "float32"),
    ],
)
def test_family_keeps_what_the_report_promises(breadth, kind, network, dtype):
    row = breadth.measure(kind, network, dtype)
    assert row["result"] == "passed", row["why"]
    assert row["coverage_without_heads"] > 0.94


@pytest.mark.filterwarnings("ignore")
def test_sweep_tells_a_network_that_cannot_be_built_and_writes_tables(breadth):
    missing = breadth.measure("CausalLM", "no such type", "float32")
    assert missing["result"] == "not built"
    rows = [
        {"kind": "CausalLM", "network": "none", "dtype": "float32", "processor_seconds": 0.0, **missing},
        {
            **{"kind": "CausalLM", "network": "a", "dtype": "float32", "result": "passed", "why": ""},
            **{"coverage": 0.5, "coverage_without_heads": 0.7, "dense": {"depthwise": [0.3, "x"]}},
        },
    ]
    text = breadth.tables(rows)
    assert "1 of 1 whose dense forward pass runs passed" in text
    assert "| a (CausalLM) | 70% | 30% depthwise convolutions (x) |" in text
