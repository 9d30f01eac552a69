"""The shared module: its layers, which tasks reach which parameters, its running statistics."""
