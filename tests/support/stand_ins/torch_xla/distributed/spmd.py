"""One program over several devices."""
