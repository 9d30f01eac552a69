#include "tensors.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>

#include "cs_kernels/data_type.h"

namespace py = pybind11;

namespace cs_kernels_python {
namespace {

using cs_kernels::DataType;

const dlpack::ExchangeApi& torch_exchange() {
  static const dlpack::ExchangeApi* const api = [] {
    const py::object tensor = py::module_::import("torch").attr("Tensor");
    const py::capsule capsule = tensor.attr(dlpack::kTypeAttribute);
    const void* found = PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName);
    if (found == nullptr)
      throw py::error_already_set();
    const auto* table = static_cast<const dlpack::ExchangeApi*>(found);
    if (table->major_version != dlpack::kMajorVersion)
      throw std::runtime_error("torch's DLPack exchange API must have version 1, got version " +
                               std::to_string(table->major_version));
    if (table->tensor_from_object == nullptr)
      throw std::runtime_error("torch's DLPack exchange API must have a function that reads a"
                               " tensor in place, got none");
    return table;
  }();
  return *api;
}

} // namespace

std::optional<dlpack::Tensor> as_dlpack(py::handle object) {
  dlpack::Tensor tensor{};
  if (torch_exchange().tensor_from_object(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  if (tensor.data == nullptr && elements(tensor) > 0)
    return std::nullopt;
  return tensor;
}

int type_of(const dlpack::Tensor& tensor) {
  const dlpack::DataType type = tensor.type;
  const auto is = [&](int code, int bits) {
    return type.lanes == 1 && type.code == code && type.bits == bits;
  };
  return is(dlpack::kFloat, 32)    ? static_cast<int>(DataType::kFloat32)
         : is(dlpack::kFloat, 64)  ? static_cast<int>(DataType::kFloat64)
         : is(dlpack::kBfloat, 16) ? static_cast<int>(DataType::kBFloat16)
         : is(dlpack::kFloat, 16)  ? static_cast<int>(DataType::kFloat16)
                                   : kUnknownType;
}

bool is_aligned(const dlpack::Tensor& tensor) {
  const std::uintptr_t bytes = std::max(tensor.type.bits / 8, 1);
  return reinterpret_cast<std::uintptr_t>(address_of(tensor)) % bytes == 0;
}

bool is_dense(const dlpack::Tensor& tensor) {
  std::int64_t stride = 1;
  for (std::int32_t n = tensor.dimensions - 1; n >= 0; --n) {
    if (tensor.shape[n] != 1 && tensor.strides[n] != stride)
      return false;
    stride *= tensor.shape[n];
  }
  return true;
}

bool same_device(dlpack::Device a, dlpack::Device b) {
  return a.type == b.type && a.index == b.index;
}

bool has_layout_of(const dlpack::Tensor& tensor, const dlpack::Tensor& like) {
  bool same = tensor.dimensions == like.dimensions && tensor.type.code == like.type.code &&
              tensor.type.bits == like.type.bits && tensor.type.lanes == like.type.lanes &&
              same_device(tensor.device, like.device) && is_aligned(tensor);
  // The stride of a dimension of size 1 is arbitrary in torch.
  for (std::int32_t n = 0; same && n < like.dimensions; ++n)
    same = tensor.shape[n] == like.shape[n] &&
           (like.shape[n] == 1 || tensor.strides[n] == like.strides[n]);
  return same;
}

std::int64_t elements(const dlpack::Tensor& tensor, int first_dimension) {
  return std::accumulate(tensor.shape + std::min(first_dimension, tensor.dimensions),
                         tensor.shape + tensor.dimensions, std::int64_t{1}, std::multiplies<>());
}

} // namespace cs_kernels_python
