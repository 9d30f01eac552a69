#include <cstdlib>
#include <cstring>

#include "row_kernels.h"

namespace cs_kernels::cpu {

extern const InstructionSet baseline;
#ifdef CS_X86_64
extern const InstructionSet avx2;
extern const InstructionSet avx512;
#endif

namespace {

const InstructionSet& select() {
  const char* wanted = std::getenv("CS_KERNELS_CPU_ISA");
  [[maybe_unused]] const auto allowed = [wanted](const char* name) {
    return wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, name) == 0;
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
