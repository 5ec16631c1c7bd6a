"""The start of every command that trains: its signals, its launcher, and its first line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ci_llm._version import __version__
from ci_llm.cli.guard import print_line
from ci_llm.cluster.hub import offline_note
from ci_llm.cluster.launch import Launch, read_launch
from ci_llm.interrupts import Interrupts, die_with_parent

if TYPE_CHECKING:
    from ci_llm.config import Config


def start(
    what: str,
    config: Config,
    interrupts: Interrupts,
    words: Sequence[str],
    *,
    lines: Sequence[str] = (),
    require: Callable[[Config], None] | None = None,
) -> Launch:
    """Heed the signals that the configuration names, read the launcher, and say on the main process what is loading.

    Args:
        what: is loading, for the first line: "run".
        words: of the command line.
        lines: where the values of `config` come from, if that is to be said here.
        require: refuses the configuration before the first line.

    Returns:
        the place of this process.
    """
    interrupts.set_signals(config.stop_signals, config.save_signals)
    if require is not None:
        require(config)
    launch = read_launch(arguments=words)
    if not launch.forwards_sigterm:
        die_with_parent(next(iter(config.stop_signals), "SIGTERM"))
    if launch.is_main_process:
        print_line(f"ci_llm {__version__}   {what} {config.run_folder}   loading...")
        for line in lines:
            print_line(f"config    {line}")
    if (note := offline_note(config.names_of_inputs)) and launch.is_main_process:
        print_line(f"hub       {note}")
    return launch
