"""What every package uses: durable files, typed JSON, random generators, memory, the status files of a run."""
