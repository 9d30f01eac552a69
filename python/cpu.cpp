#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "cs_kernels/combine.h"
#include "cs_kernels/phase2.h"
#include "cs_kernels/random.h"
#include "cs_kernels/solvers.h"
#include "module.h"
#include "operands.h"

namespace py = pybind11;

namespace {

using namespace cs_kernels;
using namespace cs_kernels_python;

void check_length(const char* name, std::size_t length, std::size_t expected) {
  if (length != expected)
    throw std::invalid_argument(std::string(name) + " must have " + std::to_string(expected) +
                                " entries, got " + std::to_string(length));
}

void strengths(Address energy, Address gamma, Address variance, const std::vector<double>& epsilon,
               std::int64_t rows, bool normalize, Address strength) {
  cpu::strengths({energy, gamma, variance, epsilon.data(), rows,
                  static_cast<std::int32_t>(epsilon.size()), normalize, strength});
}

void task_priority(Address strength, std::int32_t tasks, std::int64_t rows, Address priority) {
  cpu::task_priority(strength, tasks, rows, priority);
}

void channel_energies(DataType type, const ChannelLayout& layout, Address weight, Address energy,
                      int threads) {
  cpu::channel_energies(type, layout, weight, energy, threads);
}

// The tensors of Phase 2. The first tensors have priorities and, unless `products` is null,
// products [layers, tasks, tasks].
std::vector<Phase2Tensor> phase2_tensors(const Operands& operands,
                                         const std::vector<Address>& priorities, Address products) {
  auto* const d = static_cast<double*>(products);
  std::vector<Phase2Tensor> tensors(operands.types.size());
  if (priorities.size() > tensors.size())
    check_length("priorities", priorities.size(), tensors.size());
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    tensors[t] = {operands.type(t), operands.layouts[t], &operands.gradients[t * operands.tasks],
                  operands.outputs[t]};
    if (t < priorities.size()) {
      tensors[t].priority = priorities[t];
      if (d != nullptr)
        tensors[t].products = d + t * operands.tasks * operands.tasks;
    }
  }
  return tensors;
}

// gamma and variance have [tasks, channels] per layer, concatenated; epsilon is [layers, tasks].
// The priorities are outputs if there are weights, else inputs. products: [layers, tasks, tasks],
// or null.
void phase2(const Operands& operands, const std::vector<Address>& priorities,
            const std::vector<Address>& weights, Address gamma, Address variance,
            const std::vector<double>& epsilon, Address products, int threads) {
  if (!weights.empty())
    check_length("weights", weights.size(), priorities.size());
  check_length("epsilon", epsilon.size(), weights.size() * operands.tasks);
  std::vector<Phase2Tensor> tensors = phase2_tensors(operands, priorities, products);
  std::int64_t first = 0; // entry of gamma and variance
  for (std::size_t t = 0; t < weights.size(); ++t) {
    tensors[t].weight = weights[t];
    tensors[t].gamma = static_cast<const double*>(gamma) + first;
    tensors[t].variance = static_cast<const double*>(variance) + first;
    tensors[t].epsilon = &epsilon[t * operands.tasks];
    first += tensors[t].layout.rows() * operands.tasks;
  }
  cpu::phase2({operands.tasks, operands.count(), tensors.data()}, threads);
}

// products: [layers, tasks, tasks].
template <void (*stage)(const Phase2Arguments&, int)>
void phase2_stage(const Operands& operands, const std::vector<Address>& priorities,
                  Address products, int threads) {
  const std::vector<Phase2Tensor> tensors = phase2_tensors(operands, priorities, products);
  stage({operands.tasks, operands.count(), tensors.data()}, threads);
}

// Without offsets, each tensor's indices continue after the previous tensor's.
std::vector<GradientTensor>
gradient_tensors(const Operands& operands, const std::vector<std::int64_t>& group_of,
                 const std::optional<std::vector<std::int64_t>>& offsets = std::nullopt) {
  std::vector<GradientTensor> tensors(operands.types.size());
  check_length("group_of", group_of.size(), tensors.size());
  if (offsets)
    check_length("offsets", offsets->size(), tensors.size());
  std::int64_t next = 0;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    tensors[t] = {operands.type(t),    operands.sizes[t], &operands.gradients[t * operands.tasks],
                  operands.outputs[t], group_of[t],       offsets ? (*offsets)[t] : next};
    next += operands.sizes[t];
  }
  return tensors;
}

void gramian(const Operands& operands, const std::vector<std::int64_t>& group_of,
             std::int64_t groups, Address out, int threads) {
  const auto tensors = gradient_tensors(operands, group_of);
  cpu::gramian({operands.tasks, groups, operands.count(), tensors.data()}, out, threads);
}

void combine(const Operands& operands, const std::vector<std::int64_t>& group_of,
             std::int64_t groups, Address weights, std::int32_t protected_task, int threads) {
  const auto tensors = gradient_tensors(operands, group_of);
  cpu::combine({operands.tasks, groups, operands.count(), tensors.data()}, weights, protected_task,
               threads);
}

void drop_signs(const Operands& operands, const std::vector<double>& leaks, std::uint64_t state,
                Address counter, const std::optional<std::vector<std::int64_t>>& offsets,
                int threads) {
  check_length("leaks", leaks.size(), operands.tasks);
  const auto tensors =
      gradient_tensors(operands, std::vector<std::int64_t>(operands.types.size()), offsets);
  cpu::drop_signs({operands.tasks, 1, operands.count(), tensors.data()}, leaks.data(),
                  splitmix64(advanced(state, counter)), threads);
}

void solve(std::int32_t solver, Address gramians, std::int64_t count, std::int32_t tasks,
           Address weights, std::uint64_t option, Address counter, double rate,
           Address similarities) {
  // For a few small Gramians, the GIL is kept: solving takes less time than a thread switch.
  std::optional<py::gil_scoped_release> release;
  if (count * tasks > 64)
    release.emplace();
  cpu::solve({static_cast<Solver>(solver), gramians, count, tasks, weights, option, counter, rate,
              similarities});
}

} // namespace

void define_cpu(py::module_& module) {
  module.attr("cpu_instruction_set") = cpu::instruction_set();
#ifdef _OPENMP
  module.attr("openmp") = true;
#else
  module.attr("openmp") = false;
#endif
  define(module, "strengths", &strengths, "energy", "gamma", "variance", "epsilon", "rows",
         "normalize", "strength");
  define(module, "task_priority", &task_priority, "strength", "tasks", "rows", "priority");
  define(module, "solve", &solve, "solver", "gramians", "count", "tasks", "weights", "option",
         "counter", "rate", "similarities");
  const auto define_parallel = [&](const char* name, auto* function, const auto*... names) {
    define<py::call_guard<py::gil_scoped_release>>(module, name, function, names..., "threads");
  };
  define_parallel("channel_energies", &channel_energies, "type", "layout", "weight", "energy");
  define_parallel("phase2", &phase2, "operands", "priorities", "weights", "gamma", "variance",
                  "epsilon", "products");
  define_parallel("phase2_products", &phase2_stage<cpu::phase2_products>, "operands", "priorities",
                  "products");
  define_parallel("phase2_apply", &phase2_stage<cpu::phase2_apply>, "operands", "priorities",
                  "products");
  define_parallel("gramian", &gramian, "operands", "group_of", "groups", "out");
  define_parallel("combine", &combine, "operands", "group_of", "groups", "weights",
                  "protected_task");
  define_parallel("drop_signs", &drop_signs, "operands", "leaks", "state", "counter", "offsets");
}
