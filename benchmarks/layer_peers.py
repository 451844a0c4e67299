"""The peers of the layer race, run from their own files in a folder that the user names.

    git clone https://github.com/IST-DASLab/sparsegpt       (run at 147d2159)
    git clone https://github.com/mazumder-lab/ALPS          (run at 8af9e6b5)
    git clone https://github.com/IST-DASLab/OBC             (run at 9b7979bf)

Their code is executed as it is but for two things: the device "cuda:0" becomes the race's own, and waiting for a GPU
does nothing where there is none. The Gram matrix is handed to them where they would have accumulated it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import types
from pathlib import Path

import torch
from torch import Tensor, nn

DAMPING = 0.01


class Peers:
    """The peers' pruning of one weight, each returning the new weight."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from iobs.models.vision_shim import ensure_torchvision

        ensure_torchvision()
        if not torch.cuda.is_available():
            torch.cuda.synchronize = lambda *_: None
        self.device = device
        self.sparsegpt_file = _load(folder / "sparsegpt" / "sparsegpt.py", device)
        self.alps_file = _load(folder / "ALPS" / "alps.py", device)
        self.obc_file = _load(folder / "OBC" / "trueobs.py", device)

    def _layer(self, weight: Tensor) -> nn.Linear:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight.to(self.device, torch.float32).clone()
        return layer

    def sparsegpt(self, weight: Tensor, gram: Tensor, sparsity: float, nm: tuple[int, int] | None) -> Tensor:
        """`nm` is (kept, of); SparseGPT itself counts the pruned.

        Unstructured, its code removes one entry a block more than it is asked for: it is asked for half a one less.
        """
        layer = self._layer(weight)
        pruner = self.sparsegpt_file.SparseGPT(layer)
        pruner.H = gram.float().clone()
        keep, of = nm or (0, 0)
        if nm is None:
            sparsity -= 0.5 / (weight.shape[0] * min(128, weight.shape[1]))
        with contextlib.redirect_stdout(io.StringIO()):
            pruner.fasterprune(sparsity, prunen=of - keep, prunem=of, percdamp=DAMPING)
        return layer.weight.data

    def alps(self, weight: Tensor, gram: Tensor, sparsity: float, nm: tuple[int, int] | None) -> Tensor:
        layer = self._layer(weight)
        pruner = self.alps_file.ALPS_prune(layer, 1, 1)
        pruner.XtX = gram.float().clone()
        keep, of = nm or (0, 0)
        pruner.ALPS_admm(sparsity, nm_n=keep, nm_m=of)
        return layer.weight.data

    def obc(self, weight: Tensor, gram: Tensor, sparsity: float, nm: tuple[int, int] | None) -> Tensor:
        layer = self._layer(weight)
        pruner = self.obc_file.TrueOBS(layer, rel_damp=DAMPING)
        pruner.H = gram.double().clone()
        with contextlib.redirect_stdout(io.StringIO()):
            if nm is not None:
                keep, of = nm
                pruner.nmprune(of - keep, of)
                return layer.weight.data
            pruner.prepare_unstr()
            (pruned,) = pruner.prune_unstr([sparsity])
        return pruned


def _load(file: Path, device: str) -> types.ModuleType:
    """A peer's file as a module of its own; its neighbours are found while it loads and forgotten afterwards."""
    if not file.exists():
        raise SystemExit(f"{file} is not there; the head of layer_peers.py says what to clone.")
    module = types.ModuleType(f"peer_{file.stem}")
    sys.path.insert(0, str(file.parent))
    known = set(sys.modules)
    try:
        source = file.read_text().replace("cuda:0", device)
        exec(compile(source, str(file), "exec"), module.__dict__)
    finally:
        sys.path.remove(str(file.parent))
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(file.parent)):
                del sys.modules[name]
    return module
