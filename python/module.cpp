// cs_kernels._C. Python passes addresses and sizes; cs_kernels/ops checks shapes, types and
// devices.
#include "module.h"

#include <pybind11/stl.h>

#include <map>
#include <string>

#include "cs_kernels/combine.h"
#include "cs_kernels/data_type.h"
#include "cs_kernels/solve.h"

// The module has no global state that changes after the import, so calls need no GIL. One thread at
// a time uses a SketchPass.
PYBIND11_MODULE(_C, module, pybind11::mod_gil_not_used()) {
  namespace solvers = cs_kernels::solvers;
  module.doc() = "The compiled kernels of cs_kernels; arrays are passed as addresses.";
  module.attr("max_tasks") = cs_kernels::kMaxTasks;
  module.attr("data_types") = cs_kernels::kDataTypeNames;
  module.attr("solvers") = cs_kernels::kSolverNames;
  module.attr("tolerances") = std::map<std::string, double>{
      {"ridge", solvers::kRidge},        {"nash_ridge", solvers::kNashRidge},
      {"nash_stop", solvers::kNashStop}, {"nash_full", solvers::kNashFull},
      {"slope", solvers::kSlope},        {"stationary", solvers::kStationary},
      {"zero_sum", solvers::kZeroSum},   {"epsilon", solvers::kEpsilon},
      {"no_cosine", solvers::kNoCosine}, {"fair_stop", solvers::kFairStop},
      {"fair_full", solvers::kFairFull}, {"fair_least", solvers::kFairLeast},
      {"fair_most", solvers::kFairMost}, {"most_similar", solvers::kMostSimilar},
      {"vanished", solvers::kVanished}};
  define_operands(module);
  define_cpu(module);
  define_sketch(module);
#ifdef CS_KERNELS_CUDA_ARCHITECTURES
  define_cuda(module.def_submodule("cuda"));
  module.attr("cuda_architectures") = CS_KERNELS_CUDA_ARCHITECTURES;
#else
  module.attr("without_cuda") = CS_KERNELS_WITHOUT_CUDA;
#endif
}
