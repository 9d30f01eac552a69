// cs_kernels._C. Python passes addresses and sizes; cs_kernels/ops checks shapes, types and
// devices.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "cpu.h"
#include "cs_kernels/combine.h"
#include "cs_kernels/data_type.h"
#include "cs_kernels/solve.h"
#include "operands.h"
#ifdef CS_KERNELS_CUDA
#include "cuda.h"
#endif

PYBIND11_MODULE(_C, module) {
  namespace solvers = cs_kernels::solvers;
  module.doc() = "The compiled kernels of cs_kernels, on addresses.";
  module.attr("max_tasks") = cs_kernels::kMaxTasks;
  module.attr("data_types") = std::vector<std::string>(std::begin(cs_kernels::kDataTypeNames),
                                                       std::end(cs_kernels::kDataTypeNames));
  module.attr("solvers") = std::vector<std::string>(std::begin(cs_kernels::kSolverNames),
                                                    std::end(cs_kernels::kSolverNames));
  module.attr("tolerances") = std::map<std::string, double>{
      {"ridge", solvers::kRidge},           {"nash_ridge", solvers::kNashRidge},
      {"nash_stop", solvers::kNashStop},    {"slope", solvers::kSlope},
      {"stationary", solvers::kStationary}, {"zero_sum", solvers::kZeroSum},
      {"epsilon", solvers::kEpsilon}};
  module.def("random_key", &cs_kernels::random_key, pybind11::arg("seed"), pybind11::arg("step"));
  cs_kernels_python::define_operands(module);
  define_cpu(module);
#ifdef CS_KERNELS_CUDA
  define_cuda(module.def_submodule("cuda"));
#endif
}
