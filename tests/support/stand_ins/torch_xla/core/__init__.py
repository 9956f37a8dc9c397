"""Tensors and devices of XLA."""
