"""Pruning of a whole model: Algorithm 2.

Modules, in an order in which each imports only from modules before it (`tests/test_floors.py` checks this):

    keep_sparse  training that keeps the zeros
    samples      calibration samples: what a batch is, its outputs, subsets
    coverage     the share of a model that was pruned, and why the rest stayed dense
    report       results of a run, as plain records
    recipe       settings of a run, as frozen values: Recipe, Rounds, FineTune, Allocation, Rule
    structured_report    a run that removes units: request, plan, and report of widths and costs
    network      the model: its weight matrices, the selection of layers, its modes
    structure    units of a network (channels, neurons, heads), and their physical removal
    runtime      processes and storage: checkpoints, ranks, memory
    forecast     the work of a run and the time that is left
    callbacks    progress of a run, for callbacks; the progress bar is one
    calibration  forward passes of the calibration data: Gram matrices and losses
    audit        zeros counted entry by entry
    store        reads, writes, copies and restores weights during a run
    descent      gradient steps that keep zeros and grids; the loss that compares rounds
    layerwise    one layer: its quadratic, its solver, its new mask and weights
    widths       costs of a network by its widths, and the widths of least effect
    workspace    the state of one run
    decisions    choices of the run itself: rounds, learning rates
    plan         what every layer keeps: damages in nats, divided under one budget of zeros, bits or units
    baselines    published one-shot pruners of a whole model
    reconstruction  block by block: projections, and fits of windows towards the dense outputs
    cost         time and memory that a run will take
    blockwise    stores of models of which one or two blocks are on the device at a time
    algorithm    Algorithm 2: the loop over rounds and layers
    structured   iobs.prune for units: one path of check, choice, solution and removal, or the plan alone
    driver       iobs.prune
"""

from iobs.pruning.audit import audit
from iobs.pruning.callbacks import Callback
from iobs.pruning.driver import prune
from iobs.pruning.keep_sparse import keep_sparse
from iobs.pruning.network.folding import fold
from iobs.pruning.recipe import Allocation, FineTune, Recipe, Rounds, Rule
from iobs.pruning.report import Report

__all__ = [
    "Allocation",
    "Callback",
    "FineTune",
    "Recipe",
    "Report",
    "Rounds",
    "Rule",
    "audit",
    "fold",
    "keep_sparse",
    "prune",
]
