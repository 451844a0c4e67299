"""A plain request to an experiment, and the tables that the tests run."""

import pytest
from paper_tables import Request, llama, table_cbs, table_llm, table_vit

PLAIN = Request(stand_in=False, seed=0, output=None, say=lambda text: None)


TABLES = pytest.mark.parametrize("module", [table_llm, table_vit, llama, table_cbs], ids=lambda module: module.__name__)


def run_of(module):
    return llama.table("Llama-2") if module is llama else module.run
