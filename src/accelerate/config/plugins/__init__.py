"""The option objects that programs make and pass on; what they do not say comes from the variables of a launch."""
