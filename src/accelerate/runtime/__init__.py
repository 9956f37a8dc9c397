"""This process and its group: who it is, what it runs on, and the one place of global state."""
