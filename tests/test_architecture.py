"""The house holds: imports go down only and in no circle, dangerous ones have one owner, public names are as said."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

import ci_llm
from tools.testbed.events import DEADLINE_S

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ci_llm"

#: From the top floor down. A file may import from floors below its own; rooms of one package may import each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__", "__init__"),
    ("cli",),
    ("sweep",),
    ("dry_run", "serve", "supervisor"),
    ("run",),
    ("evaluation", "integrations"),
    ("crowd", "logs", "report"),
    ("agents",),
    ("lora", "mirror", "orbax"),
    ("base", "checkpoints", "data"),
    ("distributed", "objectives"),
    ("cluster", "config", "embedded"),
    ("interrupts",),
    ("core",),
    ("errors", "_version"),
)

#: What only one file (or package) may import, because it has to be done in one way.
OWNERS = {
    "accelerate": {"distributed/processes.py", "run/trainer.py"},
    "yaml": {"config/yaml_file.py"},
    "ruamel": {"supervisor/script_settings.py"},
    "signal": {"interrupts.py"},
    "peft": {"agents/as_peft.py", "crowd/merging.py"},
    "subprocess": {"cluster/slurm.py", "cluster/starter.py", "supervisor/shim.py"},
    "pickle": {"base/load.py"},  # the class of an error, and nothing that loads
    "pynvml": {"logs/hardware.py"},
    "jinja2": {"report/page.py", "crowd/card.py", "data/rendering.py"},
}


@cache
def texts() -> dict[str, str]:
    """Every file of the package by its path in it; read when a test asks, and not in every worker."""
    return {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    return {file: ast.parse(text) for file, text in texts().items()}


def is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(tree: ast.Module, *, for_types: bool = False) -> list[str]:
    """Every module a file imports, at its top or inside a function.

    Args:
        for_types: imports under TYPE_CHECKING count as well.
    """
    typing_only = set[int]()
    if not for_types:
        typing_only = {id(node) for block in ast.walk(tree) if is_typing_only(block) for node in ast.walk(block)}
    names = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@cache
def imports() -> dict[str, list[str]]:
    return {file: imported(tree) for file, tree in trees().items()}


def room(name: str) -> str:
    """`ci_llm.lora.layer` belongs to the room `lora`."""
    return name.split(".")[1] if "." in name else "__init__"


def floor(of: str) -> int:
    return next(len(FLOORS) - number for number, rooms in enumerate(FLOORS) if of in rooms)


def test_imports_go_down() -> None:
    wrong = [
        f"{file} imports {name}, which is not below it"
        for file, names in imports().items()
        for name in names
        if name.startswith("ci_llm.")
        and room(name) != (own := file.split("/")[0].removesuffix(".py"))
        and floor(room(name)) >= floor(own)
    ]
    assert wrong == []


def module_of(file: str) -> str:
    """`lora/layer.py` is the module `ci_llm.lora.layer`, and `lora/__init__.py` is `ci_llm.lora`."""
    return ".".join(["ci_llm", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


def graph_of(files: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Each module with the other modules of the package that it imports: at its top, in a function, or for types."""
    modules = {module_of(file) for file in files}
    graph: dict[str, set[str]] = {}
    for file, tree in files.items():
        names = imported(tree, for_types=True)
        meant = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module_of(file)] = (meant & modules) - {module_of(file)}
    return graph


@cache
def package_graph() -> dict[str, set[str]]:
    return graph_of(trees())


def ways_from(start: str, graph: Mapping[str, set[str]]) -> dict[str, tuple[str, ...]]:
    """Every module that `start` reaches by imports, with a shortest way to it; `start` itself only in a circle."""
    ways: dict[str, tuple[str, ...]] = {}
    newest = [(start,)]
    while newest:
        longer = {name: (*way, name) for way in newest for name in sorted(graph[way[-1]]) if name not in ways}
        ways |= longer
        newest = [*longer.values()]
    return ways


def circles(graph: Mapping[str, set[str]]) -> dict[frozenset[str], str]:
    """The strongly connected components of several modules, each with a shortest circle in it, for people."""
    ways = {module: ways_from(module, graph) for module in graph}
    components = {frozenset(name for name in ways[module] if module in ways[name]) for module in graph}
    shortest = {each: min((ways[name][name] for name in sorted(each)), key=len) for each in components if each}
    return {each: " imports ".join(circle) for each, circle in shortest.items()}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert list(circles(package_graph()).values()) == []


def test_a_circle_is_found_whatever_its_imports_are_for() -> None:
    files = {
        "a.py": "from ci_llm.b import Name",
        "b/__init__.py": "def late():\n    from ci_llm.b import c",
        "b/c.py": "if TYPE_CHECKING:\n    import ci_llm.a",
        "d.py": "from ci_llm import a, e",
        "e.py": "import ast",
    }
    found = circles(graph_of({file: ast.parse(text) for file, text in files.items()}))
    expected = "ci_llm.a imports ci_llm.b imports ci_llm.b.c imports ci_llm.a"
    assert found == {frozenset({"ci_llm.a", "ci_llm.b", "ci_llm.b.c"}): expected}


#: The packages within `run`, and the files that serve them, from the top down. None of these imports one of the other
#: files directly in `run`, which join them.
RUN_FLOORS = (*("start", "result", "emergency_save", "watchdog", "attempt", "mirroring", "step", "optimizer"),)


def test_imports_between_the_parts_of_a_run_go_one_way() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("run/*/__init__.py")}
    assert packages <= {*RUN_FLOORS} <= packages | {path.stem for path in PACKAGE.glob("run/*.py")}
    allowed = {own: {*RUN_FLOORS[floor:]} for floor, own in enumerate(RUN_FLOORS)}
    wrong = [
        f"{module} imports {name}"
        for module, names in package_graph().items()
        for name in names
        if name.startswith("ci_llm.run")
        and (own := module.removeprefix("ci_llm.run.").split(".")[0]) in allowed
        and name.removeprefix("ci_llm.run.").split(".")[0] not in allowed[own]
    ]
    assert wrong == []


#: What else is in the repository, and what of it each folder may import.
AROUND = {
    "ci_llm": set(),
    "examples": set(),
    "tools": set(),
    "benchmarks": {"examples", "tools"},
    "tests": {"benchmarks", "examples", "tools"},
}


def test_package_tools_and_benchmarks_import_no_tests() -> None:
    names = re.compile(rf"^ *(?:from|import) ({'|'.join(set(AROUND) - {'ci_llm'})})\b", re.MULTILINE)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder, allowed in AROUND.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in set(names.findall(path.read_text(encoding="utf-8"))) - {folder} - allowed
    ]
    assert wrong == []


def test_dangerous_imports_have_one_owner() -> None:
    wrong = [
        f"{file} imports {name}"
        for file, names in imports().items()
        for name in {name.split(".")[0] for name in names} & set(OWNERS)
        if file not in OWNERS[name]
    ]
    assert wrong == []


NOWHERE = {"pickle.load", "pickle.loads", "pickle.Unpickler"}
ONE_ROOM = {
    "core/durable.py": {"os.rename", "os.replace", "os.fsync", "os.fdatasync"},
    "core/determinism.py": {"torch.manual_seed", "random.seed", "np.random.seed", "torch.set_rng_state"},
}


def test_only_one_room_renames_syncs_or_seeds() -> None:
    last_names = {name.rpartition(".")[2] for name in NOWHERE.union(*ONE_ROOM.values())}
    wrong = []
    for file, tree in trees().items():
        called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        calls = {ast.unparse(func) for func in called if isinstance(func, ast.Attribute) and func.attr in last_names}
        elsewhere = set().union(*(names for owner, names in ONE_ROOM.items() if owner != file))
        wrong += [f"{file} calls {name}" for name in calls & (NOWHERE | elsewhere)]
    assert wrong == []


#: Tokens that make no line one of code.
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}

WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def code_lines(text: str) -> int:
    """How many lines of a file hold code: not docstrings, comments and blank lines."""
    counted = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            counted.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, WITH_DOCSTRINGS) and ast.get_docstring(node) is not None:
            first = node.body[0]
            counted.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(counted)


def test_code_is_counted_without_comments_and_docstrings() -> None:
    explained = '"""Charter."""\n\n# why\nx = """a\nb"""  # here too\n\n'
    function = 'def f():\n    """Does\n    it."""\n    return (\n        x\n    )\n'
    assert code_lines(explained) == 2
    assert code_lines(function) == 4


def test_a_file_says_its_charter_and_stays_one_idea() -> None:
    charters = {file: (ast.get_docstring(tree) or "").partition("\n")[0] for file, tree in trees().items()}
    assert [file for file, charter in charters.items() if len(charter) <= 10] == []
    long = {file: text for file, text in texts().items() if text.count("\n") > 500}
    assert [file for file, text in long.items() if code_lines(text) > 500] == []


#: At most so many lines of code in a room. Who raises one says why in the same commit; CONTRIBUTING.md has the rule.
CAPS = {
    "agents": 388,
    "base": 897,
    "checkpoints": 2295,
    "cli": 1566,
    "cluster": 697,
    "config": 1954,
    "core": 1531,
    "crowd": 4471,
    "data": 3137,
    "distributed": 634,
    "dry_run": 753,
    "embedded": 99,
    "evaluation": 863,
    "files": 433,
    "integrations": 697,
    "logs": 869,
    "lora": 1144,
    "mirror": 912,
    "objectives": 502,
    "report": 959,
    "run": 4499,
    "serve": 1304,
    "supervisor": 1570,
    "sweep": 801,
}


def test_no_room_grows_beyond_its_cap() -> None:
    lines = Counter[str]()
    for file, text in texts().items():
        lines[Path(file).parts[0].removesuffix(".py")] += code_lines(text)
    alone = {name: count for name, count in lines.items() if (PACKAGE / f"{name}.py").is_file()}
    rooms = {name: count for name, count in lines.items() if name not in alone} | {"files": sum(alone.values())}
    assert {*rooms} == {*CAPS}
    assert {name: count for name, count in rooms.items() if count > CAPS[name]} == {}


#: What a mapping of this type holds is said nowhere: a record with known keys is a dataclass.
UNTYPED = "dict[str, Any]"


def test_records_have_types() -> None:
    uses = {file: text.count(UNTYPED) for file, text in texts().items() if UNTYPED in text}
    assert sum(uses.values()) <= 200
    assert [file for file in uses if file.startswith("report/")] == []


def test_functions_fit_a_screen() -> None:
    lengths = {
        f"{file}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    ordered = sorted(lengths.values())
    assert ordered[len(ordered) // 2] <= 10
    assert not [name for name, length in lengths.items() if length > 60]


def test_what_the_loop_takes_has_few_parts() -> None:
    """The loop reads on a page: it imports few of our modules, and takes objects that a reader can hold in mind."""
    ours = {name.rpartition(".")[0] for name in imports()["run/loop.py"] if name.startswith("ci_llm.")}
    assert len(ours) <= 12, ours
    parts = {
        node.name: [each for each in node.body if isinstance(each, ast.AnnAssign)]
        for node in ast.walk(trees()["run/trainer.py"])
        if isinstance(node, ast.ClassDef)
    }
    assert {name: len(fields) for name, fields in parts.items() if len(fields) > 15} == {}


def test_the_public_names_are_sorted_few_and_exist() -> None:
    assert sorted(ci_llm.__all__) == list(ci_llm.__all__)
    assert len(ci_llm.__all__) <= 21
    for name in ci_llm.__all__:
        assert getattr(ci_llm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ci_llm.nonsense  # noqa: B018


def test_docs_list_the_public_names_one_line_each() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(ci_llm.__all__)


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_readme_docs_and_examples_import_public_names_only(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    lines = re.findall(r"^ *((?:from|import) ci_llm\b.*)$", text, re.MULTILINE)
    assert len(lines) == len(re.findall(r"(?:from|import)\s+ci_llm\b", text)), "an import that this test cannot read"
    for line in lines:
        if line == "import ci_llm" or line.startswith("import ci_llm.orbax as ocp"):  # as Orbax's own is imported
            continue
        found = re.fullmatch(r"from ci_llm import (\w+(?:(?: as \w+)?, \w+)*(?: as \w+)?)(?:\s+#.*)?", line)
        assert found, f"{line}: not of the form `from ci_llm import NAME`"
        names = {part.split(" as ")[0] for part in found[1].split(", ")}
        assert names <= set(ci_llm.__all__), f"{line}: not public"


MAP = ROOT / "docs" / "architecture.md"


def test_the_map_draws_the_floors() -> None:
    [drawing] = re.findall(r"<!-- floors -->\n```text\n(.*?)```", MAP.read_text(encoding="utf-8"), re.DOTALL)
    drawn = [re.sub(r"^ *\d+ +", "", line).split("  ")[0].strip() for line in drawing.splitlines()]
    assert [tuple(line.split(", ")) for line in drawn] == [*FLOORS]


def test_every_file_that_the_map_names_exists() -> None:
    named = re.findall(r"`((?:ci_llm|tests|docs)/[\w/]+\.\w+)`", MAP.read_text(encoding="utf-8"))
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).is_file()]


LIGHT = (
    "ci_llm",
    "ci_llm.checkpoints.store",
    "ci_llm.config",
    "ci_llm.interrupts",
    "ci_llm.logs.hardware",
    "ci_llm.logs.run_log",
    "ci_llm.core.run_status",
    "ci_llm.report.page",
    "ci_llm.report.compare",
    "ci_llm.report.status",
    "ci_llm.cli.main",
    *(f"ci_llm.supervisor.{path.stem}" for path in sorted(PACKAGE.glob("supervisor/[!_]*.py"))),
)


def test_light_rooms_load_neither_torch_nor_transformers() -> None:
    code = f"import sys, {', '.join(LIGHT)}; print(*({{'torch', 'transformers', 'accelerate'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
