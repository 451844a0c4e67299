"""Put the tables of benchmarks/results/ together in benchmarks/RESULTS.md; each section names its command.

python benchmarks/assemble.py
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent
# In the order of the results page: what a reader asks first comes first.
SECTIONS = (
    "resnet20_oneshot",
    "paper_rounds",
    "networks",
    "small_networks",
    "layer_race",
    "layer_shapes_cpu",
    "recovery",
    "scale",
)
INTRODUCTION = """# Results

Every figure here was made by a script in this folder, beside its peer, with the same threads and the same count of
non-zeros (a page says where two differ); where the two were not run one after the other the section says so. Machines
were small and shared: trust ratios, not seconds. Nothing was chosen on test data. Each section names its command;
`python benchmarks/assemble.py` puts the sections together.
"""


def lowered(line: str) -> str:
    """A line of a section as it stands one folder and one heading up."""
    return f"#{line}" if line.startswith("#") else line.replace("](layer_race.png)", "](results/layer_race.png)")


def main() -> None:
    texts = [(HERE / "results" / f"{name}.md").read_text(encoding="utf8").strip() for name in SECTIONS]
    # Sections are pages of their own with one title each; here they are one level down.
    bodies = ["\n".join(lowered(line) for line in text.splitlines()) for text in texts]
    (HERE / "RESULTS.md").write_text("\n\n".join([INTRODUCTION.strip(), *bodies]) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
