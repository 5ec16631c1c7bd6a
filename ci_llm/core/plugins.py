"""Packages whose modules are the values of a configuration key: one file adds a value, under the file's name.

The names are those of the files, so that the configuration is checked without importing torch. A module is imported
when its value is used.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ci_llm.errors import BadInput


@cache
def plugin_names(package: str, first: str | None = None) -> tuple[str, ...]:
    """Names of the modules of a package in alphabetical order, with `first` before the others.

    It imports the parents of the package, and neither the package nor its modules.
    """
    spec = find_spec(package)
    assert spec is not None, f"{package} is a package of this project"
    names = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    return tuple(sorted(names, key=lambda name: (name != first, name)))


@cache
def load_plugin(package: str, name: str, attribute: str, *default: Any) -> Any:
    """The `attribute` of the module `name` of a package; a `default` is for modules without it, as for `getattr`.

    Raises:
        BadInput: the package has no such module.
    """
    if name not in (names := plugin_names(package)):
        raise BadInput(f"there is no {name!r}", where=package, hint=f"use one of {', '.join(names)}")
    return getattr(import_module(f"{package}.{name}"), attribute, *default)
