// Conversions of Python arguments.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "cs_kernels/phase2.h"

namespace cs_kernels_python {

using Address = std::uintptr_t;
using Layout = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

template <class T> T* pointer(Address address) { return reinterpret_cast<T*>(address); }

inline cs_kernels::DataType data_type(int number) {
  if (number < 0 || number >= cs_kernels::kDataTypes)
    throw std::invalid_argument("data type must be in [0, " +
                                std::to_string(cs_kernels::kDataTypes - 1) + "], got " +
                                std::to_string(number));
  return static_cast<cs_kernels::DataType>(number);
}

inline cs_kernels::ChannelLayout channel_layout(const Layout& layout) {
  const auto [groups, outer, channels, inner] = layout;
  return {groups, outer, channels, inner};
}

} // namespace cs_kernels_python
