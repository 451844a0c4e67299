"""Whole experts of a mixture: slices of the stacked weights of experts, and their rows of the router.

The experts of a mixture are the units of one site: the parameters with one slice for each expert are those whose shape
follows the number of experts in the configuration. An expert is judged by the squared change of its mixture's output on
the inputs of the dense model. All tokens are routed anew among the other experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from iobs.errors import LayerSelectionError, ModelError, first_line, is_out_of_memory
from iobs.pruning.calibration.blocks import hidden_of
from iobs.pruning.network.calls import before_calls
from iobs.pruning.network.layers import joined
from iobs.pruning.network.modes import keeping_attributes, keeping_buffers
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import attended, unpadded
from iobs.pruning.structure.config_fields import counting_fields, inner_configs
from iobs.pruning.structure.config_widths import (
    ConfigWidths,
    Shapes,
    WidthGroup,
    is_configured,
    shapes_of,
    shapes_with,
)
from iobs.pruning.structure.removal import remove
from iobs.pruning.structure.units import Attribute, Site, Slices
from iobs.pruning.structured.blocks import PartList, Parts, hidden_argument

_TOKENS = 2048  # tokens on which the output of a mixture is compared
_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")  # experts of a token


class Experts(Parts):
    """The experts of all mixtures of a model.

    Args:
        model: without the removed experts within `without`, and after `finish`.
        sites: the mixtures.
        widths: of the configuration.
        inputs: of every mixture, (tokens, 1, width), by its path.
    """

    kind = "experts"

    def __init__(
        self, model: nn.Module, sites: Sequence[Site], widths: ConfigWidths, inputs: dict[str, Tensor]
    ) -> None:
        routed = (vars(config).get(name) for _, config in inner_configs(model.config) for name in _ROUTED)
        least = max((value for value in routed if type(value) is int), default=1)
        super().__init__(model, [PartList(site.name, site.count) for site in sites], least)
        self.sites, self.widths, self.inputs = {site.name: site for site in sites}, widths, inputs

    @classmethod
    def find(cls, model: nn.Module, data: Sequence[Batch]) -> Experts:
        """Find the experts of a model.

        Raises:
            ModelError: the model is not built from a configuration.
            LayerSelectionError: it has no experts that its configuration counts.
        """
        if not is_configured(model):
            raise ModelError(
                "Experts are removed from models of transformers, whose configuration says their number; "
                f"{type(model).__name__} has none."
            )
        before = shapes_of(model)
        counts = [
            value
            for _, config in inner_configs(model.config)
            for name, value in vars(config).items()
            if type(value) is int and value > 1 and _counts_experts(name)
        ]
        for count in dict.fromkeys(counts):
            fields = counting_fields(model.config, count, _counts_experts)
            try:
                slices = _slices(before, shapes_with(model, fields, count - 1), count)
            except ModelError:
                continue
            if slices:
                mixtures = _mixtures(slices)
                inputs = _inputs(model, data, list(mixtures))
                if unfed := [path for path in mixtures if path not in inputs or not inputs[path].numel()]:
                    raise LayerSelectionError(
                        f"No calibration sample calls the mixture {unfed[0]}, so its experts cannot be judged, and "
                        "the configuration has one number for all mixtures. Give data that reach it; if the model "
                        "uses parts of this module without a call of its own, its experts stay."
                    )
                sites = [_site(model, path, mixtures[path], count) for path in inputs]
                group = WidthGroup(tuple(inputs), tuple(fields))
                return cls(model, sites, ConfigWidths((group,), shapes=before), inputs)
        raise LayerSelectionError("No experts were found whose number the configuration of this model says.")

    @torch.no_grad()
    def choose(self, keep: int, damage: Callable[[], float]) -> dict[str, list[int]]:
        """For every mixture: remove the expert without which its output changes least, and repeat.

        Raises:
            ModelError: a mixture does not compute with one expert less.
        """
        removed = {}
        for path, site in self.sites.items():
            dense = _output(self.model.get_submodule(path), self.inputs[path])
            gone: list[int] = []
            error = 0.0
            while len(gone) < site.count - keep:
                others = (expert for expert in range(site.count) if expert not in gone)
                errors = {expert: self._error_without(site, [*gone, expert], dense) for expert in others}
                gone.append(min(errors, key=lambda expert: errors[expert]))
                error = errors[gone[-1]]
            removed[path] = sorted(gone)
            self.errors[path] = error / max(float(dense.double().square().sum()), 1e-30)
        return removed

    def _error_without(self, site: Site, gone: Sequence[int], dense: Tensor) -> float:
        """Squared change of the output of a mixture without some experts, from its dense output.

        Raises:
            ModelError: the mixture does not compute without them.
        """
        module, inputs = self.model.get_submodule(site.name), self.inputs[site.name]
        with keeping_attributes(module):
            self._remove([site], {site.name: gone})
            try:
                _output(module, inputs[:1])  # fails if groups do not divide the experts; those of many tokens may mix
                return float((_output(module, inputs) - dense).double().square().sum())
            except batches.REFUSALS as error:
                if is_out_of_memory(error):
                    raise
                raise ModelError(
                    f"{site.name} does not compute with {site.count - len(gone)} experts ({first_line(error)}). They "
                    "are removed one by one, so a router that divides them into groups is not supported. Prune entries "
                    "instead."
                ) from error

    def _remove(self, sites: Sequence[Site], removed: Mapping[str, Sequence[int]]) -> None:
        kept = {site.name: [unit for unit in range(site.count) if unit not in removed[site.name]] for site in sites}
        remove(self.model, sites, kept)

    def least_removed(self, keep: int) -> int:
        """The parameters of the removed experts and their rows of the routers."""
        values = [(site.count, part.stored(self.model)) for site in self.sites.values() for part in site.writers]
        return sum(
            value.numel() // count * (count - keep) for count, value in values if isinstance(value, nn.Parameter)
        )

    def require_possible(self, keep: int) -> None:
        """Raise unless the class of the model can be built with this number of experts, before any work.

        Raises:
            ModelError: it cannot.
        """
        self.widths.require_counts(self.model, [*self.sites.values()], False, dict.fromkeys(self.sites, keep))

    @contextmanager
    def without(self, removed: Mapping[str, Sequence[int]]) -> Iterator[None]:
        """Context in which the experts are removed; they do not come back on exit."""
        self._remove([*self.sites.values()], removed)
        yield

    def finish(self, removed: Mapping[str, Sequence[int]]) -> None:
        """Let the configuration follow.

        Raises:
            ModelError: the class of the model cannot have this number of experts.
        """
        self.widths.configure(self.model, {path: self.sites[path].count - len(gone) for path, gone in removed.items()})


def _site(model: nn.Module, path: str, slices: Sequence[Slices], count: int) -> Site:
    """The experts of a mixture as units; numbers of its modules that count experts follow."""
    attributes = [
        Attribute(joined(path, inner) if inner else path, name, 1)
        for inner, module in model.get_submodule(path).named_modules()
        for name, value in vars(module).items()
        if type(value) is int and value == count and _counts_experts(name)
    ]
    return Site(path, "experts", (), tuple(slices), path, attributes=tuple(attributes))


def _slices(before: Shapes, after: Shapes, count: int) -> list[Slices]:
    """The parameters whose shape has one entry less along one axis; empty if another shape changes otherwise."""
    slices = []
    if before.keys() != after.keys():
        return []
    for name, shape in before.items():
        if after[name] == shape:
            continue
        axes = [axis for axis, sizes in enumerate(zip(shape, after[name], strict=True)) if sizes[0] != sizes[1]]
        if len(axes) != 1 or shape[axes[0]] != count or after[name][axes[0]] != count - 1:
            return []
        path, _, parameter = name.rpartition(".")
        slices.append(Slices(path, parameter, axes[0], tuple((expert,) for expert in range(count))))
    return slices


def _counts_experts(name: str) -> bool:
    return "experts" in name and "per_tok" not in name and "shared" not in name


def _mixtures(slices: Sequence[Slices]) -> dict[str, list[Slices]]:
    """The slices by the smallest module around a router and its experts; the matrix of a router may lie deeper."""
    around = {part.path.rpartition(".")[0] for part in slices}
    mixtures: dict[str, list[Slices]] = {}
    for part in slices:
        path = min((path for path in around if not path or part.path.startswith(f"{path}.")), key=len)
        mixtures.setdefault(path, []).append(part)
    return mixtures


@torch.no_grad()
def _inputs(model: nn.Module, data: Sequence[Batch], paths: Sequence[str]) -> dict[str, Tensor]:
    """Inputs of mixtures as samples of one token, (tokens, 1, width), in the order of their calls, without padding."""
    inputs: dict[str, list[Tensor]] = {}
    mask: Tensor | None = None

    def note(path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        hidden = hidden_argument(args, kwargs)
        if hidden is not None:
            tokens = unpadded(hidden.detach(), mask)
            inputs.setdefault(path, []).append(tokens.reshape(-1, 1, tokens.shape[-1]).clone())

    with keeping_buffers(model), before_calls(model, paths, note):
        for batch in data:
            mask = attended(model, batch)
            batches.forward(model, batch)
            if all(sum(map(len, inputs.get(path, []))) >= _TOKENS for path in paths):
                break
    return {path: torch.cat(values)[:_TOKENS] for path, values in inputs.items()}


def _output(module: nn.Module, inputs: Tensor) -> Tensor:
    hidden = hidden_of(module(inputs.clone()))  # a module may change its input in place
    assert hidden is not None
    return hidden
