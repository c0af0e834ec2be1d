"""The run directory: the whole record of a run, and the only truth about it."""
