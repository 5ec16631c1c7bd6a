"""Reports about runs, from the files that they leave and without torch: a page, a comparison, a status, a live view."""
