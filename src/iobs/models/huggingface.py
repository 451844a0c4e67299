"""Load Hugging Face models from a directory or by hub name.

By default only safetensors are read and no code of the model is run. Missing weights are an error: transformers would
initialise them at random.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from iobs.core.files import packed_hint, weight_files
from iobs.errors import ModelError, first_line
from iobs.models.loaded import LoadedModel, Task, Tokenizer
from iobs.models.output import REPORTS, copy_companions
from iobs.models.packed_files import dense_entries, require_quantizer
from iobs.models.sixteen_bits import quick, stored_as_half, widen
from iobs.models.vision_shim import ensure_torchvision

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# A directory with at least one of these files has a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_BESIDE_TOKENIZERS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
_LOG = logging.getLogger("iobs")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_pretrained(
    source: str | Path,
    *,
    dtype: torch.dtype | None,
    device: str,
    allow_pickle: bool,
    trust_remote_code: bool,
    weights: Mapping[str, torch.Tensor] | None = None,
    moved: bool = True,
) -> LoadedModel:
    """Load a Hugging Face model, as the class that its configuration names.

    Args:
        source: directory or hub name.
        dtype: dtype of the weights; None keeps the stored dtype, except that 16 bits become float32 on a CPU that
            computes slowly in them.
        device: device of the weights.
        allow_pickle: also read pickled weights. Loading them can run arbitrary code.
        trust_remote_code: also run model code that comes with the weights.
        weights: a state dict in place of the weight files of the directory.
        moved: False leaves the weights in main memory, in the dtype that they have on the device.

    Raises:
        ModelError: the model does not exist, its weights are missing, damaged or pickled, transformers does not know
            its class, or the hub cannot be reached.
    """
    is_directory = Path(source).is_dir()
    files = []
    if is_directory and weights is None:
        files = check_directory(Path(source), allow_pickle)
        require_quantizer(Path(source))
    stored = stored_dtype(files)
    ensure_torchvision()
    import transformers

    safe = {} if allow_pickle else {"use_safetensors": True}
    if not is_directory and weights is None:  # without a network transformers tries for half a minute, in silence
        _LOG.warning("There is no directory %s here; looking for it on the Hugging Face hub.", source)
    with _quiet(transformers):
        try:
            if not trust_remote_code:
                know_nemotron_nas(Path(source))
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
            encoder = (Path(source) / "modules.json").is_file()  # sentence-transformers, whose weights have no head
            automatic: Any = transformers.AutoModel
            chosen = automatic if encoder else _model_class(transformers, config, trust_remote_code)
            if weights is not None:
                chosen = _network_class(chosen, config, source, trust_remote_code)
            if dtype is None and not is_directory and getattr(config, "quantization_config", None) is None:
                config.dtype = None  # makes "auto" the dtype of the files, not the dtype in the configuration
            module, info = chosen.from_pretrained(
                source if weights is None else None,
                state_dict=weights,
                config=config,
                dtype=dtype or stored or "auto",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_check_loaded` raises, with a clearer message than transformers
                trust_remote_code=trust_remote_code,
                **safe,
            )
        except ModelError:
            raise
        except Exception as error:  # transformers raises many types, from OSError to RuntimeError
            here = "" if Path(source).is_dir() else f" (and there is no directory {source} here)"
            raise ModelError(f"{source} cannot be loaded: {first_line(error)}{here}") from error
    _check_loaded(source, type(module).__name__, info)
    if dtype is None and stored is not None:
        _warn_narrowed(source, module, files)
    if dtype is None and torch.device(device).type == "cpu" and quick(module.dtype) is not module.dtype:
        widen(module)
    tokenizer = load_tokenizer(source, trust_remote_code) if not is_directory or has_tokenizer(Path(source)) else None
    with _quiet(transformers):
        companions = Path(source) if is_directory else _snapshot(str(source), config)

    def write(model: LoadedModel, directory: Path) -> None:
        with _quiet(transformers), stored_as_half(model.module):
            model.module.save_pretrained(directory)  # type: ignore[operator]
        if companions is not None:
            copy_companions(companions, directory, leave=REPORTS)  # reports of the weights before this run
        if model.tokenizer is not None and not has_tokenizer(directory):
            model.tokenizer.save_pretrained(directory)

    if weights is not None and (Path(source) / "generation_config.json").is_file():
        module.generation_config = transformers.GenerationConfig.from_pretrained(source)
    task = _task(transformers, type(module).__name__, chosen.__name__)
    module = module.to(device) if moved else module
    return LoadedModel(module.eval(), tokenizer, str(source), task, context_of(config, tokenizer, module), write)


def _check_loaded(source: str | Path, network: str, info: Mapping[str, Any]) -> None:
    """Check that the files held exactly the weights of the network.

    Args:
        source: directory or hub name, for messages.
        network: class name of the network, for messages.
        info: the loading info of `from_pretrained`.

    Raises:
        ModelError: a weight is missing from the files, or has another shape there. Unexpected tensors only warn.
    """
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, stored, needed = mismatched[0]
        raise ModelError(
            f"{source}: weight {name!r} has shape {tuple(stored)} where {network} needs {tuple(needed)}; "
            "the files do not belong to config.json."
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of the weights that {network} needs, {missing[0]} the first; "
            "they would be random. Complete the files or correct 'architectures' in config.json."
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        warnings.warn(
            f"{source} holds {len(unexpected)} tensors that {network} has no place for, {unexpected[0]} "
            "the first; they are not loaded, and what is written will lack them.",
            stacklevel=3,
        )


def stored_dtype(files: Sequence[Path]) -> torch.dtype | None:
    """The floating dtype with the most entries in safetensors files; the configuration may state another.

    Returns None without files, or if a file holds dtypes that only transformers can read (quantised weights).
    """
    counts: Counter[torch.dtype] = Counter()
    for file in files:
        try:
            entries = dense_entries(file)
        except ModelError:  # dtypes that only transformers can read
            return None
        for entry in entries.values():
            if entry.dtype.is_floating_point:
                counts[entry.dtype] += entry.bytes // entry.dtype.itemsize
    most = counts.most_common(1)
    return most[0][0] if most and most[0][0] in _DTYPES else None


def _warn_narrowed(source: str | Path, module: nn.Module, files: Sequence[Path]) -> None:
    """Warn about weights that are rounded: the files hold them in a wider dtype than the network is loaded in."""
    state = module.state_dict()
    entries = {name: entry for file in files for name, entry in dense_entries(file).items() if name in state}
    narrowed = [name for name, entry in entries.items() if entry.dtype.itemsize > state[name].dtype.itemsize]
    if narrowed:
        first = narrowed[0]
        warnings.warn(
            f"{source} holds {len(narrowed)} tensors in a wider type than the others, {first} the first "
            f"({entries[first].dtype}): they are rounded to {state[first].dtype} and written so. --dtype float32 "
            "keeps them, and --low-memory copies what it does not prune as it is.",
            stacklevel=2,
        )


def _snapshot(name: str, config: PreTrainedConfig) -> Path | None:
    """The cache folder of a hub name, after fetching the small files that no loader asks for (licence, card, code).

    Returns None if the folder cannot be fetched or found.
    """
    import huggingface_hub

    # Only small file types, in the root folder only: weights in other formats may take many gigabytes.
    kinds = ["*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.md", "LICEN*", "NOTICE*", "USE_POLICY*"]
    revision = getattr(config, "_commit_hash", None)
    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=kinds, ignore_patterns=["*/*"])
        )
    except Exception:  # network or cache; the weights are already loaded
        return None


def load_tokenizer(source: str | Path, trust_remote_code: bool = False) -> Tokenizer | None:
    """Load the tokenizer of a directory or hub name. Returns None if it cannot be loaded from a hub name.

    Raises:
        ModelError: the tokenizer's files are damaged.
    """
    ensure_torchvision()
    import transformers

    try:
        with _quiet(transformers):
            tokenizer: Tokenizer = transformers.AutoTokenizer.from_pretrained(
                source, trust_remote_code=trust_remote_code
            )
    except Exception as error:
        if Path(source).is_dir():
            raise ModelError(f"The tokenizer of {source} cannot be loaded: {first_line(error)}") from error
        return None
    return tokenizer


def check_directory(directory: Path, allow_pickle: bool) -> list[Path]:
    """Check the files of a model directory before loading, and return its safetensors files.

    Raises:
        ModelError: config.json or the weights are missing, a shard is missing or damaged, or all weights are
            pickled and `allow_pickle` is False.
    """
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json, so it is not a Hugging Face model directory.")
    shards = weight_files(directory)
    if not shards:
        pickled = sorted(file.name for file in (*directory.glob("*.bin"), *directory.glob("*.pt*")))
        if not pickled:
            raise ModelError(
                f"{directory} has no weights: there is no model.safetensors in it{packed_hint(directory)}."
            )
        if not allow_pickle:
            raise ModelError(
                f"{directory} holds pickled weights ({pickled[0]}), which can run any code while they load. Convert "
                "them to safetensors, or pass --allow-pickle if you trust their origin."
            )
    for file in shards:
        try:
            with safe_open(file, framework="pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged or cut short ({error}); copy it again.") from error
    return shards


def _model_class(transformers: ModuleType, config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    """The class that the configuration names, else the most specific automatic class for this configuration."""
    if trust_remote_code:
        code_class = _own_class(transformers, config)
        if code_class is not None:
            return code_class
    for name in config.architectures or ():
        chosen = getattr(transformers, name, None)
        if isinstance(chosen, type) and issubclass(chosen, transformers.PreTrainedModel):
            return chosen
        if type(config) in transformers.AutoModelForCausalLM._model_mapping and name == "DeciLMForCausalLM":
            return transformers.AutoModelForCausalLM  # from `know_nemotron_nas`
        with_code = "it comes with code of its own, which --trust-remote-code runs"
        cure = with_code if getattr(config, "auto_map", None) else "update it"
        raise ModelError(f"transformers {transformers.__version__} has no model class {name!r}; {cure}.")
    automatic = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageClassification)
    return next((auto for auto in automatic if type(config) in auto._model_mapping), transformers.AutoModel)


def _network_class(chosen: Any, config: PreTrainedConfig, source: str | Path, trust_remote_code: bool) -> Any:
    """The class of the network behind an automatic class, which loads no state dict alone; another class as it is."""
    import transformers.dynamic_module_utils
    from transformers.models.auto import auto_factory

    mapping = getattr(chosen, "_model_mapping", None)
    if mapping is None:
        return chosen
    code = (getattr(config, "auto_map", None) or {}).get(chosen.__name__) if trust_remote_code else None
    if code is not None:
        return transformers.dynamic_module_utils.get_class_from_dynamic_module(code, str(source))
    return auto_factory._get_model_class(config, mapping)  # type: ignore[no-untyped-call]


def _own_class(transformers: ModuleType, config: PreTrainedConfig) -> Any:
    """The automatic class that runs the model's own code. Returns None if the model has no code of its own.

    Code may be registered under several automatic classes, perhaps first under one without a head. Classes that the
    configuration lists as architectures have priority, then AutoModelForCausalLM.
    """
    registered = {name: str(where) for name, where in (getattr(config, "auto_map", None) or {}).items()}
    names = [name for name in registered if name.startswith("AutoModel") and hasattr(transformers, name)]
    stated = [name for name in names if registered[name].rpartition(".")[2] in (config.architectures or ())]
    # A class that is registered both without a head and as a language model is loaded as a language model.
    stated.sort(key=lambda name: name != "AutoModelForCausalLM")
    names.sort(key=lambda name: name != "AutoModelForCausalLM")
    return next((getattr(transformers, name) for name in (*stated, *names)), None)


def _task(transformers: ModuleType, class_name: str, automatic: str) -> Task:
    """The task of a network, from its class or from the automatic class that loaded it."""
    auto = transformers.models.auto.modeling_auto
    if class_name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or automatic == "AutoModelForCausalLM":
        return "causal-lm"
    names = auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()
    if class_name in names or automatic == "AutoModelForImageClassification":
        return "image-classification"
    return "other"


def context_of(config: PreTrainedConfig, tokenizer: Tokenizer | None, module: nn.Module) -> int | None:
    """Context length of a network: from its configuration, else from its tokenizer. Returns None if unlimited."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value - _before_the_first(module)
    stated = getattr(tokenizer, "model_max_length", None)
    return stated if isinstance(stated, int) and 0 < stated < 10**9 else None


def _before_the_first(module: nn.Module) -> int:
    """Number of positions that no token has: RoBERTa and its kin count from the number of the padding token on."""
    tables = (table for name, table in module.named_modules() if name.rpartition(".")[2] == "position_embeddings")
    numbers = (getattr(table, "padding_idx", None) for table in tables)
    return max((number + 1 for number in numbers if isinstance(number, int)), default=0)


def has_tokenizer(directory: Path) -> bool:
    """Check that a directory holds tokenizer files."""
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def is_tokenizer_file(file: Path) -> bool:
    """True if a file of a model directory belongs to its tokenizer."""
    return file.name in _TOKENIZER_FILES or file.name in _BESIDE_TOKENIZERS


@contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Suppress loading bars and reports of transformers; `_check_loaded` raises for what matters in them."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def know_nemotron_nas(path: Path) -> None:
    """Let transformers read a directory of this layout with our copy of its code; other ones change nothing."""
    try:
        kind = json.loads((path / "config.json").read_text(encoding="utf8")).get("model_type")
    except (OSError, ValueError, AttributeError):  # reading the configuration says what is wrong
        return
    if kind != "nemotron-nas":
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    from iobs.models.modeling_decilm import DeciLMConfig, DeciLMForCausalLM

    AutoConfig.register("nemotron-nas", DeciLMConfig, exist_ok=True)
    AutoModelForCausalLM.register(DeciLMConfig, DeciLMForCausalLM, exist_ok=True)
