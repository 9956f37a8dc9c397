"""A model cut into stages that run on one process each, fed with chunks of a batch."""
