"""What is known of the shared module: its layers, who reaches what, its running statistics."""
