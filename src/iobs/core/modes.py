"""Modes for the time of a block of code: training or eval, the precision of float32, and silence of libraries."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache, partial
from io import StringIO
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

_Setting = tuple[Callable[[], object], Callable[..., object], object]  # how to read and write it, its full precision
_OF_ALL = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision  # the setting of every version
_FULL: dict[object, str] = {"bf16": "ieee", "medium": "highest"}  # values of all bits, by those of fewer
_NEWER = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")  # kinds of products, from torch 2.9 on, besides those of oneDNN
_SHORT, _FEW = 256**2, 2**23  # queries times keys of short sequences, and scores whose memory is small
_EXACT = 1e-6  # relative error of products of float32, some 4e-7; that of inputs in bfloat16 is some 2e-3
_lock = threading.Lock()
_depth = 0  # of `full_precision`, in all threads together: the settings are those of the process
_of_user: list[object] = []  # the settings outside of all `full_precision`, while there is one
_usual_attention: Callable[..., Tensor] = functional.scaled_dot_product_attention


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products and convolutions of float32 in float32, whatever the user allows; the last exit restores that.

    A GPU otherwise rounds their inputs to 10 bits (TF32): in convolutions by default, in products if the user asks for
    it. Gram matrices, inverses and comparisons of networks need all bits. On processors of AMD with AVX-512 products
    then take half of torch's usual time (`_is_quick_and_exact`).
    """
    global _depth, _of_user
    with _lock:
        if not _depth:
            _of_user = _read()
            _write([full for _, _, full in _settings()], _of_user)
            # "medium": oneDNN multiplies. A library's own attention stays: set inside, it may call `_attention` itself.
            if _settings()[0][2] == "medium" and functional.scaled_dot_product_attention is _usual_attention:
                functional.scaled_dot_product_attention = _attention
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                _write(_of_user, _of_user)
                if functional.scaled_dot_product_attention is _attention:
                    functional.scaled_dot_product_attention = _usual_attention


def _attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attention of torch, by MKL where sequences are short, and in plain products if there will be gradients.

    torch's kernel multiplies small tiles one by one. At 65 patches of a picture oneDNN takes four times as long for
    them as MKL, which cannot be chosen for the backward pass alone (LOG.md).
    """
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if not _depth or traced or not isinstance(query, Tensor) or query.is_nested or query.device.type != "cpu":
        return _usual_attention(query, key, *args, **kwargs)
    scores = query.shape[-2] * key.shape[-2]
    if scores >= _SHORT:
        return _usual_attention(query, key, *args, **kwargs)
    if torch.is_grad_enabled() and scores * query.shape[:-2].numel() <= _FEW:
        with sdpa_kernel(SDPBackend.MATH):
            return _usual_attention(query, key, *args, **kwargs)
    _, write, rounding = _onednn()
    write(_FULL[rounding])
    try:
        return _usual_attention(query, key, *args, **kwargs)
    finally:
        write(rounding)


@contextmanager
def precision_of_user() -> Iterator[None]:
    """The user's own precision again inside `full_precision`, to time a network as it is used; restored on exit."""
    global _depth
    with _lock:
        before, depth, _depth = _read(), _depth, 0
        _write(_of_user if depth else before, before)
    try:
        yield
    finally:
        with _lock:
            _write(before, before)
            _depth += depth


@cache
def _settings() -> list[_Setting]:
    """The settings of torch that let products of float32 be shorter.

    The first two exist in every version, and write the newer ones. All are kept in agreement, since torch refuses to
    read an old setting that contradicts a newer one.
    """
    newer = hasattr(torch.backends, "fp32_precision")
    onednn, quick = _onednn(), _is_quick_and_exact(_onednn())
    settings: list[_Setting] = [
        (*_OF_ALL, "medium" if quick else "highest"),
        _attribute(torch.backends.cudnn, "allow_tf32", False),
    ]
    if newer:
        settings += [_attribute(attrgetter(path)(torch.backends), "fp32_precision", "ieee") for path in _NEWER]
        settings.append((*onednn[:2], None if quick else "ieee"))  # None: it follows the first setting
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns once that it has newer settings
        _values(settings)
    return settings


@cache
def _onednn() -> _Setting:
    """The setting of products on the processor, and the value that lets them be shorter."""
    if hasattr(torch.backends, "fp32_precision"):
        return _attribute(attrgetter("mkldnn.matmul")(torch.backends), "fp32_precision", "bf16")
    return *_OF_ALL, "medium"


def _is_quick_and_exact(setting: _Setting) -> bool:
    """True if this CPU multiplies float32 faster, and with all bits, under a setting that lets torch round to bfloat16.

    torch multiplies by MKL, which leaves half of the width of AVX-512 unused on processors of AMD. Where inputs may be
    rounded it multiplies by oneDNN, which uses all of it, in 45 % of the time (LOG.md). oneDNN rounds them only on
    processors with AMX or of another family; a product shows whether it does.
    """
    able = torch.cpu.get_capabilities()
    if torch.cuda.is_available() or not able.get("avx512_bf16") or able.get("amx_bf16"):
        return False
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(256, 256, generator=generator, dtype=torch.float64, device="cpu") for _ in range(2)]
    left, right = (matrix.float() for matrix in wide)
    read, write, rounding = setting
    before = read()
    write(rounding)
    try:
        product = left @ right
    finally:
        write(before)
    exact = left.double() @ right.double()
    return bool((product - exact).norm() <= _EXACT * exact.norm())


def _attribute(owner: object, name: str, full: object) -> _Setting:
    return partial(getattr, owner, name), partial(setattr, owner, name), full


def _read() -> list[object]:
    """The present settings; None for one that torch refuses to read."""
    return _values(_settings())


def _values(settings: Sequence[_Setting]) -> list[object]:
    values: list[object] = []
    for read, _, _ in settings:
        try:
            values.append(read())
        except RuntimeError:  # the user has changed the newer settings alone
            values.append(None)
    return values


def _write(values: Sequence[object], before: Sequence[object]) -> None:
    """Write the settings that could be read before."""
    for (_, write, _), value, previous in zip(_settings(), values, before, strict=True):
        if previous is not None and value is not None:
            write(value)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode (no dropout) for all modules; each module gets its own mode back."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        _set_modes(model, training)


def _set_modes(module: nn.Module, training: Mapping[nn.Module, bool]) -> None:
    """Restore training modes; by `train` where all inner modules were training, since modules may override it."""
    if all(training.get(inner, inner.training) for inner in module.modules()):
        module.train()
        return
    module.training = training.get(module, module.training)
    for child in module.children():
        _set_modes(child, training)


# ---- Silence of libraries that report on a standard stream, by warnings and in a log


@contextmanager
def silenced(
    library: str,
    level: int = logging.ERROR,
    redirect: type[redirect_stdout[StringIO]] | type[redirect_stderr[StringIO]] = redirect_stdout,
) -> Iterator[None]:
    """Context without the progress and the warnings of a library; its errors are raised.

    Args:
        library: name of its logger.
        level: least level that it still logs.
        redirect: of the standard stream that it writes to.
    """
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(level)
    try:
        with warnings.catch_warnings(), redirect(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
