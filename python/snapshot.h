// The values of dictionaries, such as a module's buffers, and copies of those that are tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dlpack.h"

namespace cs_kernels_python {

class Snapshot {
public:
  // copies: for each entry of the dictionaries, in order, the dense tensor in this processor's
  // memory to which `take` copies it, or None.
  Snapshot(const pybind11::list& dictionaries, const pybind11::list& copies);

  // Copies the entries, if all are the same objects as at first, with the same memory and layout.
  bool take();

private:
  struct Entry {
    pybind11::object key;
    pybind11::object value;
    bool is_tensor;
    dlpack::Tensor tensor; // of a value that is one; shape and strides are in dimensions_
    void* target;          // null: not copied
    std::size_t bytes;     // of the copy
    std::size_t first;     // in dimensions_
  };

  void prefetch(std::size_t n) const;
  bool is(const Entry& entry, PyObject* key, PyObject* value) const;

  std::vector<pybind11::dict> dictionaries_;
  std::vector<Entry> entries_;
  std::vector<std::int64_t> dimensions_; // shape, then strides, of each tensor
};

} // namespace cs_kernels_python
