"""Uses of undocumented features of torch: look here when a new version of torch comes out.

`tests/test_torch_internals.py` reports missing features. Three undocumented features are also used
elsewhere: the version counter of a tensor, a module's dictionaries, such as `_parameters`, and
`torch.utils._pytree`.
"""
