"""Helpers for the test suite."""
