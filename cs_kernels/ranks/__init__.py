"""The same result on many ranks: torch.distributed below, nothing home-made.

The gradient of a task is that of its mean loss over the ranks that have labels for it, and surgery
takes place on these. `strategy.py` has the verbs of a step, for one process; `distributed.py` has
what replicated ranks (`replicated.py`) and sharded ones (`sharded.py`) have in common. What ranks
tell each other about a step, on their hosts: `messages.py`, over `transport.py`; `agreement.py`
has what must be alike, `failure.py` takes an exception to all ranks, `health.py` compares networks.
"""
