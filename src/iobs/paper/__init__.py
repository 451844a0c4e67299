"""Tables and figures of the paper, one file each: settings, published numbers, how to run them."""

from iobs.paper.registry import Experiment, Request, Results, Row, experiments, find

__all__ = ["Experiment", "Request", "Results", "Row", "experiments", "find"]
