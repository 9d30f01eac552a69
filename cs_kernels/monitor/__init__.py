"""What people watch during training: reports of steps, and conflicts counted over the steps."""
