// cs_kernels._C.cuda: addresses into the structs of launches; a status into an exception. The
// shapes and types behind them are checked in cs_kernels/ops/gpu.
#include "cuda.h"

#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "cs_kernels/cuda.h"

namespace py = pybind11;

namespace {

using namespace cs_kernels_python;
using cs_kernels::cuda::Numbers;
using cs_kernels::cuda::Stream;

void check(cs_kernels::cuda::Status status, const char* what) {
  if (status != 0)
    throw std::runtime_error(std::string("CUDA cannot launch ") + what + ": " +
                             cs_kernels::cuda::status_message(status));
}

Numbers numbers(int type, Address address) {
  return {data_type(type), pointer<const void>(address)};
}

void phase2(int type, std::int32_t tasks, Address items, std::int64_t item_count, Address tensors,
            Address table, Address ticket, Address counters, Address energy, int gamma_type,
            Address gamma, int variance_type, Address variance, Address epsilon, Address products,
            Address factors, Address stream) {
  const cs_kernels::cuda::Phase2Launch launch{
      data_type(type),
      tasks,
      pointer<const cs_kernels::cuda::Item>(items),
      item_count,
      pointer<const cs_kernels::cuda::PlannedTensor>(tensors),
      pointer<const std::int64_t>(table),
      pointer<std::int32_t>(ticket),
      pointer<std::int32_t>(counters),
      pointer<double>(energy),
      numbers(gamma_type, gamma),
      numbers(variance_type, variance),
      pointer<const double>(epsilon),
      pointer<double>(products),
      pointer<double>(factors),
  };
  check(cs_kernels::cuda::phase2(launch, pointer<void>(stream)), "Phase 2");
}

void energies(int type, Address tensor, std::int64_t items, Address weight, bool aligned,
              Address energy, Address stream) {
  const cs_kernels::cuda::EnergyLaunch launch{
      data_type(type), pointer<const cs_kernels::cuda::PlannedTensor>(tensor),
      items,           pointer<const void>(weight),
      aligned,         pointer<double>(energy),
  };
  check(cs_kernels::cuda::energies(launch, pointer<void>(stream)), "energies");
}

void strengths(Address energy, int gamma_type, Address gamma, int variance_type, Address variance,
               Address epsilon, std::int64_t rows, std::int32_t tasks, bool normalize,
               Address strength, Address stream) {
  const cs_kernels::cuda::StrengthLaunch launch{
      pointer<const double>(energy),
      numbers(gamma_type, gamma),
      numbers(variance_type, variance),
      pointer<const double>(epsilon),
      rows,
      tasks,
      normalize,
      pointer<double>(strength),
  };
  check(cs_kernels::cuda::strengths(launch, pointer<void>(stream)), "strengths");
}

void task_priority(int type, Address strength, std::int32_t tasks, std::int64_t rows,
                   Address priority, Address stream) {
  check(cs_kernels::cuda::task_priority(numbers(type, strength), tasks, rows,
                                        pointer<std::int64_t>(priority), pointer<void>(stream)),
        "priorities");
}

cs_kernels::cuda::GradientLaunch gradients(int type, std::int32_t tasks, Address items,
                                           std::int64_t item_count, Address tensors,
                                           Address table) {
  return {data_type(type),
          tasks,
          pointer<const cs_kernels::cuda::GradientItem>(items),
          item_count,
          pointer<const cs_kernels::cuda::PlannedGradient>(tensors),
          pointer<const std::int64_t>(table)};
}

void gramian(int type, std::int32_t tasks, Address items, std::int64_t item_count, Address tensors,
             Address table, Address counters, Address products, Address out, Address stream) {
  check(cs_kernels::cuda::gramian(gradients(type, tasks, items, item_count, tensors, table),
                                  pointer<std::int32_t>(counters), pointer<double>(products),
                                  pointer<double>(out), pointer<void>(stream)),
        "the Gramian");
}

void combine(int type, std::int32_t tasks, Address items, std::int64_t item_count, Address tensors,
             Address table, Address weights, Address stream) {
  check(cs_kernels::cuda::combine(gradients(type, tasks, items, item_count, tensors, table),
                                  pointer<const double>(weights), pointer<void>(stream)),
        "the weighted sum");
}

void drop_signs(int type, std::int32_t tasks, Address items, std::int64_t item_count,
                Address tensors, Address table, Address leaks, Address keys, Address stream) {
  check(cs_kernels::cuda::drop_signs(gradients(type, tasks, items, item_count, tensors, table),
                                     pointer<const double>(leaks),
                                     pointer<const std::uint64_t>(keys), pointer<void>(stream)),
        "sign dropping");
}

std::optional<std::string> unavailable() {
  const cs_kernels::cuda::Status status = cs_kernels::cuda::available();
  if (status == 0)
    return std::nullopt;
  return std::string("the CUDA kernels of this build do not load: ") +
         cs_kernels::cuda::status_message(status);
}

// In the order of cs_kernels::cuda::Method.
constexpr std::array<const char*, 7> kMethods = {"pcgrad",   "cagrad", "mgda",  "aligned_mtl",
                                                 "nash_mtl", "imtl_g", "upgrad"};

void solve(const std::string& method, Address gramians, std::int64_t count, std::int32_t tasks,
           Address weights, Address argument, std::int32_t scale, Address stream) {
  std::size_t number = 0;
  while (number < kMethods.size() && method != kMethods[number])
    ++number;
  if (number == kMethods.size())
    throw std::invalid_argument("method must be one that has a solver, got " + method);
  const cs_kernels::cuda::SolverLaunch launch{
      static_cast<cs_kernels::cuda::Method>(number),
      pointer<const double>(gramians),
      count,
      tasks,
      pointer<double>(weights),
      pointer<const void>(argument),
      scale,
  };
  check(cs_kernels::cuda::solve(launch, pointer<void>(stream)), "a solver");
}

} // namespace

void define_cuda(py::module_ module) {
  module.doc() = "The kernels of cs_kernels on a GPU, on addresses there.";
  module.def("unavailable", &unavailable, "Why the current device cannot run them, if it cannot.");
  module.def(
      "phase2_tile",
      [](int type, std::int32_t tasks) {
        return cs_kernels::cuda::phase2_tile(data_type(type), tasks);
      },
      py::arg("type"), py::arg("tasks"));
  module.def(
      "gradient_tile", [](int type) { return cs_kernels::cuda::gradient_tile(data_type(type)); },
      py::arg("type"));
  module.def(
      "shared_memory",
      [](std::int32_t tasks) {
        return std::map<std::string, std::size_t>{
            {"phase2", cs_kernels::cuda::phase2_memory(tasks)},
            {"gramian", cs_kernels::cuda::gramian_memory(tasks)},
            {"solver", cs_kernels::cuda::solver_memory(tasks)},
        };
      },
      py::arg("tasks"), "Bytes of shared memory of a block, by kernel.");
  module.def("phase2", &phase2, py::arg("type"), py::arg("tasks"), py::arg("items"),
             py::arg("item_count"), py::arg("tensors"), py::arg("table"), py::arg("ticket"),
             py::arg("counters"), py::arg("energy"), py::arg("gamma_type"), py::arg("gamma"),
             py::arg("variance_type"), py::arg("variance"), py::arg("epsilon"), py::arg("products"),
             py::arg("factors"), py::arg("stream"));
  module.def("energies", &energies, py::arg("type"), py::arg("tensor"), py::arg("items"),
             py::arg("weight"), py::arg("aligned"), py::arg("energy"), py::arg("stream"));
  module.def("strengths", &strengths, py::arg("energy"), py::arg("gamma_type"), py::arg("gamma"),
             py::arg("variance_type"), py::arg("variance"), py::arg("epsilon"), py::arg("rows"),
             py::arg("tasks"), py::arg("normalize"), py::arg("strength"), py::arg("stream"));
  module.def("task_priority", &task_priority, py::arg("type"), py::arg("strength"),
             py::arg("tasks"), py::arg("rows"), py::arg("priority"), py::arg("stream"));
  module.def("gramian", &gramian, py::arg("type"), py::arg("tasks"), py::arg("items"),
             py::arg("item_count"), py::arg("tensors"), py::arg("table"), py::arg("counters"),
             py::arg("products"), py::arg("out"), py::arg("stream"));
  module.def("combine", &combine, py::arg("type"), py::arg("tasks"), py::arg("items"),
             py::arg("item_count"), py::arg("tensors"), py::arg("table"), py::arg("weights"),
             py::arg("stream"));
  module.def("drop_signs", &drop_signs, py::arg("type"), py::arg("tasks"), py::arg("items"),
             py::arg("item_count"), py::arg("tensors"), py::arg("table"), py::arg("leaks"),
             py::arg("keys"), py::arg("stream"));
  module.def("solve", &solve, py::arg("method"), py::arg("gramians"), py::arg("count"),
             py::arg("tasks"), py::arg("weights"), py::arg("argument"), py::arg("scale"),
             py::arg("stream"));
}
