"""The pages of results are what assemble.py writes from the committed rows, and each row says where it comes from."""

import pytest
from checks import BENCHMARKS, benchmarks

FILES = sorted((BENCHMARKS / "results").glob("*.jsonl"))
# Commits of rows from before processor time and machines were recorded; no row may be added to them.
OLD = """
08198e0 0b3fafa 102f597 173956e 269b8bd 26dac04 322e357 32506cd 3a0a75f 404cc72 44b9c9b 4d38bb3 4e4dca3
4fc7ce5 52a4f71 5c03d1a 5e5b66f 5fd8695 6392061 6e3a5a2 70f4832 75f055a 7c9dfc9 8d569fd 913654b 9299aaa
9b37e28 9b65d33 a644ad1 ab62886 aed82f0 b54e4f9 b5c0523 be87582 c2a39d8 d7de7f7 d8acd57 e019c61 e6b4fb9
f33f25c
"""


@pytest.fixture(scope="module")
def scripts():
    with benchmarks():
        yield


def test_pages_of_results_are_made_from_the_rows(scripts):
    import assemble

    pages = assemble.pages()
    written = [BENCHMARKS / "RESULTS.md", *(BENCHMARKS / "results").glob("*.md")]
    assert {file.resolve() for file in written} == {file.resolve() for file in pages}
    for file, text in pages.items():
        assert file.read_text(encoding="utf8") == text, "run python benchmarks/assemble.py"


def test_site_includes_every_page_of_results(scripts):
    import assemble

    text = (BENCHMARKS.parent / "docs" / "benchmarks-all.md").read_text(encoding="utf8")
    for file in assemble.pages():
        assert file.name == "RESULTS.md" or f"{{include}} ../benchmarks/results/{file.name}\n" in text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_rows_name_commit_seed_seconds_and_machine(scripts, file):
    import rows

    for row in rows.read(file.stem):
        assert all(name in row for name in rows.REQUIRED), row
        if row["machine"] == rows.UNRECORDED:
            assert row["commit"] in OLD.split(), row
        else:
            assert row["processor_seconds"] >= 0
            assert not row["commit"].endswith("-dirty"), row


def test_every_file_of_rows_has_a_section(scripts):
    import assemble

    assert {file.stem for file in FILES} <= {section.rows for section in assemble.SECTIONS} | {"transcribed"}


def test_rows_are_skipped_and_measured_again(scripts, tmp_path, monkeypatch):
    import rows

    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    row = {"name": "a", "seed": 0, "commit": "1234567", "machine": "m", "processor_seconds": 1.0}
    rows.Rows("some", ("name", "seed")).put(row)
    assert rows.Rows("some", ("name", "seed")).has(name="a", seed=0)
    assert not rows.Rows("some", ("name", "seed")).has(name="a", seed=1)
    again = rows.Rows("some", ("name", "seed"), again=True)
    assert not again.has(name="a", seed=0)
    again.put({**row, "commit": rows.commit()})
    assert again.has(name="a", seed=0)
    assert len(rows.read("some")) == 1
    with pytest.raises(AssertionError, match="machine"):
        again.put({**row, "machine": None})


def test_a_race_is_measured_anew_only_with_all_its_peers(scripts, tmp_path, monkeypatch, capsys):
    import rows

    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    common = {"problem": "p", "seed": 0, "commit": "1234567", "machine": "m", "processor_seconds": 1.0}
    for solver in ("iobs", "abess"):
        rows.Rows("some", ("problem", "solver")).put({**common, "solver": solver})
    again = rows.Rows("some", ("problem", "solver"), again=True)
    assert again.unmeasured(["iobs"], problem="p") == []
    assert "p: the rows stay, since abess took part and cannot run here." in capsys.readouterr().out
    assert again.unmeasured(["iobs", "abess"], problem="p") == ["iobs", "abess"]
    assert again.unmeasured(["iobs"], problem="another") == ["iobs"]
    assert rows.Rows("some", ("problem", "solver")).unmeasured(["iobs", "OMP"], problem="p") == ["OMP"]


def test_measured_counts_passes_and_steps(scripts):
    import rows
    import torch

    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with rows.measured() as work:
        layer(torch.ones(5, 3)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            layer(torch.ones(5, 3))
    assert (work.forward, work.backward, work.steps) == (60, 30, 1)
    layer(torch.ones(5, 3))
    assert work.forward == 60


def test_every_cell_of_the_grid_is_a_recipe(scripts):
    import grid

    for square in grid.SQUARES.values():
        for solver in grid.SOLVERS:
            for name in grid.recipes_of(solver):
                recipe = grid.recipe_of(square, solver, name, None if grid.whole_network(solver) else {"fc.0": 3})
                assert (recipe.finetune is not None) == (name in (grid.STEPPED, grid.WHOLE))
                shared = name in (grid.ALLOCATED, grid.TARGETED, grid.FITTED, grid.STEPPED) and not grid.whole_network(
                    solver
                )
                assert bool(recipe.rules) == shared


def test_solver_written_from_the_paper_of_alps_beats_sparsegpt(scripts):
    import torch
    from alps_like import ALPSLike

    import iobs

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 32, generator=generator) @ torch.randn(32, 32, generator=generator)
    problem = iobs.Quadratic.at(torch.randn(16, 32, generator=generator), inputs.T @ inputs / 200)
    for pattern in (iobs.Unstructured(0.6), iobs.NM(2, 4)):
        found, peer = (iobs.solve(problem, pattern, solver, damping=0.01) for solver in (ALPSLike(), "sparsegpt"))
        assert int((found.weight == 0).sum()) == int((peer.weight == 0).sum())
        assert float(found.loss.sum()) < float(peer.loss.sum())
