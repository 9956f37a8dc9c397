"""Exchange of tensors and objects between the processes of a run."""
