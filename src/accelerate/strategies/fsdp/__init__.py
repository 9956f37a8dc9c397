"""Fully sharded data parallelism: its state on disk."""
