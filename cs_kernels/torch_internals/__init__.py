"""Uses of undocumented features of torch: look here when a new version of torch comes out.

`tests/test_torch_internals.py` reports missing features. Two undocumented features are also used
elsewhere: the version counter of a tensor, and a module's dictionaries, such as `_parameters`.
"""
