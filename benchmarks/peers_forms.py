"""A Llama in each runtime of `peers.py`, behind one protocol: forget the text, feed tokens, get the last logits.

Every form has a cache of keys and values. ONNX Runtime and OpenVINO get the graph of `Step`: a forward pass with this
cache as inputs and outputs, traced from plain torch. OpenVINO turns the cache into state of its own.
"""

from __future__ import annotations

import copy
import ctypes
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from rows import importable
from torch import Tensor, nn

import iobs
from iobs import models
from iobs.inference.decoder import Decoder
from iobs.models.packed import save_packed

LONGEST = 512  # tokens of a text
_QUIET: Any = None
LLAMA_CPP = ("Q2_K", "Q3_K_S", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")


class Form(Protocol):
    """A network in one runtime."""

    bytes: int  # of the files with the weights, embedding included

    def reset(self) -> None:
        """Forget the text."""

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits (vocabulary) after the last of some more tokens."""


class Torch:
    """The modules of transformers."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.past = model, None
        self.bytes = sum(one.numel() * one.element_size() for one in model.parameters())

    def reset(self) -> None:
        self.past = None

    @torch.no_grad()
    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        given = torch.tensor([tokens])
        found: Any = self.model(input_ids=given, past_key_values=self.past, use_cache=True, logits_to_keep=1)
        self.past = found.past_key_values
        return found.logits[0, -1].float().numpy()


class Ours:
    """The prompt by the modules after `iobs.accelerate`, a new token by one compiled call; bytes of the packed file."""

    def __init__(self, model: models.LoadedModel, precision: Any, form: Any) -> None:
        with tempfile.TemporaryDirectory() as place:
            folder = save_packed(model, Path(place) / "packed", precision=precision)
            self.bytes = sum(one.stat().st_size for one in folder.glob("*.packed*"))
        module = copy.deepcopy(model.module)
        print(iobs.accelerate(module, precision=precision, threads=1), flush=True)
        self.decoder = Decoder(module, LONGEST, form)
        self.reset()

    def reset(self) -> None:
        self.position = 0

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        if self.position == 0:
            self.keys, self.values, logits = self.decoder._prefill(torch.tensor([tokens]))
        else:
            assert len(tokens) == 1
            logits = self.decoder.step(tokens[0], self.position, self.keys, self.values)
        self.position += len(tokens)
        return logits


class LlamaCpp:
    """A GGUF file in llama.cpp."""

    def __init__(self, file: Path, threads: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        silence(llama_cpp)
        self.bytes = file.stat().st_size
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = LONGEST
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.position = 0

    def reset(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.position = 0

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, self.position + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place == len(tokens) - 1
        failed = self.api.llama_decode(self.context, batch)
        self.api.llama_batch_free(batch)
        assert not failed
        self.position += len(tokens)
        return np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, len(tokens) - 1), shape=(self.size,))

    def close(self) -> None:
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


def silence(api: Any) -> None:
    """No messages of llama.cpp."""
    global _QUIET
    _QUIET = api.llama_log_callback(lambda level, text, data: None)  # kept: llama.cpp holds its address
    api.llama_log_set(_QUIET, ctypes.c_void_p(0))


def requantised(source: Path, kind: str) -> Path:
    """A GGUF file of another type, written by llama.cpp's own quantisation without an importance matrix."""
    import llama_cpp

    silence(llama_cpp)
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.nthread = 1
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    out = source.with_name(f"{kind}.gguf")
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(settings))
    assert not failed
    return out


class Step(nn.Module):
    """One forward pass of a Llama in plain torch, with the keys and values of the text so far as inputs and outputs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, config = model, model.config
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        cosines, sines = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(LONGEST)[None])
        self.register_buffer("cosines", cosines[0])
        self.register_buffer("sines", sines[0])

    def forward(self, ids: Tensor, positions: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        body, cosines, sines = self.model.model, self.cosines[positions], self.sines[positions]
        hidden, kept, mask = body.embed_tokens(ids), [], None

        def heads(value: Tensor, count: int) -> Tensor:
            return value.view(1, -1, count, value.shape[-1] // count).transpose(1, 2)

        def turned(value: Tensor) -> Tensor:
            first, second = value.chunk(2, -1)
            return value * cosines + torch.cat([-second, first], -1) * sines

        def shared(value: Tensor) -> Tensor:
            return value.repeat_interleave(self.heads // self.groups, 1) if self.heads > self.groups else value

        for number, layer in enumerate(body.layers):
            attention, given = layer.self_attn, layer.input_layernorm(hidden)
            queries = turned(heads(attention.q_proj(given), self.heads))
            keys = torch.cat([past[2 * number], turned(heads(attention.k_proj(given), self.groups))], 2)
            values = torch.cat([past[2 * number + 1], heads(attention.v_proj(given), self.groups)], 2)
            if mask is None:
                mask = (torch.arange(keys.shape[2])[None] <= positions[:, None])[None, None]
            found = nn.functional.scaled_dot_product_attention(queries, shared(keys), shared(values), mask)
            hidden = hidden + attention.o_proj(found.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            kept += [keys, values]
        return (self.model.lm_head(body.norm(hidden[:, -1:])), *kept)

    def example(self) -> tuple[Tensor, ...]:
        """Two tokens after three others."""
        layers, width = len(self.model.model.layers), self.model.model.layers[0].self_attn.head_dim
        past = [torch.zeros(1, self.groups, 3, width) for _ in range(2 * layers)]
        return (torch.tensor([[1, 2]]), torch.tensor([3, 4]), *past)

    def names(self) -> tuple[list[str], list[str]]:
        """Names of the caches that go in, and of those that come out."""
        count = 2 * len(self.model.model.layers)
        return [f"past{number}" for number in range(count)], [f"present{number}" for number in range(count)]


class OpenVINO:
    """The graph of `Step` in OpenVINO, the cache as its state, weights compressed by NNCF."""

    def __init__(self, folder: Path, threads: int) -> None:
        import openvino

        file = folder / "model.xml"
        self.bytes = file.stat().st_size + file.with_suffix(".bin").stat().st_size
        settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        self.request = openvino.Core().compile_model(file, "CPU", settings).create_infer_request()
        self.position = 0

    def reset(self) -> None:
        self.request.reset_state()
        self.position = 0

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        positions = np.arange(self.position, self.position + len(tokens))
        self.request.infer({"ids": np.array([tokens]), "positions": positions})
        self.position += len(tokens)
        return self.request.get_output_tensor(0).data.reshape(-1)


def write_openvino(model: nn.Module, folder: Path, bits: int) -> None:
    """The files of OpenVINO: symmetric int8 with a scale a row, or int4 with a scale for 128 columns at most."""
    import nncf
    import openvino
    from openvino._offline_transformations import apply_make_stateful_transformation

    step = Step(model).eval()
    example, (past, present) = step.example(), step.names()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = openvino.convert_model(step, example_input=example)
    for one, name in zip(graph.inputs, ["ids", "positions", *past], strict=True):
        one.get_tensor().set_names({name})
    for one, name in zip(graph.outputs, ["logits", *present], strict=True):
        one.get_tensor().set_names({name})
    width = example[2].shape[3]
    shapes: dict[Any, list[int]] = {name: [1, step.groups, -1, width] for name in past}
    graph.reshape(shapes | {"ids": [1, -1], "positions": [-1]})
    apply_make_stateful_transformation(graph, dict(zip(past, present, strict=True)))
    modes = {8: nncf.CompressWeightsMode.INT8_SYM, 4: nncf.CompressWeightsMode.INT4_SYM}
    options: dict[str, Any] = {"ratio": 1.0, "group_size": 128} if bits == 4 else {}
    if bits == 4 and model.config.hidden_size % 128:  # type: ignore[union-attr, operator]
        options["group_size"] = -1
    folder.mkdir(parents=True)
    openvino.save_model(nncf.compress_weights(graph, mode=modes[bits], **options), folder / "model.xml")


class OnnxRuntime:
    """The graph of `Step` in ONNX Runtime, the caches handed from one call to the next without a copy."""

    def __init__(self, folder: Path, threads: int) -> None:
        import onnxruntime

        self.bytes = sum(one.stat().st_size for one in folder.iterdir())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        file = str(folder / "model.onnx")
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.value = onnxruntime.OrtValue.ortvalue_from_numpy
        self.past = {one.name: one.shape for one in self.session.get_inputs() if one.name.startswith("past")}
        self.outputs = [one.name for one in self.session.get_outputs()]
        self.reset()

    def reset(self) -> None:
        self.position = 0
        self.kept = {
            name: self.value(np.zeros((1, shape[1], 0, shape[3]), np.float32)) for name, shape in self.past.items()
        }

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        positions = np.arange(self.position, self.position + len(tokens))
        given = {"ids": self.value(np.array([tokens])), "positions": self.value(positions), **self.kept}
        found = self.session.run_with_ort_values(self.outputs, given)
        self.kept = dict(zip(self.past, found[1:], strict=True))
        self.position += len(tokens)
        return found[0].numpy().reshape(-1)


def write_graph(model: nn.Module, folder: Path) -> Path:
    """The graph of `Step` in float32 for ONNX Runtime."""
    step = Step(model).eval()
    past, present = step.names()
    axes = {"ids": {1: "new"}, "positions": {0: "new"}}
    axes |= {name: {2: "length"} for name in past} | {name: {2: "whole"} for name in present}
    folder.mkdir(parents=True)
    file = folder / "float32.onnx"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            step,
            step.example(),
            str(file),
            input_names=["ids", "positions", *past],
            output_names=["logits", *present],
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )
    return file


def write_onnx(graph: Path, folder: Path, how: str) -> None:
    """Files of ONNX Runtime: "dynamic" int8 products, or "int8" and "int4" weights in blocks of 32 columns."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    folder.mkdir(parents=True)
    if how == "dynamic":
        quantize_dynamic(
            graph,
            folder / "model.onnx",
            per_channel=True,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul"],
            use_external_data_format=True,
        )
        return
    made = MatMulNBitsQuantizer(str(graph), int(how[3:]), 32, is_symmetric=True, accuracy_level=4)
    made.process()
    made.model.save_model_to_file(str(folder / "model.onnx"), use_external_data_format=True)


@contextmanager
def peers(
    model: models.LoadedModel, threads: int, wanted: Callable[[str], bool]
) -> Iterator[Iterator[tuple[str, Form]]]:
    """The wanted forms of other runtimes by name; each is made when its turn comes and removed after it."""
    with tempfile.TemporaryDirectory() as place:
        yield _made(model, Path(place), threads, wanted)


def _made(
    model: models.LoadedModel, folder: Path, threads: int, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Form]]:
    kinds = [kind for kind in LLAMA_CPP if wanted(f"llama.cpp {kind}")]
    if kinds:
        iobs.export(model, folder / "gguf", "gguf", 16)
    for kind in kinds:
        file = requantised(folder / "gguf" / "model.gguf", kind)
        made = LlamaCpp(file, threads)
        yield f"llama.cpp {kind}", made
        made.close()
        file.unlink()
    widths = [bits for bits in (8, 4) if wanted(f"OpenVINO int{bits}")]
    for bits in widths if widths and importable("OpenVINO", "openvino", "nncf") else ():
        write_openvino(model.module, folder / f"openvino{bits}", bits)
        yield f"OpenVINO int{bits}", OpenVINO(folder / f"openvino{bits}", threads)
    hows = [how for how in ("dynamic", "int8", "int4") if wanted(f"ONNX Runtime {how}")]
    if hows:
        graph = write_graph(model.module, folder / "graph")
    for how in hows:
        write_onnx(graph, folder / how, how)
        yield f"ONNX Runtime {how}", OnnxRuntime(folder / how, threads)
