"""The quantiser that transformers reads packed directories with: each weight is decoded to the dtype of its parameter.

It is registered under "iobs", which config.json of a packed directory names, by `iobs.registration`. The model that
`from_pretrained` returns is dense and knows nothing of it. So it works with every model, `device_map` and dtype.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

METHOD = "iobs"
_ANY = "(.+)"  # pattern of the name of any parameter


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """The entry `quantization_config` of a packed directory."""

    def __init__(self, **others: object) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers states an enumeration
        self.dequantize = True  # transformers forgets the quantiser once the weights are loaded


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):
    """Reader of packed files. Each of them is checked in full before the first weight is decoded."""

    requires_calibration = False

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: object
    ) -> Any:
        import torch

        from iobs.models.packed_files import PackedFile

        with torch.device("cpu"):  # the model is built on the meta device
            for file in checkpoint_files or ():
                PackedFile(Path(file)).check()
        return model

    def get_weight_conversions(self) -> list[Any]:
        """The conversion of parameters that the model itself does not convert."""
        from transformers.core_model_loading import WeightConverter

        return [WeightConverter(_ANY, r"\1", [_decoding()()])]

    def update_weight_conversions(self, weight_conversions: list[Any], *_: object) -> list[Any]:
        """The conversions of the model, such as those that merge experts, with decoded weights."""
        from transformers.core_model_loading import WeightConverter

        decoded = [
            each.copy(
                each._original_source_patterns,
                each._original_target_patterns,
                operations=[_decoding()(), *each.operations],
            )
            if isinstance(each, WeightConverter)
            else each
            for each in weight_conversions
        ]
        decoded += self.get_weight_conversions()
        for each in decoded:
            if hasattr(each, "force_cpu"):  # bytes are decoded there, also those of a weight on the meta device
                each.force_cpu = True
        return decoded

    def _process_model_after_weight_loading(self, model: Any, **kwargs: object) -> Any:
        # What is saved from now on is dense.
        model._weight_conversions = [
            each for each in model._weight_conversions if each._original_source_patterns != [_ANY]
        ]
        _offload_tied(model)
        return model

    def is_serializable(self, *_: object) -> bool:
        """True: the model is dense."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: the model is dense."""
        return True


@cache
def _decoding() -> type:
    """The operation that decodes; its base class is loaded after the table of quantisers."""
    from transformers.core_model_loading import ConversionOps

    class Decoding(ConversionOps):
        """Decode packed tensors; others are only converted to the dtype of the parameter."""

        def convert(
            self,
            input_dict: dict[str, Any],
            source_patterns: list[str],
            target_patterns: list[str],
            full_layer_name: str = "",
            model: Any = None,
            **kwargs: Any,
        ) -> dict[str, Any]:
            dtype = _dtype_of(model, full_layer_name)
            decoded = {
                pattern: [_decoded(tensor, full_layer_name, dtype) for tensor in tensors]
                for pattern, tensors in input_dict.items()
            }
            return {full_layer_name: decoded[_ANY]} if _ANY in decoded else decoded

        @property
        def reverse_op(self) -> Any:
            """The operation that saving takes: none."""
            from transformers.core_model_loading import _IdentityOp

            return _IdentityOp()

    return Decoding


def _offload_tied(model: Any) -> None:
    """Let weights that are tied to an offloaded one read its decoded copy; transformers leaves them the packed file."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    parts = (part for hook in hooks for part in getattr(hook, "hooks", [hook]))
    loaders: Any = (getattr(getattr(part, "weights_map", None), "dataset", None) for part in parts)
    index: dict[str, Any] = next((each.index for each in loaders if hasattr(each, "index")), {})  # one for all hooks
    for tied, source in getattr(model, "all_tied_weights_keys", {}).items():
        if tied in index and source in index:
            index[tied] = index[source]


def _dtype_of(model: Any, name: str) -> Any:
    """The dtype of a parameter or a buffer; that of the model where a name stands for several of them."""
    try:
        return model.get_parameter_or_buffer(name).dtype
    except AttributeError:
        return model.dtype


def _decoded(tensor: Tensor, name: str, dtype: Any) -> Tensor:
    from iobs.models.packed_tensors import is_packed_tensor, unpack_tensor

    if is_packed_tensor(tensor):
        dense = unpack_tensor(tensor.cpu().numpy().tobytes(), name)
        return dense.to(tensor.device, dtype)
    return tensor.to(dtype) if tensor.is_floating_point() and dtype.is_floating_point else tensor
