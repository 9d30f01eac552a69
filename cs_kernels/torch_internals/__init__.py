"""Uses of undocumented features of torch: look here when a new version of torch comes out.

`tests/test_torch_internals.py` reports missing features; its messages name the file. Elsewhere, the
package uses undocumented names that have been stable for years: a tensor's `_version` and `_base`,
a module's dictionaries such as `_parameters`, its `_load_from_state_dict`, the base classes
`_BatchNorm`, `_NormBase` and `_ConvNd`, `torch._foreach_*`, `torch.utils._pytree` and an operator's
`_schema`.
"""
