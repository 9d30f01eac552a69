"""The parts of a GradientBalancer."""
