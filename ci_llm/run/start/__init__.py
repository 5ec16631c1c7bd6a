"""How a run starts: base and rows, what a step costs, settings of each agent, the checkpoint from which it resumes."""
