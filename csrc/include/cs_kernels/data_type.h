#pragma once

#include <array>
#include <cstdint>

namespace cs_kernels {

enum class DataType : std::int32_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

// torch's names, by DataType.
inline constexpr std::array kDataTypeNames{"float32", "float64", "bfloat16", "float16"};
constexpr int kDataTypes = kDataTypeNames.size();

constexpr std::int64_t item_size(DataType type) {
  return type == DataType::kFloat64 ? 8 : type == DataType::kFloat32 ? 4 : 2;
}

} // namespace cs_kernels
