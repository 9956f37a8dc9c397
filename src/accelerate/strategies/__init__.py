"""Who owns wrapping, backward and the state of a model: one strategy per engine."""
