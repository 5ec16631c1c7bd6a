"""The mutation score: of small changes to a file, how many do its fast tests notice?

    python -m tools.mutate [--sample 60] [--seed 0] [FILE ...]

Changes are drawn by a seed: another comparison, operator, number or boolean, a condition turned round, a statement
left out, a value returned as None. Texts stay as they are. A process that has loaded the libraries forks for each
change; the child imports the changed module and runs the tests of the file. So a change costs little more than its
tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
TESTS = {
    "ci_llm/checkpoints/store.py": ["tests/checkpoints/test_store.py", "tests/checkpoints/test_costs.py"],
    "ci_llm/checkpoints/due.py": ["tests/checkpoints/test_due.py"],
    "ci_llm/supervisor/policy.py": ["tests/supervisor/test_classify.py", "tests/supervisor/test_policy.py"],
    "ci_llm/run/step/state.py": ["tests/run/test_nonfinite_policy.py", "tests/run/test_requests.py"],
    "ci_llm/data/order.py": ["tests/data/test_order.py"],
}
LIBRARIES = ("hypothesis", "torch", "transformers", "accelerate", "safetensors.torch", "datasets", "pydantic")
SLOWER = 5  # a change that makes the tests this many times slower counts as noticed

_PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.LShift, ast.RShift)),
    *((ast.Div, ast.Mult), (ast.Mod, ast.Mult), (ast.BitXor, ast.BitOr), (ast.BitAnd, ast.BitOr)),
)
SWAPS = {**{new: old for old, new in _PAIRS}, **dict(_PAIRS)}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that `node` may be changed into."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[op, *_]) if type(op) in SWAPS:
            changed.ops[0] = SWAPS[type(op)]()  # type: ignore[call-overload]
            yield changed
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            changed.op = SWAPS[type(op)]()  # type: ignore[assignment]
            yield changed
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.If() | ast.IfExp() | ast.While():
            changed.test = ast.UnaryOp(ast.Not(), changed.test)
            yield changed
        case ast.Expr(value=ast.Call(func=function)) if not ast.unparse(function).startswith("logger."):
            yield ast.Pass()
        case ast.Raise() | ast.AugAssign() | ast.Break() | ast.Continue():
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))


def mutants(tree: ast.Module) -> list[tuple[str, ast.Module]]:
    """Every changed tree, with the line and the change in words. Annotations and decorators are left alone."""
    found = []
    silent = {id(inner) for node in ast.walk(tree) for part in _silent(node) for inner in ast.walk(part)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in silent:
            continue
        for change in changes(node):
            whole = copy.deepcopy(tree)
            original = list(ast.walk(whole))[number]
            told = f"{getattr(node, 'lineno', 0)}: {_short(node)} -> {_short(change)}"
            found.append((told, ast.fix_missing_locations(_Replace(original, change).visit(whole))))
    return found


def _silent(node: ast.AST) -> list[ast.AST]:
    parts = [getattr(node, name, None) for name in ("annotation", "returns")]
    return [part for part in parts if part is not None] + getattr(node, "decorator_list", [])


def _short(node: ast.AST) -> str:
    text = ast.unparse(node).replace("\n", " ")
    return text if len(text) < 70 else text[:67] + "..."


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, ast.copy_location(new, old)

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else super().visit(node)  # type: ignore[no-any-return]


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a tree instead of its file."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self._path, loader=self) if name == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._tree, str(self._path), "exec"), module.__dict__)


def run_tests(file: str, tree: ast.Module, limit_s: float) -> str:
    """ "passed", "failed" or "late": what the tests of `file` say of its tree."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1), os.dup2(sink, 2)  # type: ignore[unused-coroutine]
        sys.meta_path.insert(0, _Changed(file.removesuffix(".py").replace("/", "."), ROOT / file, tree))
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore"]
        os._exit(int(pytest.main([*options, *TESTS[file]])))
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "passed" if os.waitstatus_to_exitcode(status) == 0 else "failed"
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "late"


def score(file: str, sample: int, seed: int) -> tuple[int, int]:
    """(noticed, tried) of a sample of the changes of `file`; prints those that nobody noticed."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    began = time.monotonic()
    if (said := run_tests(file, tree, 600)) != "passed":
        raise SystemExit(f"{file}: the unchanged file's tests: {said}")
    limit_s = 10 + SLOWER * (time.monotonic() - began)
    every = mutants(tree)
    drawn = random.Random(seed).sample(every, min(sample, len(every)))
    noticed = 0
    for told, changed in drawn:
        if run_tests(file, changed, limit_s) == "passed":
            print(f"  {file}:{told}", flush=True)
        else:
            noticed += 1
    print(f"| `{file}` | {len(every)} | {len(drawn)} | {noticed} | {noticed / len(drawn):.0%} |", flush=True)
    return noticed, len(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(TESTS), metavar="FILE")
    parser.add_argument("--sample", type=int, default=60, help="changes per file")
    parser.add_argument("--seed", type=int, default=0)
    call = parser.parse_args()
    os.chdir(ROOT)
    for library in LIBRARIES:
        importlib.import_module(library)
    results = [score(file, call.sample, call.seed) for file in call.files]
    noticed, tried = (sum(column) for column in zip(*results, strict=True))
    print(f"{noticed} of {tried} changes noticed: {noticed / tried:.0%}")
    sys.exit(noticed / tried < 0.85)


if __name__ == "__main__":
    main()
