"""How a step is made: one walk (`engine.py`), and the ways to make gradients, a module each."""
