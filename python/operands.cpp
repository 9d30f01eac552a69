#include "operands.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "module.h"
#include "tensors.h"

namespace py = pybind11;

namespace cs_kernels_python {
namespace {

using cs_kernels::ChannelLayout;

std::string shown(const std::int64_t* shape, int dimensions) {
  py::tuple sizes(dimensions);
  for (int dim = 0; dim < dimensions; ++dim)
    sizes[dim] = shape[dim];
  return py::str(sizes);
}

// `groups` exceeds 1 only in transposed convolutions, whose output channels lie along dimension 1.
// It divides dimension 0, so the number of channels, groups * shape[1], fits in an int64.
void check_layout(const std::int64_t* shape, int dimensions, std::int64_t channel_dim,
                  std::int64_t groups) {
  std::string must;
  if (channel_dim != 0 && channel_dim != 1)
    must = "out_channel_dim must be 0 or 1";
  else if (channel_dim >= dimensions)
    must = "out_channel_dim must be a dimension of " + shown(shape, dimensions);
  if (!must.empty())
    throw std::invalid_argument(must + ", got " + std::to_string(channel_dim));
  if (groups < 1)
    must = "groups must be at least 1";
  else if (groups > 1 && channel_dim == 0)
    must = "groups must be 1 where out_channel_dim is 0";
  else if (groups > 1 && (shape[0] == 0 || shape[0] % groups != 0))
    must = "groups must divide dimension 0 of " + shown(shape, dimensions);
  if (!must.empty())
    throw std::invalid_argument(must + ", got " + std::to_string(groups));
}

// The memory as an array [groups, outer, channels, inner], or nullopt if there is no such layout.
std::optional<ChannelLayout> find_channel_layout(const std::int64_t* shape,
                                                 const std::int64_t* strides, int dimensions,
                                                 std::int64_t channel_dim, std::int64_t groups) {
  std::vector<int> dims;
  for (int dim = 0; dim < dimensions; ++dim) {
    if (shape[dim] == 0)
      return ChannelLayout{groups, 1, shape[channel_dim], 0};
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
  if (groups > 1 && (dims.empty() || dims.front() != 0))
    return std::nullopt;
  const auto channels = std::find(dims.begin(), dims.end(), channel_dim);
  const auto product = [&](auto first, auto last) {
    return std::accumulate(first, last, std::int64_t{1},
                           [&](std::int64_t all, int dim) { return all * shape[dim]; });
  };
  // Groups split dimension 0, which is the first of `dims`.
  if (channels == dims.end())
    return ChannelLayout{groups, 1, 1, product(dims.begin(), dims.end()) / groups};
  return ChannelLayout{groups, product(dims.begin(), channels) / groups, shape[channel_dim],
                       product(channels + 1, dims.end())};
}

// The indices of tensors that are None or for which has_layout_of(tensor, like) is false.
std::vector<std::size_t> find_misfits(const py::list& tensors, const py::list& likes) {
  if (tensors.size() != likes.size())
    throw std::invalid_argument("tensors must have the length of likes, " +
                                std::to_string(likes.size()) + ", got " +
                                std::to_string(tensors.size()));
  std::vector<std::size_t> found;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const std::optional<dlpack::Tensor> tensor = as_dlpack(tensors[t]);
    const std::optional<dlpack::Tensor> like = as_dlpack(likes[t]);
    if (!tensor || !like || !has_layout_of(*tensor, *like))
      found.push_back(t);
  }
  return found;
}

} // namespace

Operands::Operands(const py::list& tensors, const py::list& grads, std::int32_t number_of_tasks,
                   const std::vector<std::int64_t>& channel_dims,
                   const std::vector<std::int64_t>& groups)
    : tasks(number_of_tasks) {
  if (grads.size() != tensors.size() * tasks)
    throw std::invalid_argument("grads must have " + std::to_string(tensors.size() * tasks) +
                                " entries, one per tensor and task, got " +
                                std::to_string(grads.size()));
  if (channel_dims.size() != groups.size())
    throw std::invalid_argument("out_channel_dims and groups must have the same length, got " +
                                std::to_string(channel_dims.size()) + " and " +
                                std::to_string(groups.size()));
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const std::optional<dlpack::Tensor> found = as_dlpack(tensors[t]);
    const dlpack::Tensor tensor = found.value_or(dlpack::Tensor{});
    if (t == 0)
      device = tensor.device;
    const bool described = found && t < groups.size();
    if (described)
      check_layout(tensor.shape, tensor.dimensions, channel_dims[t], groups[t]);
    const std::optional<ChannelLayout> layout =
        find_channel_layout(tensor.shape, tensor.strides, tensor.dimensions,
                            described ? channel_dims[t] : 0, described ? groups[t] : 1);
    types.push_back(type_of(tensor));
    if (!found || types.back() == kUnknownType || !same_device(tensor.device, device) || !layout ||
        !is_aligned(tensor))
      unfit.push_back(t);
    layouts.push_back(layout.value_or(ChannelLayout{}));
    sizes.push_back(elements(tensor));
    kernel_sizes.push_back(elements(tensor, 2));
    outputs.emplace_back(address_of(tensor));
    for (std::size_t i = t * tasks; i < (t + 1) * tasks; ++i) {
      const bool absent = grads[i].is_none();
      const std::optional<dlpack::Tensor> gradient = absent ? std::nullopt : as_dlpack(grads[i]);
      const bool fits = gradient && has_layout_of(*gradient, tensor);
      gradients.push_back(fits ? address_of(*gradient) : nullptr);
      if (!fits && !absent)
        misfits.push_back(i);
    }
  }
}

void Operands::write_table(Address table, std::size_t width, std::size_t aligned,
                           std::size_t layers, bool whole_rows) const {
  constexpr std::uintptr_t kVector = 16;
  const std::size_t first_gradient = width - tasks;
  for (std::size_t t = 0; t < types.size(); ++t) {
    auto* const row = static_cast<std::uintptr_t*>(table) + t * width;
    row[0] = outputs[t].number;
    std::transform(&gradients[t * tasks], &gradients[t * tasks] + tasks, row + first_gradient,
                   [](const void* gradient) { return Address(gradient).number; });
    row[aligned] = 0;
    std::uintptr_t together = std::accumulate(row, row + width, std::uintptr_t{0}, std::bit_or<>());
    if (whole_rows) {
      const ChannelLayout& layout = layouts[t];
      const std::int64_t run = t < layers ? layout.inner : sizes[t];
      together |= run * cs_kernels::item_size(type(t)) | (t < layers && layout.outer != 1 ? 1 : 0);
    }
    row[aligned] = together % kVector == 0 ? 1 : 0;
  }
}

py::bytes Operands::signature() const {
  std::vector<std::int64_t> numbers;
  numbers.reserve(types.size() * 7);
  for (std::size_t t = 0; t < types.size(); ++t) {
    const auto& [groups, outer, channels, inner] = layouts[t];
    numbers.insert(numbers.end(),
                   {types[t], sizes[t], kernel_sizes[t], groups, outer, channels, inner});
  }
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::int64_t)};
}

} // namespace cs_kernels_python

void define_operands(py::module_& module) {
  using namespace cs_kernels_python;
  define(
      module, "channel_layout",
      [](const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides,
         std::int64_t out_channel_dim, std::int64_t groups) {
        if (shape.size() != strides.size())
          throw std::invalid_argument("shape and strides must have the same length");
        const auto dimensions = static_cast<int>(shape.size());
        check_layout(shape.data(), dimensions, out_channel_dim, groups);
        return find_channel_layout(shape.data(), strides.data(), dimensions, out_channel_dim,
                                   groups);
      },
      "shape", "strides", "out_channel_dim", "groups");
  define(module, "misfits", &find_misfits, "tensors", "likes");
  py::class_<Operands> operands(module, "Operands");
  operands
      .def(py::init<const py::list&, const py::list&, std::int32_t,
                    const std::vector<std::int64_t>&, const std::vector<std::int64_t>&>(),
           py::arg("outputs"), py::arg("grads"), py::arg("tasks"), py::arg("out_channel_dims"),
           py::arg("groups"))
      .def_readonly("tasks", &Operands::tasks)
      .def_readonly("types", &Operands::types)
      .def_readonly("layouts", &Operands::layouts)
      .def_readonly("sizes", &Operands::sizes)
      .def_readonly("kernel_sizes", &Operands::kernel_sizes)
      .def_readonly("addresses", &Operands::outputs)
      .def_property_readonly("gradients",
                             [](const Operands& of) {
                               return std::vector<Address>(of.gradients.begin(),
                                                           of.gradients.end());
                             })
      .def_readonly("unfit", &Operands::unfit)
      .def_readonly("misfits", &Operands::misfits)
      .def("channels",
           [](const Operands& of, std::size_t tensor) { return of.layouts.at(tensor).rows(); });
  define(operands, "write_table", &Operands::write_table, "table", "width", "aligned", "layers",
         "whole_rows");
  operands.def("signature", &Operands::signature);
  define(
      operands, "set_gradient",
      [](Operands& of, std::size_t index, Address address) { of.gradients.at(index) = address; },
      "index", "address");
}
