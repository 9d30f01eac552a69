// cs_kernels._C.cuda: builds the structs of launches and turns a status into an exception.
// cs_kernels/ops/gpu checks shapes and types.
#include "cuda.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "cs_kernels/cuda/combine.h"
#include "cs_kernels/cuda/phase2.h"
#include "cs_kernels/cuda/solvers.h"

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
            Address gamma, int variance_type, Address variance, Address epsilon,
            Address item_products, Address products, Address coefficients, Address stream) {
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
      pointer<double>(item_products),
      pointer<double>(products),
      pointer<double>(coefficients),
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

void solve(std::int32_t solver, Address gramians, std::int64_t count, std::int32_t tasks,
           Address weights, std::uint64_t option, Address stream) {
  check(cs_kernels::cuda::solve({static_cast<cs_kernels::Solver>(solver),
                                 pointer<const double>(gramians), count, tasks,
                                 pointer<double>(weights), option},
                                pointer<void>(stream)),
        "a solver");
}

// Offsets of fields in a row of 64-bit integers, by name.
using Fields = std::map<std::string, std::size_t>;
#define CS_FIELD(Struct, field) {#field, offsetof(Struct, field) / sizeof(std::int64_t)}

Fields tensor_fields() {
  using Tensor = cs_kernels::cuda::PlannedTensor;
  const Fields fields{
      CS_FIELD(Tensor, rows),         CS_FIELD(Tensor, length),       CS_FIELD(Tensor, channels),
      CS_FIELD(Tensor, inner),        CS_FIELD(Tensor, row_segments), CS_FIELD(Tensor, size),
      CS_FIELD(Tensor, kernel_size),  CS_FIELD(Tensor, layer),        CS_FIELD(Tensor, first_row),
      CS_FIELD(Tensor, first_sum),    CS_FIELD(Tensor, sum_items),    CS_FIELD(Tensor, tiles),
      CS_FIELD(Tensor, energy_items), CS_FIELD(Tensor, energy_rows)};
  static_assert(sizeof(Tensor) == 14 * sizeof(std::int64_t), "a field is missing above");
  return fields;
}

Fields gradient_fields() {
  using Tensor = cs_kernels::cuda::PlannedGradient;
  const Fields fields{CS_FIELD(Tensor, size),       CS_FIELD(Tensor, group),
                      CS_FIELD(Tensor, first_item), CS_FIELD(Tensor, group_items),
                      CS_FIELD(Tensor, tiles),      CS_FIELD(Tensor, first_index)};
  static_assert(sizeof(Tensor) == 6 * sizeof(std::int64_t), "a field is missing above");
  return fields;
}

// The tables of the plan, by their names in Python.
std::map<std::string, Fields> tables() {
  using namespace cs_kernels::cuda;
  return {{"TensorField", tensor_fields()},
          {"CallField",
           {{"update", kUpdate},
            {"weight", kWeight},
            {"priority", kPriority},
            {"aligned", kAligned},
            {"gradients", kGradients}}},
          {"Counter",
           {{"energies_done", kEnergiesDone},
            {"priority_ready", kPriorityReady},
            {"sums_done", kSumsDone},
            {"coefficients_ready", kCoefficientsReady}}},
          {"ItemKind",
           {{"energy", static_cast<std::size_t>(ItemKind::kEnergy)},
            {"sum", static_cast<std::size_t>(ItemKind::kSum)},
            {"project", static_cast<std::size_t>(ItemKind::kProject)}}},
          {"GradientField", gradient_fields()},
          {"GradientCallField",
           {{"update", kGradientUpdate},
            {"aligned", kGradientAligned},
            {"gradients", kGradientGradients}}}};
}

std::map<std::string, std::int64_t> phase2_tiling(int type, std::int32_t tasks) {
  const auto tiling = cs_kernels::cuda::phase2_tiling(data_type(type), tasks);
  return {{"elements", tiling.elements},
          {"energy_elements", tiling.energy_elements},
          {"least_energy_rows", tiling.least_energy_rows},
          {"most_tiles", tiling.most_tiles},
          {"least_items", tiling.least_items},
          {"lag", tiling.lag}};
}

} // namespace

void define_cuda(py::module_ module) {
  module.doc() = "GPU kernels of cs_kernels, on device addresses.";
  module.def("unavailable", &unavailable, "Why the current device cannot run them, if it cannot.");
  module.def("tables", &tables, "Offsets of the fields of every table, by name.");
  module.def("phase2_tiling", &phase2_tiling, py::arg("type"), py::arg("tasks"));
  module.def(
      "gradient_tiling",
      [](int type) {
        const auto tiling = cs_kernels::cuda::gradient_tiling(data_type(type));
        return std::make_pair(tiling.elements, tiling.most_tiles);
      },
      py::arg("type"), "Elements of a tile, and tiles of an item of the Gramian.");
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
             py::arg("variance_type"), py::arg("variance"), py::arg("epsilon"),
             py::arg("item_products"), py::arg("products"), py::arg("coefficients"),
             py::arg("stream"));
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
  module.def("solve", &solve, py::arg("solver"), py::arg("gramians"), py::arg("count"),
             py::arg("tasks"), py::arg("weights"), py::arg("option"), py::arg("stream"));
}
