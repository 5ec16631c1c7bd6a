"""Aggregators: how the agents' distributions become the crowd's. Each module of this package is one.

To add one, add a file `aggregators/<name>.py` that defines

    def aggregate(log_probs: Tensor) -> Tensor      [K, ..., V] of K agents -> [..., V] of the crowd

and `aggregator: <name>` selects it, in a configuration and in `Crowd.generate`. Input and output are normalised
log-probabilities; the function is pure and must not wait for the device.

Legend: K agents, V vocabulary; any shape in between.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ci_llm.core.plugins import load_plugin, plugin_names

AGGREGATORS = plugin_names(__name__, first="probability")


def aggregate(log_probs: Tensor, aggregator: str) -> Tensor:
    """The crowd's log-probabilities [..., V] from the agents' [K, ..., V].

    Raises:
        BadInput: no module of this package has that name.
    """
    function: Callable[[Tensor], Tensor] = load_plugin(__name__, aggregator, "aggregate")
    return function(log_probs)
