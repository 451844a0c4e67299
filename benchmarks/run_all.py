"""Run the benchmarks and put their tables together in benchmarks/RESULTS.md.

python benchmarks/run_all.py            # run every benchmark whose peers and data are here, then assemble
python benchmarks/run_all.py --assemble # only put the tables of benchmarks/results/ together
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# In the order of the results page: what a reader asks first comes first.
BENCHMARKS = ("resnet20_oneshot", "paper_rounds", "networks", "layer_race", "recovery", "scale")
INTRODUCTION = """# Results

Every figure here was made by a script in this folder, side by side with its peer in one run, with the same threads and
the same count of non-zeros. Machines were small and shared: trust ratios, not seconds. Nothing was chosen on test data.
Each section names its command; `python benchmarks/run_all.py --assemble` puts the sections together.
"""


def _lower(line: str) -> str:
    """A line of a section as it stands one folder and one heading up."""
    return f"#{line}" if line.startswith("#") else line.replace("](layer_race.png)", "](results/layer_race.png)")


def assemble() -> None:
    sections = [HERE / "results" / f"{name}.md" for name in BENCHMARKS]
    texts = [section.read_text(encoding="utf8").strip() for section in sections if section.exists()]
    # Sections are pages of their own with one title each; here they are one level down.
    bodies = ["\n".join(_lower(line) for line in text.splitlines()) for text in texts]
    (HERE / "RESULTS.md").write_text("\n\n".join([INTRODUCTION.strip(), *bodies]) + "\n", encoding="utf8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assemble", action="store_true", help="run nothing")
    if not parser.parse_args().assemble:
        for name in BENCHMARKS:
            script = HERE / f"{name}.py"
            if script.exists():
                done = subprocess.run([sys.executable, str(script)], check=False)
                print(f"{name}: {'done' if done.returncode == 0 else f'failed with exit status {done.returncode}'}")
    assemble()


if __name__ == "__main__":
    main()
