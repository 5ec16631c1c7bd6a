"""The benchmarks: listed, or run one after the other with their defaults.

python -m benchmarks                what there is
python -m benchmarks step crowd     runs these two
python -m benchmarks.step --help    what one of them takes
"""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def found() -> dict[str, str]:
    """Every module here with a `main`, and the first line of its docstring."""
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.py"))}
    return {
        name: (ast.get_docstring(tree) or "").partition("\n")[0]
        for name, tree in trees.items()
        if name != "__main__" and any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    }


def main() -> None:
    """Lists or runs."""
    benchmarks = found()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(benchmarks))
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in benchmarks]:
        parser.error(f"there is no {unknown[0]!r}; choose from {', '.join(benchmarks)}")
    width = max(map(len, benchmarks))
    for name in names or benchmarks:
        print(f"{name:<{width}}  {benchmarks[name]}", flush=True)
        if names:
            sys.argv = [f"benchmarks.{name}"]
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
