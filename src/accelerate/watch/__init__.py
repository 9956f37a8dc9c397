"""What watches over a run beside the training."""
