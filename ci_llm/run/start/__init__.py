"""The start of a run: base and rows, the cost of a step, settings of each agent, the checkpoint to resume from."""
