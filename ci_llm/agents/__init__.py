"""The agents: each a thing of its own, with views of the storage that all of them share, and a schedule of its rate."""
