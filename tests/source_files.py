"""The source files of the package, each read and parsed once for all tests that look at how it is written."""

from __future__ import annotations

import ast
import gc
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "iobs"
TEXT_CALLS = ("open", "read_text", "write_text")


@dataclass
class SourceFile:
    """The parts of a file that tests look at. The whole trees of all files would be 100 MB."""

    file: Path
    text: str
    docstrings: list[tuple[str, str]] = field(default_factory=list)  # the name that each belongs to, and its text
    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    functions: list[tuple[str, ast.arguments]] = field(default_factory=list)
    attributes: list[tuple[str, set[str]]] = field(default_factory=list)  # of each class, by its name
    text_calls: list[ast.Call] = field(default_factory=list)  # of functions and methods named in TEXT_CALLS

    @property
    def name(self) -> str:
        """The path below the package, the same on every system."""
        return self.file.relative_to(SOURCE).as_posix()

    def look_at(self, node: ast.AST) -> None:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                self.docstrings.append((getattr(node, "name", "module"), text))
        if isinstance(node, ast.Import | ast.ImportFrom):
            self.imports.append(node)
        elif isinstance(node, ast.FunctionDef):
            self.functions.append((node.name, node.args))
        elif isinstance(node, ast.ClassDef):
            self.attributes.append((node.name, _attributes_of(node)))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in TEXT_CALLS:
            self.text_calls.append(node)

    def imported(self) -> set[str]:
        """The modules that the file imports, and the names that it takes from them."""
        names: set[str] = set()
        for node in self.imports:
            names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.file}: write imports in full"
                names.add(node.module or "")
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        return names


def _attributes_of(node: ast.ClassDef) -> set[str]:
    """Names annotated in the body of a class, and names that its methods set on `self`."""
    names = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            names |= {inner.attr} if isinstance(inner.value, ast.Name) and inner.value.id == "self" else set()
    return names


@cache
def source_files() -> list[SourceFile]:
    """All files of the package, by path; whoever reads them changes nothing."""
    found = []
    collects = gc.isenabled()
    gc.disable()  # trees die by reference counts; looking for cycles in each of them takes longer than to parse
    try:
        for file in sorted(SOURCE.rglob("*.py")):
            one = SourceFile(file, file.read_text(encoding="utf8"))
            for node in ast.walk(ast.parse(one.text)):
                one.look_at(node)
            found.append(one)
    finally:
        if collects:
            gc.enable()
    return found
