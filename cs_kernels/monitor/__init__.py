"""Diagnostics of a training run: reports of single steps, and conflict counts over all steps."""
