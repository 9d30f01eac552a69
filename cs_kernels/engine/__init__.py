"""How a step is made; `steps.py` is the file to read first."""
