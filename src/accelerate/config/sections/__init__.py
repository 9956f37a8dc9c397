"""The options by subject, one file each."""
