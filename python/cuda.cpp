// cs_kernels._C.cuda: builds the launches' structs and turns an error status into an exception.
// cs_kernels/ops/gpu checks shapes and types.
#include "module.h"

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
#include "cs_kernels/cuda/sketch.h"
#include "cs_kernels/cuda/solvers.h"

namespace py = pybind11;

namespace {

using namespace cs_kernels;
using namespace cs_kernels_python;
using cuda::Status;

void check(Status status, const char* what) {
  if (status != 0)
    throw std::runtime_error(std::string("CUDA cannot launch ") + what + ": " +
                             cuda::status_message(status));
}

// The name and type of a launch's field.
template <class T> struct Named {
  const char* name;
};
using Type = Named<DataType>;
using Pointer = Named<Address>;
using Int32 = Named<std::int32_t>;
using Int64 = Named<std::int64_t>;
using Word = Named<std::uint64_t>;
using Flag = Named<bool>;

// Defines a launch function, whose arguments are the fields of the launch's struct and of its
// nested structs, in order.
template <class Launch, class... Fields>
void define_launch(py::module_& module, const char* name, const char* what,
                   Status (*launch)(const Launch&, cuda::Stream), Named<Fields>... fields) {
  define(
      module, name,
      [=](Fields... values, Address stream) { check(launch({values...}, stream), what); },
      fields.name..., "stream");
}

std::optional<std::string> unavailable() {
  const Status status = cuda::available();
  if (status == 0)
    return std::nullopt;
  return std::string("the CUDA kernels of this build do not load: ") + cuda::status_message(status);
}

void solve(std::int32_t solver, Address gramians, std::int64_t count, std::int32_t tasks,
           Address weights, std::uint64_t option, Address counter, double rate,
           Address similarities, Address stream) {
  check(cuda::solve({static_cast<Solver>(solver), gramians, count, tasks, weights, option, counter,
                     rate, similarities},
                    stream),
        "a solver");
}

// Offsets of fields in a row of 64-bit integers, by name.
using Fields = std::map<std::string, std::size_t>;
#define CS_FIELD(Struct, field) {#field, offsetof(Struct, field) / sizeof(std::int64_t)}

template <class Number> Fields::value_type entry(const char* name, Number number) {
  return {name, static_cast<std::size_t>(number)};
}

// The fields of the plan's tables, by the tables' names in Python.
std::map<std::string, Fields> tables() {
  using namespace cuda;
  using Tensor = PlannedTensor;
  using Gradient = PlannedGradient;
  static_assert(sizeof(Tensor) == 16 * sizeof(std::int64_t), "a field is missing below");
  static_assert(sizeof(Gradient) == 6 * sizeof(std::int64_t), "a field is missing below");
  return {{"TensorField",
           {CS_FIELD(Tensor, rows), CS_FIELD(Tensor, length), CS_FIELD(Tensor, channels),
            CS_FIELD(Tensor, inner), CS_FIELD(Tensor, segment), CS_FIELD(Tensor, row_segments),
            CS_FIELD(Tensor, size), CS_FIELD(Tensor, kernel_size), CS_FIELD(Tensor, layer),
            CS_FIELD(Tensor, first_row), CS_FIELD(Tensor, first_sum), CS_FIELD(Tensor, sum_items),
            CS_FIELD(Tensor, tiles), CS_FIELD(Tensor, energy_items), CS_FIELD(Tensor, energy_rows),
            CS_FIELD(Tensor, project_sums)}},
          {"CallField",
           {entry("update", kUpdate), entry("weight", kWeight), entry("priority", kPriority),
            entry("aligned", kAligned), entry("gradients", kGradients)}},
          {"Counter",
           {entry("energies_done", kEnergiesDone), entry("priority_ready", kPriorityReady),
            entry("sums_done", kSumsDone), entry("coefficients_ready", kCoefficientsReady)}},
          {"ItemKind",
           {entry("energy", ItemKind::kEnergy), entry("sum", ItemKind::kSum),
            entry("project", ItemKind::kProject)}},
          {"GradientField",
           {CS_FIELD(Gradient, size), CS_FIELD(Gradient, group), CS_FIELD(Gradient, first_item),
            CS_FIELD(Gradient, group_items), CS_FIELD(Gradient, tiles),
            CS_FIELD(Gradient, first_index)}},
          {"GradientCallField",
           {entry("update", kGradientUpdate), entry("aligned", kGradientAligned),
            entry("gradients", kGradientGradients)}}};
}

Fields phase2_tiling(DataType type) {
  const auto tiling = cuda::phase2_tiling(type);
  return {entry("tile_segments", tiling.tile_segments),
          entry("unit", tiling.unit),
          entry("most_units", tiling.most_units),
          entry("energy_elements", tiling.energy_elements),
          entry("least_energy_rows", tiling.least_energy_rows),
          entry("least_items", tiling.least_items),
          entry("lag", tiling.lag),
          entry("project_sums", tiling.project_sums)};
}

// Elements per tile, and maximum tiles per item.
std::pair<std::int64_t, std::int64_t> gradient_tiling(DataType type) {
  const auto tiling = cuda::gradient_tiling(type);
  return {tiling.elements, tiling.most_tiles};
}

// Bytes of shared memory per block, by kernel.
Fields shared_memory(std::int32_t tasks) {
  return {entry("phase2", cuda::phase2_memory(tasks)),
          entry("gramian", cuda::gramian_memory(tasks)),
          entry("solver", cuda::solver_memory(tasks))};
}

} // namespace

void define_cuda(py::module_ module) {
  module.doc() = "GPU kernels of cs_kernels; arrays are passed as device addresses.";
  module.def("unavailable", &unavailable, "The reason why this device cannot run the kernels.");
  module.def("tables", &tables, "The field offsets of every table, by name.");
  define(module, "phase2_tiling", &phase2_tiling, "type");
  define(module, "gradient_tiling", &gradient_tiling, "type");
  define(module, "shared_memory", &shared_memory, "tasks");
  define_launch(module, "phase2", "Phase 2", &cuda::phase2, Type{"type"}, Int32{"tasks"},
                Pointer{"items"}, Int64{"item_count"}, Pointer{"tensors"}, Pointer{"table"},
                Pointer{"ticket"}, Pointer{"counters"}, Pointer{"energy"}, Type{"gamma_type"},
                Pointer{"gamma"}, Type{"variance_type"}, Pointer{"variance"}, Pointer{"epsilon"},
                Pointer{"item_products"}, Pointer{"products"}, Pointer{"coefficients"});
  define_launch(module, "energies", "energies", &cuda::energies, Type{"type"}, Pointer{"tensor"},
                Int64{"items"}, Pointer{"weight"}, Flag{"aligned"}, Pointer{"energy"});
  define_launch(module, "strengths", "strengths", &cuda::strengths, Pointer{"energy"},
                Type{"gamma_type"}, Pointer{"gamma"}, Type{"variance_type"}, Pointer{"variance"},
                Pointer{"epsilon"}, Int64{"rows"}, Int32{"tasks"}, Flag{"normalize"},
                Pointer{"strength"});
  define_launch(module, "task_priority", "priorities", &cuda::task_priority, Type{"type"},
                Pointer{"strength"}, Int32{"tasks"}, Int64{"rows"}, Pointer{"priority"});
  const auto define_on_gradients = [&](const char* name, const char* what, auto* launch,
                                       auto... fields) {
    define_launch(module, name, what, launch, Type{"type"}, Int32{"tasks"}, Pointer{"items"},
                  Int64{"item_count"}, Pointer{"tensors"}, Pointer{"table"}, fields...);
  };
  define_on_gradients("gramian", "the Gramian", &cuda::gramian, Pointer{"counters"},
                      Pointer{"products"}, Pointer{"out"});
  define_on_gradients("combine", "the weighted sum", &cuda::combine, Pointer{"weights"},
                      Int32{"protected_task"});
  define_on_gradients("drop_signs", "sign dropping", &cuda::drop_signs, Pointer{"leaks"},
                      Word{"state"}, Pointer{"counter"});
  define_launch(module, "sketch", "a sketch", &cuda::sketch, Type{"type"}, Pointer{"data"},
                Int64{"size"}, Int64{"index"}, Word{"key"}, Pointer{"sketch"}, Int64{"bins"},
                Pointer{"update"}, Pointer{"weight"}, Flag{"add"});
  define(module, "solve", &solve, "solver", "gramians", "count", "tasks", "weights", "option",
         "counter", "rate", "similarities", "stream");
}
