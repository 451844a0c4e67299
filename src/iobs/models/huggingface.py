"""Hugging Face directories and names: safetensors only, nothing of theirs executed, nothing silently initialised."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from iobs.errors import ModelError, first_line
from iobs.models.companions import REPORTS, copy_companions
from iobs.models.halves import stored_as_half, widen
from iobs.models.loaded import LoadedModel, Task, Tokenizer
from iobs.models.shards import read_entries
from iobs.models.vision_shim import ensure_torchvision
from iobs.prune.audit import packed_hint, weight_files

# Any of these makes a directory one with a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_pretrained(
    source: str | Path, *, dtype: torch.dtype | None, device: str, allow_pickle: bool, trust_remote_code: bool
) -> LoadedModel:
    """A Hugging Face directory or hub name, of the class that its configuration states.

    Args:
        source: directory or hub name.
        dtype: of the weights; None keeps the stored one, but makes float16 float32 on a CPU, which is far faster.
        device: where the weights go.
        allow_pickle: also read pickled weights, which can run any code while they load.
        trust_remote_code: also run model code that comes with the weights.

    Raises:
        ModelError: nothing there, no weights, damaged or missing weights, pickled weights, a class unknown to
            transformers, or a hub that cannot be reached.
    """
    is_directory = Path(source).is_dir()
    files = check_directory(Path(source), allow_pickle) if is_directory else []
    stored = _stored_dtype(files)
    ensure_torchvision()
    import transformers

    shared: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    with _quiet(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(source, **shared)
            chosen = _model_class(transformers, config, trust_remote_code)
            if not allow_pickle:
                shared["use_safetensors"] = True
            if dtype is None and not is_directory and getattr(config, "quantization_config", None) is None:
                config.dtype = None  # "auto" is then what the files hold, not what the configuration states
            module, info = chosen.from_pretrained(
                source,
                config=config,
                dtype=dtype or stored or "auto",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name: transformers' own error hides it in a table
                **shared,
            )
        except ModelError:
            raise
        except Exception as error:  # transformers raises every kind, from OSError to RuntimeError
            here = "" if Path(source).is_dir() else f" (and there is no directory {source} here)"
            raise ModelError(f"{source} cannot be loaded: {first_line(error)}{here}") from error
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, found, wanted = mismatched[0]
        raise ModelError(
            f"{source}: weight {name!r} has shape {tuple(found)} where {type(module).__name__} needs {tuple(wanted)}; "
            "the files do not belong to config.json."
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of the weights that {type(module).__name__} needs, {missing[0]} the first; "
            "they would be random. Complete the files or correct 'architectures' in config.json."
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        warnings.warn(
            f"{source} holds {len(unexpected)} tensors that {type(module).__name__} has no place for, {unexpected[0]} "
            "the first; they are not loaded, and what is written will lack them.",
            stacklevel=2,
        )
    if dtype is None and stored is not None:
        _tell_narrowed(source, module, files)
    if dtype is None and module.dtype == torch.float16 and torch.device(device).type == "cpu":
        widen(module)
    tokenizer = load_tokenizer(source, trust_remote_code) if not is_directory or has_tokenizer(Path(source)) else None
    with _quiet(transformers):
        companions = Path(source) if is_directory else _snapshot(str(source), config)

    def write(model: LoadedModel, directory: Path) -> None:
        with _quiet(transformers), stored_as_half(model.module):
            model.module.save_pretrained(directory)  # type: ignore[operator]
        if companions is not None:
            copy_companions(companions, directory, leave=REPORTS)  # which told of other weights
        if model.tokenizer is not None and not has_tokenizer(directory):
            model.tokenizer.save_pretrained(directory)

    task = _task(transformers, type(module).__name__, chosen.__name__)
    return LoadedModel(module.to(device).eval(), tokenizer, str(source), task, context_of(config, tokenizer), write)


def _stored_dtype(files: Sequence[Path]) -> torch.dtype | None:
    """The floating dtype of most numbers in safetensors files, whatever the configuration beside them states.

    None where there are no safetensors, or where they are packed in a way of their own.
    """
    counts: Counter[torch.dtype] = Counter()
    for file in files:
        try:
            entries = read_entries(file)[0]
        except ModelError:  # kinds of numbers that only transformers can unpack
            return None
        for entry in entries.values():
            if entry.dtype.is_floating_point:
                counts[entry.dtype] += entry.bytes // entry.dtype.itemsize
    most = counts.most_common(1)
    return most[0][0] if most and most[0][0] in _DTYPES else None


def _tell_narrowed(source: str | Path, module: nn.Module, files: Sequence[Path]) -> None:
    """Warn of weights that the files hold in a wider dtype than most others, since a network is loaded in one."""
    state = module.state_dict()
    entries = {name: entry for file in files for name, entry in read_entries(file)[0].items() if name in state}
    narrowed = [name for name, entry in entries.items() if entry.dtype.itemsize > state[name].dtype.itemsize]
    if narrowed:
        first = narrowed[0]
        warnings.warn(
            f"{source} holds {len(narrowed)} tensors in a wider type than the others, {first} the first "
            f"({entries[first].dtype}): they are rounded to {state[first].dtype} and written so. --dtype float32 "
            "keeps them, and --low-memory copies what it does not prune as it is.",
            stacklevel=2,
        )


def _snapshot(name: str, config: Any) -> Path | None:
    """The folder of the cache that holds a hub name's files, with the small ones that no loader asks for fetched.

    None where the cache cannot be found.
    """
    import huggingface_hub

    # In the root folder only, and the kinds that are small: weights of other formats may take many gigabytes.
    kinds = ["*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.md", "LICEN*", "NOTICE*", "USE_POLICY*"]
    revision = getattr(config, "_commit_hash", None)
    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=kinds, ignore_patterns=["*/*"])
        )
    except Exception:  # of the network or the cache; the weights have been loaded all the same
        return None


def load_tokenizer(source: str | Path, trust_remote_code: bool = False) -> Tokenizer | None:
    """The tokenizer of a directory or hub name; None where a hub name has none.

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
    """Look at a model directory's files before anything is loaded.

    Raises:
        ModelError: no config.json, no weights, pickled weights only, a missing or damaged shard.
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
    for shard in shards:
        _check_shard(shard)
    return shards


def _check_shard(file: Path) -> None:
    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or cut short ({error}); copy it again.") from error


def _model_class(transformers: Any, config: Any, trust_remote_code: bool) -> Any:
    """The class that the configuration states, else the most specific automatic class that knows the configuration."""
    if trust_remote_code:
        own = _own_class(transformers, config)
        if own is not None:
            return own
    for name in config.architectures or ():
        chosen = getattr(transformers, name, None)
        if isinstance(chosen, type) and issubclass(chosen, transformers.PreTrainedModel):
            return chosen
        with_code = "it comes with code of its own, which --trust-remote-code runs"
        cure = with_code if getattr(config, "auto_map", None) else "update it"
        raise ModelError(f"transformers {transformers.__version__} has no model class {name!r}; {cure}.")
    automatic = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageClassification)
    return next((auto for auto in automatic if type(config) in auto._model_mapping), transformers.AutoModel)


def _own_class(transformers: Any, config: Any) -> Any:
    """The automatic class under which a model's own code is registered; None where it has none.

    Code may be registered under several, first perhaps that of a bare network without a head: what the configuration
    states as its architecture comes first, then a language model.
    """
    own = {name: str(where) for name, where in (getattr(config, "auto_map", None) or {}).items()}
    names = [name for name in own if name.startswith("AutoModel") and hasattr(transformers, name)]
    stated = [name for name in names if own[name].rpartition(".")[2] in (config.architectures or ())]
    # One class may be stated twice, as a bare network and as a language model, and is then the latter.
    stated.sort(key=lambda name: name != "AutoModelForCausalLM")
    names.sort(key=lambda name: name != "AutoModelForCausalLM")
    return next((getattr(transformers, name) for name in (*stated, *names)), None)


def _task(transformers: Any, class_name: str, automatic: str) -> Task:
    """What a network's outputs mean, by its class or by the automatic class that it was asked of."""
    auto = transformers.models.auto.modeling_auto
    if class_name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or automatic == "AutoModelForCausalLM":
        return "causal-lm"
    names = auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()
    if class_name in names or automatic == "AutoModelForImageClassification":
        return "image-classification"
    return "other"


def context_of(config: Any, tokenizer: Any) -> int | None:
    """The positions that the network has; failing that what the tokenizer states, unless that is its 'no limit'."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    stated = getattr(tokenizer, "model_max_length", None)
    return stated if isinstance(stated, int) and 0 < stated < 10**9 else None


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds a tokenizer's files."""
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No loading bars and reports: what matters of them becomes an error."""
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
