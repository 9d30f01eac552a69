// Reads Python's tensors in place: a step has thousands of tensors, and reading them in Python
// would take longer than the kernels.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "dlpack.h"

namespace cs_kernels_python {

// nullopt unless the object is a tensor with an address, or an empty one. Sparse tensors, torch's
// tensors of zeros without memory, and tensors on a device without memory have no address.
std::optional<dlpack::Tensor> as_dlpack(pybind11::handle object);

inline void* address_of(const dlpack::Tensor& tensor) {
  return static_cast<char*>(tensor.data) + tensor.byte_offset;
}

// The number of a DataType, or kUnknownType for a type without kernels.
constexpr int kUnknownType = -1;
int type_of(const dlpack::Tensor& tensor);

// Whether the address is a multiple of the element size, as the kernels' loads require.
bool is_aligned(const dlpack::Tensor& tensor);

// Whether the elements are adjacent, in row-major order.
bool is_dense(const dlpack::Tensor& tensor);

bool same_device(dlpack::Device a, dlpack::Device b);
// Whether `tensor` is aligned and has the type, device, shape and memory order of `like`.
bool has_layout_of(const dlpack::Tensor& tensor, const dlpack::Tensor& like);

// The number of elements in dimensions [first_dimension, ndim).
std::int64_t elements(const dlpack::Tensor& tensor, int first_dimension = 0);

} // namespace cs_kernels_python
