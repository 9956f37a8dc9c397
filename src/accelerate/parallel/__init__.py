"""Steps that can be stacked on a model: compile, unwrap, and the axes of model parallelism."""
