"""Examples on the help page of every command. Tests parse each command line."""

from __future__ import annotations

EXAMPLES: dict[str, dict[str, str]] = {
    "demo": {
        "iobs demo": "five methods on the embedded model, in about a minute",
        "iobs demo --sparsity 70% -o demo70": "with more zeros",
    },
    "prune": {
        "iobs prune MODEL -o OUT --sparsity 50%": "a Hugging Face directory or name",
        "iobs prune net.py:model -o OUT --data net.py:batches --recipe best": "a network of your own, fine-tuned",
        "iobs prune MODEL -o OUT --pattern 2:4 --ignore '*.down_proj' --resume": "with a checkpoint",
        "iobs prune MODEL -o OUT2 --recipe OUT/recipe.yaml": "the same run again",
    },
    "compare": {
        "iobs compare MODEL --methods fast,sparsegpt --patterns 50%,2:4 -o RESULTS": "",
        "iobs compare net.py:model --data net.py:train --eval-data net.py:test --json": "the table for a program",
    },
    "evaluate": {
        "iobs evaluate OUT --data text.txt": "perplexity on your own text",
        "iobs evaluate OUT --tasks arc_easy,hellaswag": "tasks of lm-eval",
    },
    "inspect": {
        "iobs inspect OUT": "count the zeros, and compare them with report.json",
        "iobs inspect OUT --pattern 2:4 --json": "check a pattern too",
    },
    "pack": {
        "iobs pack OUT": "writes OUT.packed",
        "iobs pack OUT --precision int8": "rounded, for iobs run and iobs evaluate as it is",
        "iobs pack --unpack OUT.packed -o DENSE": "ordinary files again",
    },
    "export": {
        "iobs export OUT --to gguf": "writes OUT.gguf/model.gguf for llama.cpp",
        "iobs export OUT --to gguf --bits 8 -o FILES": "with weights rounded to 8 bits",
        "iobs export OUT --to onnx --bits 8": "a graph for ONNX Runtime, weights rounded to 8 bits",
        "iobs export OUT --to macko": "zeros left out, for the GPU kernels of MACKO",
        "iobs export OUT --to compressed-tensors --bits 4": "a directory for transformers and vLLM",
        "iobs export OUT --to openvino --shape 3,224,224": "a graph for OpenVINO, of your own network for images",
        "iobs export OUT --to coreml --bits 16": "a bit mask and 16-bit values, for Core ML",
    },
    "run": {
        "iobs run OUT.packed 'Once upon a time'": "a packed model, without unpacking",
        "iobs run OUT 'Once upon a time'": "continue a text, with the zeros used for speed",
        "iobs run OUT 'Once upon a time' --precision bf16 --tokens 20 --json": "exact to bfloat16, for a program",
    },
    "bench": {
        "iobs bench OUT": "tokens or images a second, bytes and memory: dense, and with the zeros used",
        "iobs bench OUT --beside MODEL": "a model with fewer units beside the one before, in torch and ONNX Runtime",
        "iobs bench OUT.packed --tokens 64 --plot speed.svg --json": "a packed model, with a figure",
    },
    "solve": {
        "iobs solve data.csv --target price -k 5": "the best five columns",
        "iobs solve data.csv --target price -k cv --plot path.png": "the number chosen by cross-validation",
        "iobs solve patients.csv --family cox --target time --event status -k 5": "times that may be censored",
        "iobs solve houses.csv --target price --interactions strong": "with products of two columns",
    },
    "predict": {
        "iobs predict model.json new.csv": "predict the rows of a new table",
        "iobs predict model.json new.csv -o predictions.csv": "write the predictions to a file",
        "iobs predict model.json new.csv --json": "the columns of predictions, for a program",
    },
    "reproduce": {
        "iobs reproduce": "list the tables and figures",
        "iobs reproduce figure-mnist --stand-in -o RESULTS": "run one with a small data set",
    },
}


def epilogue(command: str) -> str:
    """The examples of a command as Markdown, one paragraph each."""
    lines = [f"- `{line}`{f': {text}' if text else ''}" for line, text in EXAMPLES[command].items()]
    return "\n\n".join(["Examples:", *lines])
