"""`step_together`: one forward and one backward pass of the trunk for all tasks."""
