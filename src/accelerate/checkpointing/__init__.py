"""Write and read the state of a run."""
