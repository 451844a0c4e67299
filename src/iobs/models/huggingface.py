"""Hugging Face directories and names: safetensors only, nothing of theirs executed, nothing silently initialised."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from iobs.errors import ModelError
from iobs.models.loaded import LoadedModel, Task, Tokenizer
from iobs.models.vision_shim import ensure_torchvision
from iobs.prune.audit import packed_hint

# Any of these makes a directory one with a tokenizer; all of them are copied to the output.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_COPIED_FILES = (
    *_TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
    "generation_config.json",
)


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
    if is_directory:
        check_directory(Path(source), allow_pickle)
    ensure_torchvision()
    import transformers

    shared: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    with _quiet(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(source, **shared)
            chosen = _model_class(transformers, config, trust_remote_code)
            if not allow_pickle:
                shared["use_safetensors"] = True
            module, info = chosen.from_pretrained(
                source,
                config=config,
                dtype=dtype or "auto",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name: transformers' own error hides it in a table
                **shared,
            )
        except ModelError:
            raise
        except Exception as error:  # transformers raises every kind, from OSError to RuntimeError
            here = "" if Path(source).is_dir() else f" (and there is no directory {source} here)"
            raise ModelError(f"{source} cannot be loaded: {_first_line(error)}{here}") from error
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
    if dtype is None and module.dtype == torch.float16 and torch.device(device).type == "cpu":
        module = module.float()
    tokenizer = load_tokenizer(source, trust_remote_code) if not is_directory or has_tokenizer(Path(source)) else None

    def write(model: LoadedModel, directory: Path) -> None:
        with _quiet(transformers):
            model.module.save_pretrained(directory)  # type: ignore[operator]
        if is_directory:
            for name in _COPIED_FILES:
                if (Path(source) / name).is_file():
                    shutil.copyfile(Path(source) / name, directory / name)
        elif model.tokenizer is not None:
            model.tokenizer.save_pretrained(directory)

    task = _task(transformers, type(module).__name__)
    return LoadedModel(module.to(device).eval(), tokenizer, str(source), task, context_of(config, tokenizer), write)


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
            raise ModelError(f"The tokenizer of {source} cannot be loaded: {_first_line(error)}") from error
        return None
    return tokenizer


def check_directory(directory: Path, allow_pickle: bool) -> None:
    """Look at a model directory's files before anything is loaded.

    Raises:
        ModelError: no config.json, no weights, pickled weights only, a missing or damaged shard.
    """
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json, so it is not a Hugging Face model directory.")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is damaged; copy it again.") from error
    else:
        shards = sorted(file.name for file in directory.glob("*.safetensors"))
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
        if Path(shard).name != shard:
            raise ModelError(f"{index} names {shard!r}, which lies outside {directory}; do not trust these files.")
        _check_shard(directory / shard)


def _check_shard(file: Path) -> None:
    if not file.is_file():
        raise ModelError(f"{file} is missing, though the index of weights names it; copy it again.")
    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or cut short ({error}); copy it again.") from error


def _model_class(transformers: Any, config: Any, trust_remote_code: bool) -> Any:
    """The class that the configuration states, else the most specific automatic class that knows the configuration."""
    if trust_remote_code and getattr(config, "auto_map", None):
        return transformers.AutoModelForCausalLM
    for name in config.architectures or ():
        chosen = getattr(transformers, name, None)
        if isinstance(chosen, type) and issubclass(chosen, transformers.PreTrainedModel):
            return chosen
        raise ModelError(f"transformers {transformers.__version__} has no model class {name!r}; update it.")
    automatic = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageClassification)
    return next((auto for auto in automatic if type(config) in auto._model_mapping), transformers.AutoModel)


def _task(transformers: Any, class_name: str) -> Task:
    auto = transformers.models.auto.modeling_auto
    if class_name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "causal-lm"
    if class_name in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values():
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


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


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
