"""Load networks that a Python function or timm builds, and the directory format that they are saved in.

Such a network has no configuration with its widths. If it has become narrower than its code builds it, its directory
names the tensors whose shapes differ, and the numbers of modules that follow them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.parameter import is_lazy

from iobs.core.files import expanded, is_packed_file, packed_hint
from iobs.core.specs import CONFIG_NAME, file_and_function, file_of, is_function_spec
from iobs.errors import ModelError
from iobs.models.loaded import LoadedModel, Task
from iobs.models.packed_files import fill_from_files
from iobs.models.sixteen_bits import stored_as_half
from iobs.models.vision_shim import ensure_torchvision
from iobs.models.weights import read_weights, write_weights
from iobs.pruning.network.layers import joined
from iobs.pruning.structure.units import CONFIG, set_number

WEIGHTS_NAME = "model.safetensors"
_WIDTHS = "widths"  # key of the configuration: what differs from the network that the code builds
Value = TypeVar("Value")


def is_built_by_code(spec: str) -> bool:
    """Check that MODEL is a function, a timm network, or a directory that was written from one of these."""
    written = bool(spec) and (expanded(spec) / CONFIG_NAME).is_file()
    return is_function_spec(spec) or spec.startswith("timm:") or written


def load_function(spec: str) -> Callable[[], object]:
    """Import the function FILE.py:function. This runs the file, but not as `__main__`.

    Raises:
        ModelError: the file does not exist, fails while it runs, or has no such function.
    """
    file, name = file_and_function(spec)
    definition = importlib.util.spec_from_file_location(f"iobs_user_{file.stem}", file)
    assert definition is not None
    assert definition.loader is not None
    module = importlib.util.module_from_spec(definition)
    sys.modules[definition.name] = module  # dataclasses look up their module here
    try:
        with _neighbours(file):
            _with_torchvision(partial(definition.loader.exec_module, module))
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        raise ModelError(f"{file} fails when it is run: {type(error).__name__}: {error}") from error
    function = vars(module).get(name)
    if not callable(function):
        raise ModelError(f"{file} has no function {name!r}.")
    return function  # type: ignore[no-any-return]


def call_function(spec: str, finish: Callable[[object], object] = lambda value: value) -> object:
    """Call FILE.py:function without arguments, and return its result.

    Args:
        spec: FILE.py:function.
        finish: applied to the result. Further steps that run the user's code (such as drawing from a generator) belong
            here. Inside `finish` that code can import its neighbours, and its errors name the file.

    Raises:
        ModelError: as `load_function`, or the function or `finish` fails.
    """
    function = load_function(spec)
    try:
        with _neighbours(file_of(spec)):
            return _with_torchvision(lambda: finish(function()))
    except (Exception, SystemExit) as error:
        raise ModelError(f"{spec} fails when it is called: {type(error).__name__}: {error}") from error


@contextmanager
def _neighbours(file: Path) -> Iterator[None]:
    """Let code import modules from the folder of its file."""
    sys.path.insert(0, str(file.parent))
    try:
        yield
    finally:
        sys.path.remove(str(file.parent))


def _with_torchvision(call: Callable[[], Value]) -> Value:
    """Call; if torchvision, which timm needs, cannot be imported, repair it and call again."""
    try:
        return call()
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        ensure_torchvision()
        return call()


def load_from_function(spec: str) -> LoadedModel:
    """Load the module that FILE.py:function returns.

    Raises:
        ModelError: as `call_function`, or the result is not a module.
    """
    module = call_function(spec)
    if not isinstance(module, nn.Module):
        raise ModelError(f"{spec} returned {type(module).__name__}; it must return a torch.nn.Module.")
    factory = f"{file_of(spec)}:{spec.rpartition(':')[2]}"
    return _loaded(module, spec, {"factory": factory}, "other")


def load_from_timm(name: str, pretrained: bool = True) -> LoadedModel:
    """Load a timm network by name, with its pretrained weights by default.

    Raises:
        ModelError: timm is not installed, does not know the name, or cannot fetch the weights.
    """
    ensure_torchvision()
    try:
        import timm
    except ImportError as error:
        raise ModelError("timm is not installed; run: pip install 'iobs[vision]'") from error
    if not timm.is_model(name):
        close = ", ".join(timm.list_models(f"*{name.split('.')[0].split('_')[0]}*")[:5])
        names = f"it has {close}, ..." if close else "timm.list_models() gives the names."
        raise ModelError(f"timm has no model {name!r}; {names}")
    try:
        module = timm.create_model(name, pretrained=pretrained)
    except Exception as error:
        raise ModelError(f"The weights of timm:{name} are neither cached nor within reach: {error}") from error
    return _loaded(module, f"timm:{name}", {"factory": f"timm:{name}"}, "image-classification")


def load_directory(directory: Path, trust_remote_code: bool = False) -> LoadedModel:
    """Load a directory that was saved from a network of `load_from_function` or `load_from_timm`.

    Args:
        directory: the saved directory, with iobs.json.
        trust_remote_code: also run a factory file that lies inside the directory.

    Raises:
        ModelError: as `build_directory`, or the weights are missing, damaged or do not fit the module.
    """
    loaded = build_directory(directory, trust_remote_code)
    weights = directory / WEIGHTS_NAME
    if not weights.is_file():
        raise ModelError(f"{directory} has no weights: {WEIGHTS_NAME} is missing{packed_hint(directory)}.")
    try:
        if is_packed_file(weights):
            fill_from_files(loaded.module, [weights])
        else:
            read_weights(loaded.module, weights)
    except SafetensorError as error:
        raise ModelError(f"{weights} is damaged ({error}); copy or write it again.") from error
    except RuntimeError as error:
        raise ModelError(f"{weights} does not fit the module of its factory: {error}") from error
    return loaded


def build_directory(directory: Path, trust_remote_code: bool = False) -> LoadedModel:
    """Build the network of a saved directory, with random weights.

    Args:
        directory: the saved directory, with iobs.json.
        trust_remote_code: also run a factory file that lies inside the directory.

    Raises:
        ModelError: the factory file is missing or lies inside the directory.
    """
    try:
        config = json.loads((directory / CONFIG_NAME).read_text(encoding="utf8"))
        factory = str(config["factory"])
    except (ValueError, KeyError) as error:
        raise ModelError(f"{directory / CONFIG_NAME} is damaged: it must be JSON with the key 'factory'.") from error
    if factory.startswith("timm:"):
        loaded = load_from_timm(factory.removeprefix("timm:"), pretrained=False)
    else:
        if not trust_remote_code and _comes_with(directory, factory):
            raise ModelError(
                f"{directory} names code that comes with it ({factory}), which can do anything while it loads; pass "
                "--trust-remote-code (trust_remote_code=True) if you trust its origin."
            )
        loaded = load_from_function(factory)
    built = form_of(loaded.module)
    if widths := config.pop(_WIDTHS, None):
        narrow(loaded.module, widths)
    return _loaded(loaded.module, str(directory), config, loaded.task, built)


def _comes_with(directory: Path, factory: str) -> bool:
    """Check that a factory is not a file of the user: those have absolute paths outside the directory."""
    in_full = expanded(factory).is_absolute()
    return not in_full or file_of(factory).is_relative_to(directory.resolve())


def _loaded(
    module: nn.Module, source: str, config: Mapping[str, object], task: Task, built: Form | None = None
) -> LoadedModel:
    """A network with a writer; what the code builds is `built`, by default the form that the network has now."""
    wide = form_of(module) if built is None else built

    def write(model: LoadedModel, directory: Path) -> None:
        widths = changes(wide, form_of(model.module))
        with stored_as_half(model.module):
            write_weights(model.module, directory / WEIGHTS_NAME)
        (directory / CONFIG_NAME).write_text(
            json.dumps({"format": "iobs-module", **config, **({_WIDTHS: widths} if widths else {})}, indent=2) + "\n",
            encoding="utf8",
        )

    return LoadedModel(module.eval(), None, source, task, None, write)


Number = int | list[int]  # tuples are lists, as in JSON
# New parameters by identity of the old one, which is kept: its identity could go to another parameter otherwise.
Made = dict[int, tuple[nn.Parameter, nn.Parameter]]


@dataclass(frozen=True)
class Form:
    """The widths of a network that its code decides.

    Attributes:
        shapes: of parameters and buffers, by name.
        numbers: whole numbers, and tuples of them, of modules and their configurations: by path, then by name.
        rebuilt: names of the buffers that no file of weights holds.
    """

    shapes: dict[str, list[int]]
    numbers: dict[str, dict[str, Number]]
    rebuilt: frozenset[str]


def form_of(module: nn.Module) -> Form:
    """The form of a network."""
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    children = [*module.named_modules()]
    rebuilt = [joined(path, name) for path, child in children for name in child._non_persistent_buffers_set]
    return Form(
        {name: list(tensor.shape) for name, tensor in every if not is_lazy(tensor)},
        {path: dict(_numbers(child)) for path, child in children},
        frozenset(rebuilt),
    )


def changes(built: Form, now: Form) -> dict[str, dict[str, object]]:
    """Differences between a network and the one that its code builds; empty if there are none.

    Args:
        built: the form that the code builds.
        now: the form of the network that is written.

    Raises:
        ModelError: modules or tensors are gone, or a changed buffer is in no file of weights.
    """
    if gone := sorted({*built.numbers} - {*now.numbers}) or sorted({*built.shapes} - {*now.shapes}):
        raise ModelError(f"The code of this network builds {gone[0]}, which is gone; use torch.save(model, file).")
    shapes: dict[str, object] = {name: shape for name, shape in now.shapes.items() if built.shapes.get(name) != shape}
    if lost := [name for name in shapes if name in now.rebuilt]:
        raise ModelError(f"The buffer {lost[0]} has another shape, but no file holds it; use torch.save(model, file).")
    numbers: dict[str, object] = {}
    for path, values in now.numbers.items():
        before = built.numbers.get(path, {})
        changed = {name: value for name, value in values.items() if before.get(name, value) != value}
        numbers |= {path: changed} if changed else {}
    return {"shapes": shapes, "numbers": numbers} if shapes else {}


def narrow(module: nn.Module, widths: Mapping[str, Mapping[str, object]]) -> None:
    """Give a network the shapes and numbers of `changes`; the changed tensors have no values yet.

    Raises:
        ModelError: the network has no such module.
    """
    made: Made = {}
    done: set[tuple[int, str]] = set()  # a module may have several names
    try:
        for name, shape in widths["shapes"].items():
            path, _, last = name.rpartition(".")
            holder = module.get_submodule(path)
            if (id(holder), last) not in done:
                _reshape(module, holder, last, [int(size) for size in shape], made)  # type: ignore[attr-defined]
                done.add((id(holder), last))
        for path, numbers in widths["numbers"].items():
            for name, value in numbers.items():  # type: ignore[attr-defined]
                _set(module.get_submodule(path), name, value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"The widths do not fit the network that its code builds: {error}.") from error


def _numbers(module: nn.Module) -> Iterator[tuple[str, Number]]:
    """The whole numbers and tuples of whole numbers of a module; of its configuration also "has a bias"."""
    config = vars(module).get("config")
    for prefix, holder in (("", module), (CONFIG, config)):
        for name, value in getattr(holder, "__dict__", {}).items():
            if name.startswith("_"):
                continue
            if isinstance(value, int) and (prefix or not isinstance(value, bool)):  # a module's own are its modes
                yield prefix + name, value
            elif isinstance(value, tuple) and value and all(type(entry) is int for entry in value):
                yield prefix + name, list(value)


def _reshape(whole: nn.Module, module: nn.Module, name: str, shape: list[int], made: Made) -> None:
    """Replace a tensor of a module by an empty one of another shape; a bias may be new."""
    if name in module._buffers:
        old = module._buffers[name]
        assert old is not None
        module._buffers[name] = old.new_empty(shape)
        return
    if name not in module._parameters:
        raise ValueError(f"no parameter {name!r}")
    before = module._parameters[name]
    like = next(whole.parameters()) if before is None else before
    fresh = made[id(before)][1] if before is not None and id(before) in made else None
    if fresh is None:
        fresh = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device), like.requires_grad)
    if before is not None:
        made[id(before)] = before, fresh
    module._parameters[name] = fresh


def _set(module: nn.Module, name: str, value: object) -> None:
    """Set a number of a module, of the type that it has."""
    holder = module.config if name.startswith(CONFIG) else module
    before = getattr(holder, name.removeprefix(CONFIG))
    set_number(module, name, type(before)(value))
