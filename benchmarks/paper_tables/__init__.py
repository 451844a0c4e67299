"""Tables and figures of the paper, one file each: settings, published numbers, and the code that runs them.

To add one, add a file and its entry here. Listing imports every file, so each imports networks, data and solvers
inside `run`.
"""

from iobs.errors import DataError
from paper_tables import figure_gaussian, figure_mnist, llama, table_cbs, table_llm, table_vit
from paper_tables.experiment import Experiment, Request, Results, Row

__all__ = ["Experiment", "Request", "Results", "Row", "experiments", "find"]


def experiments() -> list[Experiment]:
    """All experiments, sorted by name."""
    modules = (figure_gaussian, figure_mnist, table_cbs, table_llm, table_vit)
    return sorted([module.EXPERIMENT for module in modules] + llama.EXPERIMENTS, key=lambda entry: entry.name)


def find(name: str) -> Experiment:
    """The experiment with a given name.

    Raises:
        DataError: the name is unknown; the message lists all names.
    """
    known = {entry.name: entry for entry in experiments()}
    if name not in known:
        raise DataError(f"There is no experiment {name!r}; there are: {', '.join(known) or 'none yet'}.")
    return known[name]
