"""Tables and figures of the paper, one file each: settings, published numbers, and the code that runs them."""

from iobs.paper.registry import Experiment, Request, Results, Row, experiments, find

__all__ = ["Experiment", "Request", "Results", "Row", "experiments", "find"]
