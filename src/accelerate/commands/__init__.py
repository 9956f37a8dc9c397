"""The sub-commands of `accelerate`, one module each: parse, call, print."""
