"""A process group over XLA."""
