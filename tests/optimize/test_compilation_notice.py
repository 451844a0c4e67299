"""The first use of the compiled search says that it compiles."""

import logging
from types import SimpleNamespace

from iobs.optimize.search import gram_search
from iobs.optimize.search.gram_search import announce_compilation


def kernel(folder, signatures=()):
    made = SimpleNamespace(signatures=list(signatures), stats=SimpleNamespace(cache_path=str(folder)))
    made.__module__, made.__name__ = "package.module", "search"
    return made


def test_kernels_that_were_never_compiled_are_announced_once(tmp_path, caplog):
    gram_search._log_compilation.cache_clear()
    with caplog.at_level(logging.WARNING, logger="iobs"):
        assert announce_compilation(kernel(tmp_path))
        assert announce_compilation(kernel(tmp_path))
    assert caplog.text.count("once per installation") == 1


def test_a_compiled_kernel_is_not_announced(tmp_path, caplog):
    (tmp_path / "module.search-12.py311.nbi").write_bytes(b"")
    assert not announce_compilation(kernel(tmp_path))
    assert not announce_compilation(kernel(tmp_path / "other", signatures=["signature"]))
    assert not caplog.records


def test_a_function_that_is_not_compiled_is_not_announced():
    assert not announce_compilation(lambda: None)
