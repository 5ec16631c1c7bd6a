"""Agents and crowd are scored on rows: in a run by all of its processes, and after it with every answer in a file."""
