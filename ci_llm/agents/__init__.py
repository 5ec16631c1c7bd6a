"""The agents: what each has, the storage of which each has views, and the schedules of their learning rates."""
