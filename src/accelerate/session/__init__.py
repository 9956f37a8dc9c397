"""What a program asked for and what was prepared for it."""
