// From what Python gives.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cs_kernels/data_type.h"

namespace cs_kernels_python {

using Address = std::uintptr_t;

template <class T> T* pointer(Address address) { return reinterpret_cast<T*>(address); }

inline cs_kernels::DataType data_type(int code) {
  if (code < 0 || code > 3)
    throw std::invalid_argument("data type must be in [0, 3], got " + std::to_string(code));
  return static_cast<cs_kernels::DataType>(code);
}

} // namespace cs_kernels_python
