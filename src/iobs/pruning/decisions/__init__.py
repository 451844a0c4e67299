"""Decisions of a run from its calibration data: sparsity per layer, rounds, optimizer and learning rate.

    decision                     made by                      stored in              in the report
    sparsity of every layer      plan.allocate                `plan` of `run`        `allocation`
    units of every site          plan.widths.allocate_widths  `Workspace.decided`    `allocation`
    sparsity of every round      rounds.scheduled             not stored             `asked` of each round
    kind of network steps        rounds.decide_steps          `Workspace.decided`    `settings["decided"]`
    number of rounds             rounds.decide_growth         `Workspace.decided`    `settings["decided"]`
    optimizer, learning rate     learning_rate.decide_rates   `Workspace.decided`    `settings["decided"]`
    number of gradient steps     cost.inputs.affordable       `Workspace.decided`    `settings["decided"]`
    best record                  report.best_index            `algorithm.Best`       `best_round`

`algorithm.run` calls all of them. A mask is no decision of this kind: `layerwise.projection` says where it is made.
"""
