"""A release rehearsed: wheel and sdist are built, installed in empty environments, and pass the fast tests there.

    python -m tools.release [--end lowest|newest] [--folder build/release] [--keep]

`lowest` pins every dependency of pyproject.toml at the lower end of its range, `newest` pins none, and lists what is
released beyond the upper ends: let it in, call this again, and keep it if the tests pass. An environment has its own
torch, of up to 7 GB where only builds for CUDA can be had, and is deleted after its tests.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import tarfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
ENDS = ("lowest", "newest")
#: What a user does who has no checkout, in an empty folder.
FIRST_HOUR = (
    "ci-llm train num_agents=2 max_train_steps=3 batch_size=2 generation_eval_samples=2 eval_samples=4",
    'ci-llm generate ci_llm_output "Ann has 7 pens. She buys 5. How many pens are there?"',
    "ci-llm checkpoints verify ci_llm_output/final_checkpoint",
    "ci-llm export ci_llm_output --to agents --no-score",
    "ci-llm supervise num_agents=2 max_train_steps=1 eval_samples=4 generation_eval_samples=0 experiment_name=watched",
    "ci-llm status ci_llm_output/watched",
)


def lowest(pyproject: str) -> list[str]:
    """The lower end of the range of every dependency, as pins for pip; from the text of pyproject.toml."""
    ranges = [(each.name, {one.operator: one.version for one in each.specifier}) for each in dependencies(pyproject)]
    return [f"{name}=={ends['>=']}" for name, ends in ranges]


def dependencies(pyproject: str) -> list[Requirement]:
    """The requirements of the package; from the text of pyproject.toml."""
    return [Requirement(each) for each in tomllib.loads(pyproject)["project"]["dependencies"]]


def call(*words: object, cwd: Path = ROOT, **environment: str) -> None:
    """Show a command and run it.

    Raises:
        CalledProcessError: it failed.
    """
    print(f"\n$ {shlex.join(map(str, words))}", flush=True)
    subprocess.run([*map(str, words)], cwd=cwd, env={**os.environ, **environment}, check=True)


def environment(folder: Path) -> Path:
    """The folder of programs of a new, empty environment."""
    venv.create(folder, with_pip=True, clear=True)
    return folder / "bin"


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of this checkout; the wheel is made of the sdist, so that both are whole."""
    programs = environment(folder / "builder")
    call(programs / "pip", "install", "--quiet", "build")
    call(programs / "python", "-m", "build", "--outdir", folder / "dist", ROOT)
    [wheel], [source] = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert any(name.endswith("/configs.yaml") for name in archive.getnames()), "the sdist has no configs.yaml"
    return wheel, source


def tree_of(package: Path, folder: Path) -> Path:
    """The tracked files of this checkout with the installed package in place of its own."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, files.split("\0")):
        if not name.startswith("ci_llm/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "ci_llm").symlink_to(package)
    return folder


def rehearse(end: str, wheel: Path, folder: Path, tests: Sequence[str]) -> None:
    """Install at one end of the ranges, do what a user does first, and run the fast tests."""
    programs = environment(folder / end)
    pins = folder / f"{end}.txt"
    pins.write_text("\n".join(lowest((ROOT / "pyproject.toml").read_text())) if end == "lowest" else "")
    call(programs / "pip", "install", "--quiet", "-c", pins, f"{wheel}[dev]")
    call(programs / "pip", "check")
    if end == "newest":
        call(programs / "pip", "list", "--outdated")
    empty = folder / f"{end}-first-hour"
    empty.mkdir()
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    for line in FIRST_HOUR:
        call(*shlex.split(line), cwd=empty, PATH=path, PYTHONPATH="")
    [package] = (folder / end).glob("lib/python3*/site-packages/ci_llm")
    tree = tree_of(package, folder / f"{end}-tree")
    # Warnings of older libraries, such as of files that they leave open, are not ours to mend.
    lenient = ("-W", "ignore", "-p", "no:unraisableexception") if end == "lowest" else ()
    side_by_side = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    where = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PATH": path}
    call(
        programs / "python", "-m", "pytest", *lenient, *side_by_side, "-m", "not slow", "-q", *tests, cwd=tree, **where
    )


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.release", description=__doc__.splitlines()[0])
    parser.add_argument("--end", choices=ENDS, action="append", help="one end of the ranges; default both")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/release", help="default build/release")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("tests", nargs="*", help="files of tests; default all fast ones")
    given = parser.parse_args()
    folder = given.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    wheel, source = build(folder)
    for end in given.end or ENDS:
        rehearse(end, wheel, folder, given.tests)
        if not given.keep:
            shutil.rmtree(folder / end)
    print(f"\n{wheel.name} and {source.name} are in {folder / 'dist'}")


if __name__ == "__main__":
    main()
