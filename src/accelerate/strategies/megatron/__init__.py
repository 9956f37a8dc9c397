"""Megatron-LM: an engine that splits layers over ranks, and runs whole training steps by itself."""
