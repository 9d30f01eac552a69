#include "snapshot.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "module.h"
#include "tensors.h"

namespace py = pybind11;

namespace cs_kernels_python {

Snapshot::Snapshot(const py::list& dictionaries, const py::list& copies) {
  const py::object type = py::module_::import("torch").attr("Tensor");
  for (const py::handle dictionary : dictionaries) {
    dictionaries_.push_back(py::cast<py::dict>(dictionary));
    for (const auto& [key, value] : dictionaries_.back()) {
      Entry entry{py::cast<py::object>(key),
                  py::cast<py::object>(value),
                  py::isinstance(value, type),
                  {},
                  nullptr,
                  0,
                  dimensions_.size()};
      if (const std::optional<dlpack::Tensor> tensor = as_dlpack(value)) {
        entry.tensor = *tensor;
        dimensions_.insert(dimensions_.end(), tensor->shape, tensor->shape + tensor->dimensions);
        dimensions_.insert(dimensions_.end(), tensor->strides,
                           tensor->strides + tensor->dimensions);
      }
      entries_.push_back(std::move(entry));
    }
  }
  if (copies.size() != entries_.size())
    throw std::invalid_argument("copies must have " + std::to_string(entries_.size()) +
                                " entries, one a value, got " + std::to_string(copies.size()));
  for (std::size_t i = 0; i < entries_.size(); ++i)
    if (const std::optional<dlpack::Tensor> copy = as_dlpack(copies[i])) {
      entries_[i].target = address_of(*copy);
      entries_[i].bytes = elements(*copy) * (copy->type.bits / 8);
    }
}

bool Snapshot::is(const Entry& entry, PyObject* key, PyObject* value) const {
  if (key != entry.key.ptr() || value != entry.value.ptr())
    return false;
  if (!entry.is_tensor)
    return true;
  const std::optional<dlpack::Tensor> tensor = as_dlpack(value);
  if (!tensor || address_of(*tensor) != address_of(entry.tensor))
    return false;
  dlpack::Tensor before = entry.tensor;
  before.shape = const_cast<std::int64_t*>(&dimensions_[entry.first]);
  before.strides = before.shape + before.dimensions;
  return has_layout_of(*tensor, before);
}

// What other work has left of the entries in the processor's caches is little: a step comes by
// once.
void Snapshot::prefetch(std::size_t n) const {
  if (n >= entries_.size())
    return;
  const Entry& entry = entries_[n];
  __builtin_prefetch(entry.value.ptr());
  __builtin_prefetch(entry.tensor.shape); // in the tensor's object
  __builtin_prefetch(address_of(entry.tensor));
}

bool Snapshot::take() {
  constexpr std::size_t kAhead = 16;
  std::size_t n = 0;
  for (const py::dict& dictionary : dictionaries_) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dictionary.ptr(), &position, &key, &value) != 0) {
      prefetch(n + kAhead);
      if (n == entries_.size() || !is(entries_[n], key, value))
        return false;
      ++n;
    }
  }
  if (n != entries_.size())
    return false;
  for (const Entry& entry : entries_)
    if (entry.target != nullptr)
      std::memcpy(entry.target, address_of(entry.tensor), entry.bytes);
  return true;
}

} // namespace cs_kernels_python

void define_snapshot(py::module_& module) {
  using namespace cs_kernels_python;
  py::class_<Snapshot>(module, "Snapshot")
      .def(py::init<const py::list&, const py::list&>(), py::arg("dictionaries"), py::arg("copies"))
      .def("take", &Snapshot::take);
}
