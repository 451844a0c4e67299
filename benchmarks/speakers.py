"""A trained recurrent network, pruned: the three-layer LSTM of the package resemblyzer tells speakers apart.

    pip install resemblyzer espeakng-loader
    python benchmarks/speakers.py [--again]

Twelve voices of espeak-ng say the same sentences. Four sentences calibrate, four others enrol the voices, and the last
four are scored. A row a method and sparsity is added to results/speakers.jsonl.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from rows import Row, Rows, measured, parser, stamp
from scipy.signal import resample_poly
from torch import Tensor, nn
from torch.nn import functional

import iobs

KEYS = ("method", "sparsity", "seed")
RATE, MELS, FRAMES = 16_000, 40, 160  # samples a second, channels, frames of a part (1.6 seconds)
VOICES = tuple(f"en-us+{one}" for one in ("m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4", "f5"))
SENTENCES = (
    "The birch canoe slid on the smooth planks, and a boy was there when the sun rose.",
    "Glue the sheet to the dark blue background before the paint has dried.",
    "It is easy to tell the depth of a well when you drop a stone into it.",
    "These days a chicken leg is a rare dish, and few people cook one at home.",
    "Rice is often served in round bowls, with fish, eggs or a little soup.",
    "The juice of lemons makes fine punch on a long and hot summer evening.",
    "The box was thrown beside the parked truck, close to the old stone wall.",
    "The hogs were fed chopped corn and garbage by the man from the village.",
    "Four hours of steady work faced us, and nobody had brought a lamp.",
    "A large size in stockings is hard to sell, as every shop will tell you.",
    "A rod is used to catch pink salmon where the river meets the open sea.",
    "The source of the huge river is the clear spring behind the northern hills.",
)
METHODS = {
    "magnitude": {"recipe": "one-shot", "solver": "magnitude"},
    "SparseGPT": {"recipe": "one-shot", "solver": "sparsegpt"},
    "one-shot": {"recipe": "one-shot"},
}
SPARSITIES = (0.3, 0.5, 0.7)


class Encoder(nn.Module):
    """The speaker encoder: frames (samples, frames, 40) to unit vectors (samples, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(MELS, 256, 3, batch_first=True), nn.Linear(256, 256)

    def forward(self, frames: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(frames)
        return functional.normalize(functional.relu(self.linear(hidden[-1])), dim=1)


def _folder(package: str) -> Path:
    found = find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"{package} is missing; run: pip install resemblyzer espeakng-loader")
    return Path(found.origin).parent


def trained() -> Encoder:
    """The encoder with the weights of resemblyzer."""
    stored = torch.load(_folder("resemblyzer") / "pretrained.pt", map_location="cpu", weights_only=False)
    model = Encoder().eval()
    names = model.state_dict()
    model.load_state_dict({name: stored["model_state"][name] for name in names})
    return model


def spoken(voices: tuple[str, ...], sentences: tuple[str, ...]) -> Iterator[np.ndarray]:
    """Samples at 16 kHz of each sentence by each voice, voice by voice."""
    folder = _folder("espeakng_loader")
    library = ctypes.CDLL(str(next(folder.glob("libespeak-ng*"))))
    rate = library.espeak_Initialize(2, 0, str(folder / "espeak-ng-data").encode(), 0)  # 2: synchronous, no sound
    assert rate > 0, "espeak-ng does not start"
    parts: list[np.ndarray] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)

    @kind
    def take(samples: ctypes._Pointer[ctypes.c_short], count: int, _events: object) -> int:
        if samples and count > 0:
            parts.append(np.ctypeslib.as_array(samples, (count,)).astype(np.float32) / 2**15)
        return 0

    library.espeak_SetSynthCallback(take)
    for voice in voices:
        assert library.espeak_SetVoiceByName(voice.encode()) == 0, voice
        for sentence in sentences:
            text = sentence.encode()
            assert library.espeak_Synth(text, len(text) + 1, 0, 0, 0, 1, None, None) == 0
            library.espeak_Synchronize()
            yield resample_poly(np.concatenate(parts), RATE, rate).astype(np.float32)
            parts.clear()
    library.espeak_Terminate()


def parts_of(sound: np.ndarray) -> Tensor:
    """Spectrograms of the parts of a sentence, each half over the next: (parts, 160, 40)."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    filters = mel_filter_bank(201, MELS, 0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    window = window_function(400, "hann")
    loud = sound * 10 ** (-30 / 20) / np.sqrt(np.mean(sound**2))  # -30 dB, as in training
    frames = torch.from_numpy(
        spectrogram(loud, window, 400, 160, 400, power=2.0, mel_filters=filters, pad_mode="constant")
    )
    return frames.float().T.unfold(0, FRAMES, FRAMES // 2).transpose(1, 2).contiguous()


def sets() -> tuple[list[Tensor], list[list[Tensor]], list[list[Tensor]]]:
    """Calibration batches; parts of the sentences that enrol, and of those that are scored, by voice."""
    sounds = iter([parts_of(sound) for sound in spoken(VOICES, SENTENCES)])
    by_voice = [[next(sounds) for _ in SENTENCES] for _ in VOICES]
    return (
        [torch.cat(voice[:4]) for voice in by_voice],
        [voice[4:8] for voice in by_voice],
        [voice[8:] for voice in by_voice],
    )


@torch.no_grad()
def score(model: nn.Module, dense: nn.Module, enrolled: list[list[Tensor]], heard: list[list[Tensor]]) -> Row:
    """Cosine to the dense vectors, and the share of sentences whose voice is the nearest enrolled one."""

    def vectors(one: nn.Module, sentences: list[Tensor]) -> Tensor:
        return functional.normalize(torch.stack([one(parts).mean(0) for parts in sentences]), dim=1)

    voices = functional.normalize(torch.stack([vectors(model, voice).mean(0) for voice in enrolled]), dim=1)
    right, cosines = 0, []
    for index, voice in enumerate(heard):
        own = vectors(model, voice)
        right += int(((own @ voices.T).argmax(1) == index).sum())
        cosines.append((own * vectors(dense, voice)).sum(1))
    return {"score": float(torch.cat(cosines).mean()), "accuracy": right / sum(map(len, heard))}


def tables(rows: list[Row]) -> str:
    """Cosine and accuracy of each method at each sparsity."""
    shares = sorted({row["sparsity"] for row in rows} - {0.0})
    dense = next(row for row in rows if row["method"] == "dense")
    lines = [
        "# A trained recurrent network",
        "",
        "`python benchmarks/speakers.py`: the speaker encoder of resemblyzer, an LSTM of three layers with 256 units, "
        "on sentences of twelve voices of espeak-ng. Each gate's matrices are pruned, and the last linear layer. First "
        "number: mean cosine of the vectors of new sentences to those of the dense network. Second: share of new "
        f"sentences whose voice is found among the twelve; dense {dense['accuracy']:.0%}.",
        "",
        "| method | " + " | ".join(f"{share:.0%} zeros" for share in shares) + " |",
        "|---|" + "---|" * len(shares),
    ]
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "dense"):
        own = {row["sparsity"]: row for row in rows if row["method"] == method}
        cells = (f"{own[one]['score']:.3f}, {own[one]['accuracy']:.0%}" if one in own else "" for one in shares)
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser(__doc__, data=False).parse_args()
    torch.set_num_threads(1)
    rows, dense = Rows("speakers", KEYS, options.again), trained()
    batches, enrolled, heard = sets()
    wanted = [(name, share) for share in (SPARSITIES[1:2] if options.quick else SPARSITIES) for name in METHODS]
    if not rows.has(method="dense", sparsity=0.0, seed=0):
        with measured() as work:
            scores = score(dense, dense, enrolled, heard)
        rows.put(
            {**stamp(0), "processor_seconds": work.processor_seconds, "method": "dense", "sparsity": 0.0, **scores}
        )
    for name, share in wanted:
        if rows.has(method=name, sparsity=share, seed=0):
            continue
        model = trained()
        with measured() as work:
            report = iobs.prune(model, batches, share, **METHODS[name])
        scores = score(model, dense, enrolled, heard)
        rows.put(
            {
                **stamp(0),
                "processor_seconds": work.processor_seconds,
                "method": name,
                "sparsity": share,
                "layers": len(report.audit),
                **scores,
            }
        )


if __name__ == "__main__":
    main()
