"""XLA devices: one process for each, or one process that drives all of them together."""
