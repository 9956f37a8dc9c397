"""Options of the library: one declaration each, filled from arguments, then the environment, then defaults."""
