"""The basis of every package: durable files, typed JSON, random generators, memory, the state files of a run."""
