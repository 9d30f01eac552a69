"""Uses of undocumented parts of torch: look here when a new version of torch comes out.

`tests/test_torch_internals.py` reports what is gone. Two undocumented features are used everywhere:
the version counter of a tensor, and a module's dictionaries, such as `_parameters`.
"""
