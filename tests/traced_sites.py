"""The sites of a network on one batch, with and without the check."""

from iobs.pruning.structure.sites import checked_sites, unchecked_sites
from iobs.pruning.structure.trace import shortened, trace


def find_sites(model, batch, inner=True):
    """The sites of a network that the check takes."""
    return checked_sites(model, [shortened(batch)], inner).sites


def traced_sites(model, batch, inner=True):
    """The sites of a network before the check."""
    return unchecked_sites(model, trace(model, [shortened(batch)]), inner)
