"""The frozen base: found, loaded, quantised, shared out; which of its modules carry agents. Knows no crowd."""
