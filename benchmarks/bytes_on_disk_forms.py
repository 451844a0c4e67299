"""Files of a network by this library and by others: what is on the disk, and the outputs that come out of it.

A form writes its file, reads it back and computes from it: torch with the decoded weights, or the peer's own runtime.
Its bytes are those of the files with the weights. Peers that calibrate see the batches that this library sees.

Peers beyond the packages of the benchmarks: `gguf`, `pywhispercpp` (ggml's own quantisation, with importances),
`onnx` and `onnxruntime`, `openvino` and `nncf`, `entropack`.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import iobs

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Form:
    """A file of a network: its bytes, and the outputs for a batch of inputs."""

    bytes: int
    forward: Forward


@dataclass(frozen=True)
class Case:
    """A network of the race.

    Attributes:
        module: takes the inputs of a batch in their order.
        batches: of calibration, as dictionaries of inputs by name.
        score: quality of a form by name, from its `forward`.
        eight: names of tables that GGUF files keep in Q8_0, shell style.
        levels: bits of a parameter in our files.
        fitted: those of the levels at which the recipe "fast" is run too, whose gradient steps follow the rounding.
    """

    module: nn.Module
    batches: list[dict[str, Tensor]]
    score: Callable[[Forward], dict[str, float]]
    eight: tuple[str, ...] = ()
    levels: tuple[float, ...] = (8, 4, 3, 2.3)
    fitted: tuple[float, ...] = ()


class NotMadeError(Exception):
    """A form that cannot be made here, with the reason."""


def require(*packages: str) -> list[Any]:
    """The packages.

    Raises:
        NotMadeError: one of them is not there, or does not load.
    """
    try:
        return [importlib.import_module(package) for package in packages]
    except Exception as error:  # a package of another version of Python or torch fails in many ways
        raise NotMadeError(f"{packages[0]} cannot be imported ({type(error).__name__}: {error})") from error


def size(files: Iterable[Path]) -> int:
    """Bytes of files."""
    return sum(file.stat().st_size for file in files)


def dense(case: Case, folder: Path) -> Form:
    """The network as it is, in float32."""
    return Form(sum(one.nbytes for one in case.module.parameters()), case.module)


def rated(level: float, recipe: str, case: Case, folder: Path) -> Form:
    """The whole file within some bits a parameter, by `iobs.Budget`."""
    module = copy.deepcopy(case.module)
    iobs.prune(module, case.batches, iobs.Budget(bits_per_weight=level), recipe)
    return packed(case, module, folder)


def gridded(bits: int, case: Case, folder: Path) -> Form:
    """All matrices and tables on a grid, 128 columns a scale."""
    module = copy.deepcopy(case.module)
    iobs.prune(module, case.batches, iobs.Grid(bits), "one-shot", include="*")
    return packed(case, module, folder)


def packed(case: Case, module: nn.Module, folder: Path) -> Form:
    """What `iobs.save_packed` writes, read by `iobs.load_packed`."""
    place = iobs.save_packed(module, folder / "packed", dtype=torch.bfloat16)
    return Form(size(place.glob("*.safetensors")), iobs.load_packed(place, into=copy.deepcopy(case.module)).eval())


def matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that are rounded, by name: matrices, kernels and tables of 64 rows or more."""
    tables = {f"{path}.weight" for path, one in module.named_modules() if isinstance(one, nn.Embedding)}
    named = {name: one for name, one in module.named_parameters() if one.ndim > 1 and name.endswith("weight")}
    return {name: one for name, one in named.items() if name not in tables or len(one) >= 64}


# ---- GGUF
# llama.cpp's replacements where the columns are no multiple of 256.
_NARROW = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"}


def gguf(kind: str, weighted: bool, case: Case, folder: Path) -> Form:
    """A GGUF file of a type, and its values; `weighted` takes llama.cpp's importances, the mean squares of inputs.

    Vectors are in float32, matrices of columns that are no multiple of 32 in float16.
    """
    (api,) = require("gguf")
    quantize = ggml() if weighted else None
    module, types = copy.deepcopy(case.module), api.GGMLQuantizationType
    importances = mean_squares(case) if weighted else {}
    writer = api.GGUFWriter(folder / "model.gguf", "iobs")
    rounded = matrices(module)
    fits = False
    for name, one in module.named_parameters():
        values = one.detach().flatten(1).numpy() if name in rounded else one.detach().numpy()
        own = "Q8_0" if any(fnmatch(name, pattern) for pattern in case.eight) else kind
        block = api.GGML_QUANT_SIZES[types[own]][0]
        if name in rounded and values.shape[1] % block and block == 256:
            own = _NARROW.get(own, "IQ4_NL")
            block = 32
        elif name in rounded:
            fits |= own == kind
        if name not in rounded:
            writer.add_tensor(name, values.astype(np.float32))
            continue
        if values.shape[1] % block:
            data = values.astype(np.float16)
            writer.add_tensor(name, data)
            back = data.astype(np.float32)
        else:
            kind_of, weights = types[own], importances.get(name)
            data = api.quantize(values, kind_of) if quantize is None else quantize(api, values, kind_of, weights)
            writer.add_tensor(name, data, raw_dtype=kind_of)
            back = api.dequantize(data, kind_of)
        one.data.copy_(torch.from_numpy(np.array(back)).view(one.shape))
    if not fits:
        raise NotMadeError(f"no matrix has columns for the blocks of {kind}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Form(size([folder / "model.gguf"]), module)


@cache
def ggml() -> Callable[..., np.ndarray]:
    """ggml's own quantisation: (gguf package, values, type, importances of columns or None) -> blocks as bytes.

    Raises:
        NotMadeError: its library is not there.
    """
    (found,) = require("_pywhispercpp")
    places = [*Path(found.__file__).parent.glob("pywhispercpp.libs/libggml-base*")]
    if not places:
        raise NotMadeError("pywhispercpp has no library of ggml")
    call = ctypes.CDLL(str(places[0])).ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    whole, pointer = ctypes.c_int64, ctypes.c_void_p
    call.argtypes = [ctypes.c_int, pointer, pointer, whole, whole, whole, pointer]

    def quantize(api: Any, values: np.ndarray, kind: Any, importances: np.ndarray | None) -> np.ndarray:
        given = np.ascontiguousarray(values, np.float32)
        entries, width = api.GGML_QUANT_SIZES[kind]
        out = np.zeros((len(given), given.shape[1] // entries * width), np.uint8)
        weights = np.ones(given.shape[1], np.float32) if importances is None else importances
        weights = np.ascontiguousarray(weights, np.float32)
        written = call(
            int(kind), given.ctypes.data, out.ctypes.data, 0, len(given), given.shape[1], weights.ctypes.data
        )
        assert written == out.nbytes
        return out

    return quantize


@torch.no_grad()
def mean_squares(case: Case) -> dict[str, np.ndarray]:
    """Mean squares of the inputs of linear layers by the name of the weight, (columns,) float32."""
    sums: dict[str, Tensor] = {}

    def add(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sums[name] = sums.get(name, torch.zeros(())) + inputs[0].flatten(0, -2).square().mean(0)

    hooks = [
        one.register_forward_pre_hook(partial(add, f"{path}.weight"))
        for path, one in case.module.named_modules()
        if isinstance(one, nn.Linear)
    ]
    for batch in case.batches:
        case.module(**batch)
    for hook in hooks:
        hook.remove()
    return {name: (one / len(case.batches) + 1e-8).float().numpy() for name, one in sums.items()}


# ---- ONNX Runtime
def onnx(how: str, case: Case, folder: Path) -> Form:
    """ONNX Runtime: "int8" weights and inputs ("dynamic"), or matrices and tables in 8 or 4 bits in blocks.

    `how` is "dynamic int8", or bits, block and "sym" or "asym".
    """
    require("onnxruntime", "onnx")
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    graph, file = folder / "float32.onnx", folder / "model.onnx"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names, example = [*case.batches[0]], tuple(one[:2] for one in case.batches[0].values())
        axes = {name: {0: "samples", **({1: "length"} if one.ndim == 2 else {})} for name, one in _named(case)}
        torch.onnx.export(
            case.module,
            example,
            str(graph),
            input_names=names,
            output_names=["output"],
            dynamic_axes=axes,
            opset_version=18,
            dynamo=False,
        )
    if how == "dynamic int8":
        kinds = ["MatMul", "Gemm", "Gather", "Conv"]
        quantize_dynamic(graph, file, per_channel=True, weight_type=QuantType.QInt8, op_types_to_quantize=kinds)
    else:
        bits, block, form = how.split()
        settings = DefaultWeightOnlyQuantConfig(
            block_size=int(block),
            is_symmetric=form == "sym",
            op_types_to_quantize=("MatMul", "Gather"),
            quant_axes=(("MatMul", 0), ("Gather", 1)),
            bits=int(bits),
        )
        made = MatMulNBitsQuantizer(str(graph), algo_config=settings)
        made.process()
        made.model.save_model_to_file(str(file))
        if not any("NBits" in node.op_type for node in made.model.graph().node):
            raise NotMadeError("ONNX Runtime has no such blocks for convolutions")
    return Form(size([file]), _onnx_session(file, names))


def _named(case: Case) -> list[tuple[str, Tensor]]:
    return [*case.batches[0].items()]


def _onnx_session(file: Path, names: list[str]) -> Forward:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = 1, 1, 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def forward(*inputs: Tensor) -> Tensor:
        given = {name: one.numpy() for name, one in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    return forward


# ---- OpenVINO
OPENVINO: dict[str, tuple[str, dict[str, Any], bool]] = {  # name: mode, options, takes calibration data
    "int8 sym": ("int8_sym", {}, False),
    "int8 asym": ("int8_asym", {}, False),
    "int4 sym, tables int8": ("int4_sym", {"ratio": 1.0, "group_size": 64}, False),
    "int4 asym": ("int4_asym", {"ratio": 1.0, "group_size": 64, "all_layers": True}, False),
    "int4 asym, AWQ and scales": (
        "int4_asym",
        {"ratio": 1.0, "group_size": 64, "all_layers": True, "awq": True, "scale_estimation": True},
        True,
    ),
    "int4 sym, GPTQ": ("int4_sym", {"ratio": 1.0, "group_size": 64, "all_layers": True, "gptq": True}, True),
    "int3 sym": ("int3_sym", {"ratio": 1.0, "group_size": 64, "all_layers": True, "scale_estimation": True}, True),
    "int2 sym": ("int2_sym", {"ratio": 1.0, "group_size": 64, "all_layers": True, "scale_estimation": True}, True),
}


def openvino(how: str, case: Case, folder: Path) -> Form:
    """OpenVINO with weights compressed by NNCF; the rest of the file is in float16, OpenVINO's default."""
    api, nncf = require("openvino", "nncf")
    mode, options, calibrated = OPENVINO[how]
    example = {name: one[:2] for name, one in _named(case)}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = api.convert_model(case.module, example_input=example)
    for given, (name, one) in zip(graph.inputs, _named(case), strict=True):
        given.get_tensor().set_names({name})
        given.get_node().set_partial_shape(api.PartialShape([-1, -1] if one.ndim == 2 else [-1, *one.shape[1:]]))
    graph.validate_nodes_and_infer_types()
    if calibrated:
        options = {**options, "dataset": nncf.Dataset([{k: v.numpy() for k, v in one.items()} for one in case.batches])}
    try:
        graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode(mode), **options)
    except Exception as error:
        raise NotMadeError(f"NNCF refuses: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    api.save_model(graph, folder / "model.xml")
    settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    run = api.Core().compile_model(folder / "model.xml", "CPU", settings)

    def forward(*inputs: Tensor) -> Tensor:
        given = {name: one.numpy() for (name, _), one in zip(_named(case), inputs, strict=True)}
        return torch.from_numpy(run(given)[0].copy())

    return Form(size(folder.glob("model.*")), forward)


# ---- EntroPack
def entropack(bits: float, case: Case, folder: Path) -> Form:
    """Each matrix on EntroPack's lattice at a rate, and the rest in float32, small matrices too: their codes' heads
    leave little of a rate."""
    (api,) = require("entropack")
    module, config = copy.deepcopy(case.module), api.EntroPackLossyConfig(target_bpp=bits)
    saved: dict[str, Any] = dict(module.named_parameters())
    for name, one in matrices(module).items():
        if one.numel() < 2**14:
            continue
        try:
            saved[name] = api.compress(one.detach().flatten(1), config)
        except Exception as error:
            raise NotMadeError(str(error).splitlines()[0]) from error
        one.data.copy_(api.decompress(saved[name], config).view(one.shape))
    torch.save({name: getattr(one, "data", one) for name, one in saved.items()}, folder / "model.pt")
    return Form(size([folder / "model.pt"]), module)


GGUF = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
GGUF_WEIGHTED = ("Q5_0", "Q4_1", "IQ4_NL", "Q6_K", "Q4_K", "Q3_K", "IQ3_XXS", "Q2_K", "IQ2_S", "IQ2_XXS")
ONNX = ("dynamic int8", "8 32 sym", "4 32 sym", "4 32 asym", "4 128 asym")


def forms(case: Case) -> dict[str, Callable[[Case, Path], Form]]:
    """Every form by name; the family is what stands before the first space."""
    made: dict[str, Callable[[Case, Path], Form]] = {"dense float32": dense}
    made |= {f"iobs {level:g} bits": partial(rated, level, "one-shot") for level in case.levels}
    made |= {f"iobs {level:g} bits, fast": partial(rated, level, "fast") for level in case.fitted}
    made |= {f"grid int{bits}": partial(gridded, bits) for bits in (4, 3)}
    made |= {f"GGUF {kind}": partial(gguf, kind, False) for kind in GGUF}
    made |= {f"GGUF {kind}, importances": partial(gguf, kind, True) for kind in GGUF_WEIGHTED}
    made |= {f"ONNX-Runtime {how}": partial(onnx, how) for how in ONNX}
    made |= {f"OpenVINO {how}": partial(openvino, how) for how in OPENVINO}
    return made | {f"entropack {bits:g} bits": partial(entropack, bits) for bits in (8, 4, 3, 2.3)}
