// The part of DLPack's exchange API (version 1) that reads a tensor in place, without torch's
// headers: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace dlpack {

constexpr std::uint32_t kMajorVersion = 1;
constexpr const char* kTypeAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsuleName = "dlpack_exchange_api";

// Type codes.
constexpr std::uint8_t kFloat = 2;
constexpr std::uint8_t kBfloat = 4;

struct Device {
  std::int32_t type;
  std::int32_t index;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

// The exporting tensor owns the arrays.
struct Tensor {
  void* data;
  Device device;
  std::int32_t dimensions;
  DataType type;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct ExchangeApi {
  std::uint32_t major_version;
  std::uint32_t minor_version;
  const ExchangeApi* previous;
  void (*allocate)();
  void (*managed_from_object)();
  void (*managed_to_object)();
  // Returns 0, or -1 with a Python exception set.
  int (*tensor_from_object)(void* object, Tensor* out);
  void (*current_stream)();
};

} // namespace dlpack
