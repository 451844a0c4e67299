"""compressed-tensors: a model directory of transformers, its matrices as whole numbers packed into 32-bit words.

The form is "pack-quantized" with symmetric codes, so that a zero stays a zero. A group of columns must divide the
number of columns; a matrix on another grid keeps its floating point numbers.

Format: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

from torch import Tensor, nn

from iobs.core.grids import over_columns
from iobs.core.patterns import Grid
from iobs.errors import ModelError
from iobs.exports.source import Codes, ExportSource, Written, choose_codes, is_pretrained, needed
from iobs.pruning.structure.config_widths import built_shapes, shapes_of

_FORMAT = "pack-quantized"


def write_compressed_tensors(source: ExportSource, directory: Path) -> list[Written]:
    """Write model.safetensors, a config.json that describes the codes, and the tokenizer.

    Raises:
        ModelError: the package is not installed, the model is none of transformers or has other widths than its
            configuration, or no matrix becomes codes.
    """
    from huggingface_hub import save_torch_state_dict

    package = needed("compressed_tensors.compressors", "compressed-tensors")
    module = source.module
    if not is_pretrained(module):
        raise ModelError("An export to compressed-tensors needs a model of transformers; try onnx.")
    _require_widths(module)
    state = dict(module.state_dict())
    written: list[Written] = []
    groups: dict[str, list[str]] = {}
    for matrix in source.matrices():
        weight = matrix.weight
        layer, _, parameter = matrix.name.rpartition(".")  # of nn.MultiheadAttention it is in_proj_weight
        linear = parameter == "weight" and not matrix.transposed and isinstance(module.get_submodule(layer), nn.Linear)
        codes = choose_codes(weight, source.bits, whole=True) if linear else None
        if codes is None:
            written.append(matrix.written(str(weight.dtype).removeprefix("torch.")))
            continue
        scheme = _scheme(codes, weight.shape[1])
        groups.setdefault(json.dumps(scheme), []).append(layer)
        scales = codes.scales.to(weight.dtype)
        del state[matrix.name]
        state |= {f"{layer}.{key}": value for key, value in _packed(package, codes, scales, scheme).items()}
        after = codes.codes.to(scales.dtype) * over_columns(scales, Grid(codes.bits, codes.group), weight.shape[1])
        written.append(matrix.written(f"int{codes.bits}", after))
    if not groups:
        raise ModelError("No matrix of this model is on a grid of 4 or 8 bits; export with --bits 8 or --bits 4.")
    save_torch_state_dict(state, directory, metadata={"format": "pt"})
    _write_configuration(source, directory, groups)
    source.copy_files(directory)
    return written


def _require_widths(module: nn.Module) -> None:
    """Raise unless the configuration has the widths of the model: transformers builds it from there, and loads it then.

    Raises:
        ModelError: it has others.
    """
    try:
        shapes = built_shapes(module, module.config)
    except ModelError:  # code that builds itself in another way
        return
    for name, shape in shapes_of(module).items():
        if shapes.get(name, shape) != shape:
            raise ModelError(
                f"{name} is {shape}, and the configuration builds it as {shapes[name]}: transformers could not load "
                "the files. Export to onnx, or remove units with equal widths (uniform=True)."
            )


def _scheme(codes: Codes, columns: int) -> dict[str, int | str | bool | None]:
    """The description of codes in the configuration."""
    grouped = codes.group < columns
    return {
        "num_bits": codes.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if grouped else "channel",
        "group_size": codes.group if grouped else None,
    }


def _packed(
    package: ModuleType, codes: Codes, scales: Tensor, scheme: dict[str, int | str | bool | None]
) -> dict[str, Tensor]:
    """The tensors of a matrix, packed by the library from products of 32 bits, which give the codes back."""
    kinds = needed("compressed_tensors.quantization", "compressed-tensors")
    whole = kinds.QuantizationScheme(targets=["Linear"], weights=kinds.QuantizationArgs(**scheme))
    packed = package.PackedQuantizationCompressor.compress(
        {"weight": codes.weight, "weight_scale": codes.scales}, scheme=whole
    )
    return {**packed, "weight_scale": scales}


def _write_configuration(source: ExportSource, directory: Path, groups: dict[str, list[str]]) -> None:
    config = source.module.config.to_dict()  # type: ignore[union-attr, operator]
    parts = {
        f"group_{place}": {"targets": layers, "weights": json.loads(scheme), "format": _FORMAT}
        for place, (scheme, layers) in enumerate(groups.items())
    }
    described = {"quant_method": "compressed-tensors", "format": _FORMAT, "quantization_status": "compressed"}
    kind = next(source.module.parameters()).dtype
    config |= {
        "quantization_config": {**described, "config_groups": parts, "ignore": []},
        "dtype": str(kind).removeprefix("torch."),
    }
    config["architectures"] = [type(source.module).__name__]
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf8")
