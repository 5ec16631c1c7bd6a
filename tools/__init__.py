"""Programs that make parts of this project: the embedded base, and tables of the docs."""
