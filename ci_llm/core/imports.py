"""Imports that wait until something is used: large libraries, and the modules that are values of a configuration key.

Large libraries read some settings only while they are imported, so these are set here. A module that is a value has the
value as its file's name: so one file adds a value, and the configuration is checked without importing torch. Some
packages have values that are no modules.
"""

from __future__ import annotations

import gc
import logging
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from ci_llm.errors import BadInput, ConfigError


def set_library_defaults() -> None:
    """Switch off telemetry, the warning about tokenizers in forked workers, and threads that spin while they wait.

    Also bound what torch and oneDNN keep of products that they have compiled.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # On a shared machine a spinning thread takes the core from the thread it waits for: two toy steps then take
    # minutes (measured).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # On a CPU a product is compiled for its number of rows, which is another one at nearly every step, and both keep
    # 1,024 of them: a server grew by half a gigabyte in 10,000 requests (measured).
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")
    # Accelerate imports bitsandbytes if it is installed, which warns about a missing CPU kernel that is not used here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@contextmanager
def importing() -> Iterator[None]:
    """A command imports torch and what is on top of it, once: `with importing(): from ci_llm.run.job import run_job`.

    Modules make a million objects that live as long as the process. The collector visits them again and again while
    they become more, which is a quarter of what their import takes, and once more in every full collection later.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


#: The values that a package defines itself, beside those that are files in its folder; the first is the default.
_OWN: Final = {
    "ci_llm.checkpoints.backends": "vanilla",
    "ci_llm.crowd.aggregators": "probability logit majority rerank weighted_vote",
    "ci_llm.crowd.diversity": "none swd",
    "ci_llm.crowd.metrics": "exact_match string_match",
    "ci_llm.logs.trackers": "tensorboard mlflow trackio wandb",
    "ci_llm.objectives": "sft classification dpo kto orpo regression reward simpo",
}


@cache
def plugin_names(package: str) -> tuple[str, ...]:
    """The package's own values, and the names of its modules in alphabetical order.

    It imports the parents of the package, and neither the package nor its modules.
    """
    spec = find_spec(package)
    assert spec is not None, f"{package} is a package of this project"
    names = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    return (*_OWN.get(package, "").split(), *sorted(names))


#: What a user named as `module:name`: typed, in a call or in a configuration file. Nothing else is imported,
#: and what a checkpoint, a run folder, a mirror or the hub names never gets in here.
_NAMED: Final[set[str]] = set()


def allow_import(name: str) -> None:
    """Allow `import_named` to import a name of a user's own configuration."""
    _NAMED.add(name)


def is_function(name: str) -> bool:
    """True if a value means code of a user's own, and no module of this package."""
    return ":" in name


def may_import(name: str) -> bool:
    """True if a user named it in this process."""
    return name in _NAMED


def import_named(name: str, key: str) -> Any:
    """The object that `module:name` means in Python, if a user named it; `key` is the key that has it.

    A module may lie in the current folder. That is searched last, so that no file there hides a library.

    Raises:
        ConfigError: only a checkpoint names it, or there is no such object.
    """
    if not may_import(name):
        what = f"a checkpoint names the function {name}, and no code is imported on its word"
        raise ConfigError(what, where=f"{key}: {name}", hint=f"name it yourself, if you trust it: {key}={name}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # and it stays: the module may import its neighbours when it is called
    try:
        module, _, attribute = name.partition(":")
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"there is no such {key}: {error}",
            where=f"{key}: {name}",
            hint="write module:name, of a module in the current folder or one that is installed",
        ) from error


@cache
def load_plugin(package: str, name: str, attribute: str, *default: Any) -> Any:
    """The `attribute` of the module `name` of a package; a `default` is for modules without it, as for `getattr`.

    Raises:
        BadInput: the package has no such module.
    """
    names = plugin_names(package)
    if name not in names:
        raise BadInput(f"there is no {name!r}", where=package, hint=f"use one of {', '.join(names)}")
    return getattr(import_module(f"{package}.{name}"), attribute, *default)
