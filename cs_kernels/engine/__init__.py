"""The engine, which makes training steps; read `steps.py` first."""
