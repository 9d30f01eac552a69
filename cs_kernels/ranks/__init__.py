"""Training on several ranks with the same result on each, built on torch.distributed.

A task's gradient is the gradient of its mean loss over the ranks that have labels for it, and
surgery acts on these gradients. `strategy.py` defines the methods that a step calls, and implements
them for a single process. `distributed.py` is the base of replicated ranks (`replicated.py`) and
sharded ranks (`sharded.py`). The ranks' hosts exchange messages about a step (`messages.py`) over
`transport.py`: `agreement.py` compares values that must be equal, `failure.py` raises an exception
on all ranks, and `health.py` compares the parameters.
"""
