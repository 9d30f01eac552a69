// cs_kernels._C.Operands and channel_layout. A step has thousands of gradients: asked one by one
// from Python, where they lie would take longer than the kernels do.
#include "operands.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "dlpack.h"

namespace py = pybind11;

namespace {

using cs_kernels_python::Address;
using Layout = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

constexpr int kUnknownType = -1;

const dlpack::ExchangeApi& torch_exchange() {
  static const dlpack::ExchangeApi* const api = [] {
    const py::object tensor = py::module_::import("torch").attr("Tensor");
    const py::capsule capsule = tensor.attr(dlpack::kTypeAttribute);
    const void* found = PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName);
    if (found == nullptr)
      throw py::error_already_set();
    const auto* table = static_cast<const dlpack::ExchangeApi*>(found);
    if (table->major_version != dlpack::kMajorVersion || table->tensor_from_object == nullptr)
      throw std::runtime_error("torch's DLPack exchange API must have version 1 and show tensors in"
                               " place, got version " +
                               std::to_string(table->major_version));
    return table;
  }();
  return *api;
}

// Nothing for a tensor without an address: sparse, or on a device that has none.
std::optional<dlpack::Tensor> shown(py::handle object) {
  dlpack::Tensor tensor{};
  if (torch_exchange().tensor_from_object(object.ptr(), &tensor) == 0)
    return tensor;
  PyErr_Clear();
  return std::nullopt;
}

Address address_of(const dlpack::Tensor& tensor) {
  return reinterpret_cast<Address>(tensor.data) + tensor.byte_offset;
}

// The kernels' number of a type; kUnknownType for what they do not read.
int type_of(const dlpack::Tensor& tensor) {
  const dlpack::DataType type = tensor.type;
  if (type.lanes != 1)
    return kUnknownType;
  if (type.code == dlpack::kFloat)
    return type.bits == 32 ? 0 : type.bits == 64 ? 1 : type.bits == 16 ? 3 : kUnknownType;
  return type.code == dlpack::kBfloat && type.bits == 16 ? 2 : kUnknownType;
}

bool same_device(const dlpack::Tensor& a, const dlpack::Tensor& b) {
  return a.device.type == b.device.type && a.device.index == b.device.index;
}

bool lies_like(const dlpack::Tensor& tensor, const dlpack::Tensor& like) {
  const std::int32_t n = tensor.dimensions;
  return n == like.dimensions && tensor.type.code == like.type.code &&
         tensor.type.bits == like.type.bits && tensor.type.lanes == like.type.lanes &&
         same_device(tensor, like) && std::equal(tensor.shape, tensor.shape + n, like.shape) &&
         std::equal(tensor.strides, tensor.strides + n, like.strides);
}

// Those of the dimensions from one on.
std::int64_t elements(const dlpack::Tensor& tensor, int first_dimension) {
  std::int64_t count = 1;
  for (int dim = first_dimension; dim < tensor.dimensions; ++dim)
    count *= tensor.shape[dim];
  return count;
}

// The memory as an array [groups, outer, channels, inner]; nothing if it is not one. Groups are
// those of a transposed convolution, whose output channels are dimension 1.
std::optional<Layout> channel_layout(const std::int64_t* shape, const std::int64_t* strides,
                                     int dimensions, int channel_dim, std::int64_t groups) {
  if (channel_dim != 0 && channel_dim != 1)
    throw std::invalid_argument("out_channel_dim must be 0 or 1, got " +
                                std::to_string(channel_dim));
  if (groups < 1)
    throw std::invalid_argument("groups must be at least 1, got " + std::to_string(groups));
  const auto in_shape = [&](int dim) { return dim < dimensions ? shape[dim] : 1; };
  std::vector<int> dims;
  for (int dim = 0; dim < dimensions; ++dim) {
    if (shape[dim] == 0)
      return Layout{1, 1, in_shape(channel_dim), 0};
    if (shape[dim] > 1)
      dims.push_back(dim);
  }
  std::stable_sort(dims.begin(), dims.end(), [&](int a, int b) { return strides[a] > strides[b]; });
  std::int64_t expected = 1;
  for (std::size_t i = dims.size(); i-- > 0;) {
    if (strides[dims[i]] != expected)
      return std::nullopt;
    expected *= shape[dims[i]];
  }
  if (channel_dim != 1)
    groups = 1;
  if (groups > 1 && (dims.empty() || dims.front() != 0))
    return std::nullopt;
  const auto channels = std::find(dims.begin(), dims.end(), channel_dim);
  const auto product = [&](auto first, auto last) {
    return std::accumulate(first, last, std::int64_t{1},
                           [&](std::int64_t all, int dim) { return all * shape[dim]; });
  };
  // The groups are a part of dimension 0, which is the first of `dims`.
  if (channels == dims.end())
    return Layout{groups, 1, 1, product(dims.begin(), dims.end()) / groups};
  return Layout{groups, product(dims.begin(), channels) / groups, shape[channel_dim],
                product(channels + 1, dims.end())};
}

// The tensors that gradients belong to, as many to each, and where all of them are.
class Operands {
public:
  Operands(const py::list& outputs, const py::list& gradients, std::size_t tasks,
           const std::vector<int>& channel_dims, const std::vector<std::int64_t>& groups) {
    if (gradients.size() != outputs.size() * tasks)
      throw std::invalid_argument("grads must have " + std::to_string(outputs.size() * tasks) +
                                  " entries, one a tensor and task, got " +
                                  std::to_string(gradients.size()));
    if (channel_dims.size() != groups.size())
      throw std::invalid_argument("out_channel_dims and groups must have as many entries, got " +
                                  std::to_string(channel_dims.size()) + " and " +
                                  std::to_string(groups.size()));
    dlpack::Tensor first{};
    for (std::size_t t = 0; t < outputs.size(); ++t) {
      const std::optional<dlpack::Tensor> found = shown(outputs[t]);
      const dlpack::Tensor output = found.value_or(dlpack::Tensor{});
      if (t == 0)
        first = output;
      const bool described = t < groups.size();
      const std::optional<Layout> layout =
          channel_layout(output.shape, output.strides, output.dimensions,
                         described ? channel_dims[t] : 0, described ? groups[t] : 1);
      types.push_back(type_of(output));
      if (!found || types.back() == kUnknownType || !same_device(output, first) || !layout)
        unfit.push_back(t);
      layouts.push_back(layout.value_or(Layout{}));
      sizes.push_back(elements(output, 0));
      kernel_sizes.push_back(elements(output, 2));
      addresses.push_back(address_of(output));
      for (std::size_t place = t * tasks; place < (t + 1) * tasks; ++place) {
        if (gradients[place].is_none()) {
          gradient_addresses.push_back(0);
          continue;
        }
        const std::optional<dlpack::Tensor> gradient = shown(gradients[place]);
        const bool fits = gradient && lies_like(*gradient, output);
        gradient_addresses.push_back(fits ? address_of(*gradient) : 0);
        if (!fits)
          misfits.push_back(place);
      }
    }
  }

  std::vector<int> types;
  std::vector<Layout> layouts;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> kernel_sizes;
  std::vector<Address> addresses;
  std::vector<Address> gradient_addresses; // [outputs, tasks], 0 for None
  std::vector<std::size_t> unfit;          // outputs that no kernel can be told of as they are
  std::vector<std::size_t> misfits; // places of gradients that lie otherwise than their output
};

// The places of tensors that are None or do not lie like the one at the same place of `likes`.
std::vector<std::size_t> misfits(const py::list& tensors, const py::list& likes) {
  if (tensors.size() != likes.size())
    throw std::invalid_argument("tensors must be as many as likes, " +
                                std::to_string(likes.size()) + ", got " +
                                std::to_string(tensors.size()));
  std::vector<std::size_t> found;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const std::optional<dlpack::Tensor> tensor = shown(tensors[t]);
    const std::optional<dlpack::Tensor> like = shown(likes[t]);
    if (!tensor || !like || !lies_like(*tensor, *like))
      found.push_back(t);
  }
  return found;
}

} // namespace

void define_operands(py::module_& module) {
  module.def(
      "channel_layout",
      [](const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides,
         int out_channel_dim, std::int64_t groups) {
        if (shape.size() != strides.size())
          throw std::invalid_argument("shape and strides must have as many entries");
        return channel_layout(shape.data(), strides.data(), static_cast<int>(shape.size()),
                              out_channel_dim, groups);
      },
      py::arg("shape"), py::arg("strides"), py::arg("out_channel_dim"), py::arg("groups"));
  module.def("misfits", &misfits, py::arg("tensors"), py::arg("likes"));
  py::class_<Operands>(module, "Operands")
      .def(py::init<const py::list&, const py::list&, std::size_t, const std::vector<int>&,
                    const std::vector<std::int64_t>&>(),
           py::arg("outputs"), py::arg("gradients"), py::arg("tasks"), py::arg("out_channel_dims"),
           py::arg("groups"))
      .def_readonly("types", &Operands::types)
      .def_readonly("layouts", &Operands::layouts)
      .def_readonly("sizes", &Operands::sizes)
      .def_readonly("kernel_sizes", &Operands::kernel_sizes)
      .def_readonly("addresses", &Operands::addresses)
      .def_readonly("gradient_addresses", &Operands::gradient_addresses)
      .def_readonly("unfit", &Operands::unfit)
      .def_readonly("misfits", &Operands::misfits);
}
