"""DeepSpeed: an engine that owns the optimizer, the schedule and the sharding of what it trains."""
