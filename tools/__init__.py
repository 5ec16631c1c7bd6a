"""What makes parts of this project, outside the package: the embedded base, tables of the docs."""
