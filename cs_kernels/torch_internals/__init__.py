"""Uses of undocumented parts of torch: look here when a new version of torch comes out.

`tests/test_torch_internals.py` says which name has gone. Two habits of torch are relied on
everywhere: the version counter of a tensor, and a module's dictionaries of parts.
"""
