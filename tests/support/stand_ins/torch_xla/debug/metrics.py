"""Counters of compilations."""
