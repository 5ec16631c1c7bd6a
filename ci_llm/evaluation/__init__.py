"""After a run: agents and crowd answer the rows of a data set; every answer is kept in a file, and scored."""
