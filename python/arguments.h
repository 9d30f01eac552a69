// Conversions of Python arguments, and the definition of functions that take them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "cs_kernels/phase2.h"

namespace cs_kernels_python {

// An address: an int in Python; in C++, it converts to any pointer.
struct Address {
  explicit Address(const void* pointer = nullptr)
      : number(reinterpret_cast<std::uintptr_t>(pointer)) {}
  // NOLINTNEXTLINE(misc-explicit-constructor): it initializes fields of many types
  template <class T> operator T*() const { return reinterpret_cast<T*>(number); }

  std::uintptr_t number;
};

inline std::uintptr_t to_python(Address address) { return address.number; }
inline Address from_python(std::uintptr_t number) {
  return Address(reinterpret_cast<const void*>(number));
}

inline int to_python(cs_kernels::DataType type) { return static_cast<int>(type); }
inline cs_kernels::DataType from_python(int number) {
  if (number < 0 || number >= cs_kernels::kDataTypes)
    throw std::invalid_argument("data type must be in [0, " +
                                std::to_string(cs_kernels::kDataTypes - 1) + "], got " +
                                std::to_string(number));
  return static_cast<cs_kernels::DataType>(number);
}

using LayoutTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
inline LayoutTuple to_python(const cs_kernels::ChannelLayout& layout) {
  return {layout.groups, layout.outer, layout.channels, layout.inner};
}
inline cs_kernels::ChannelLayout from_python(const LayoutTuple& layout) {
  const auto [groups, outer, channels, inner] = layout;
  return {groups, outer, channels, inner};
}

// Defines a function or a method with named arguments. `Extras` are call guards.
template <class... Extras, class Scope, class Function, class... Names>
void define(Scope& scope, const char* name, const Function& function, const Names*... names) {
  scope.def(name, function, pybind11::arg(names)..., Extras()...);
}

} // namespace cs_kernels_python

namespace pybind11::detail {

// Converts T to Python with to_python(), and back with from_python().
template <class T> struct ShownAs {
  using Shown = decltype(cs_kernels_python::to_python(T{}));
  PYBIND11_TYPE_CASTER(T, make_caster<Shown>::name);

  bool load(handle source, bool convert) {
    make_caster<Shown> shown;
    if (!shown.load(source, convert))
      return false;
    value = cs_kernels_python::from_python(cast_op<Shown>(shown));
    return true;
  }
  static handle cast(const T& value, return_value_policy policy, handle parent) {
    return make_caster<Shown>::cast(cs_kernels_python::to_python(value), policy, parent);
  }
};

template <> struct type_caster<cs_kernels_python::Address> : ShownAs<cs_kernels_python::Address> {};
template <> struct type_caster<cs_kernels::DataType> : ShownAs<cs_kernels::DataType> {};
template <> struct type_caster<cs_kernels::ChannelLayout> : ShownAs<cs_kernels::ChannelLayout> {};

} // namespace pybind11::detail
