"""How a step is made; `steps.py` is the page to read first."""
