"""What people watch during training: reports of steps, and conflict counts over the steps."""
