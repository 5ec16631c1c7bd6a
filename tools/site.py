"""The hook of mkdocs.yml: pages that lie outside docs/ join the site, and links that work on a code host work there.

README.md is the first page. A link to a file of the repository leads to a copy of it; a link to a folder is text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

import griffe
from mkdocs.structure.files import File, Files

import ci_llm

ROOT: Final = Path(__file__).parents[1]
#: Pages of the site that have another place in the repository.
PAGES: Final = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
SOURCES: Final = "source"
#: The page of the public names, and where in it mkdocstrings writes their signatures and docstrings.
NAMES: Final = "api.md"
SIGNATURES: Final = "<!-- signatures -->"
#: How much a page counts in the search: what people do comes before how it is made, and copies of files are left out.
TASKS: Final = re.compile(r"install|first_run|own_data|own_model|run_folder|recipes/")
INSIDES: Final = ("api.md", "architecture.md", "contributing.md")
_FENCE: Final = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_EXAMPLE: Final = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


class Examples(griffe.Extension):
    """An example in a docstring is a block of code; Markdown would take its `>>>` for a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from elsewhere, and a copy of every file that a page links to."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    pages = list(files.documentation_pages())
    for page in pages:  # grows: a copy may be a page with links of its own
        for _, _, target, _ in _LINK.findall(_FENCE.sub("", page.content_string)):
            path = _in_repository(page.src_uri, target)
            if _is_source(path) and files.get_file_from_path(f"{SOURCES}/{path}") is None:
                copy = File.generated(config, f"{SOURCES}/{path}", content=(ROOT / path).read_bytes())
                files.append(copy)
                pages += [copy] * copy.is_documentation_page()
    return files


def _signatures() -> str:
    names = [
        f"::: {module}" + f".{name}" * (not module.endswith(f".{name}")) for name, module in ci_llm._MODULES.items()
    ]
    return "\n\n".join(names)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page, but for those inside blocks of code; fill in the signatures."""
    here = page.file.src_uri
    if here.startswith(f"{SOURCES}/"):
        page.meta["search"] = {"exclude": True}
    elif TASKS.match(here) or here in INSIDES:
        page.meta["search"] = {"boost": 0.5 if here in INSIDES else 2}
    if here == NAMES:
        markdown = markdown.replace(SIGNATURES, _signatures())
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(lambda link: _rewritten(link, here), markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(lambda link: _rewritten(link, here), markdown[end:])])


def _rewritten(link: re.Match[str], page: str) -> str:
    image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    path = _in_repository(page, target)
    elsewhere = {source: name for name, source in PAGES.items()}
    if path in elsewhere:
        place = elsewhere[path]
    elif path.startswith("docs/"):
        place = path.removeprefix("docs/")
    elif _is_source(path):
        place = f"{SOURCES}/{path}"
    else:
        return text if (ROOT / path).is_dir() else link[0]  # a missing target is left for mkdocs to complain about
    return f"{image}[{text}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor})"


def _in_repository(page: str, target: str) -> str:
    """The path that a link of a page of the site means, from the root of the repository."""
    copied = page.startswith(f"{SOURCES}/")
    source = page.removeprefix(f"{SOURCES}/") if copied else PAGES.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _is_source(path: str) -> bool:
    return not path.startswith(("docs/", "..")) and path not in PAGES.values() and (ROOT / path).is_file()
