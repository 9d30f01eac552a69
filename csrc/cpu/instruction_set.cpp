#include <cstdlib>
#include <stdexcept>
#include <string>

#include "row_kernels.h"

namespace cs_kernels::cpu {

extern const InstructionSet baseline;
#ifdef CS_X86_64
extern const InstructionSet avx2;
extern const InstructionSet avx512;
#endif

namespace {

const InstructionSet& select() {
  const char* variable = std::getenv("CS_KERNELS_CPU_ISA");
  const std::string wanted = variable == nullptr ? "" : variable;
  if (!wanted.empty() && wanted != "avx512" && wanted != "avx2" && wanted != "baseline")
    throw std::invalid_argument("CS_KERNELS_CPU_ISA must be avx512, avx2 or baseline, got '" +
                                wanted + "'");
  [[maybe_unused]] const auto allowed = [&wanted](const char* name) {
    return wanted.empty() || wanted == name;
  };
#ifdef CS_X86_64
  __builtin_cpu_init();
  if (allowed("avx512") && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return avx512;
  if ((allowed("avx2") || allowed("avx512")) && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma"))
    return avx2;
#endif
  return baseline;
}

} // namespace

const InstructionSet& selected_instruction_set() {
  static const InstructionSet& selected = select();
  return selected;
}

const char* instruction_set() { return selected_instruction_set().name; }

} // namespace cs_kernels::cpu
