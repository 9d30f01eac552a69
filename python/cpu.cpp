#include "cpu.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "cs_kernels/combine.h"
#include "cs_kernels/phase2.h"
#include "cs_kernels/solvers.h"
#include "operands.h"

namespace py = pybind11;

namespace {

using namespace cs_kernels_python;

void check_length(const char* name, std::size_t length, std::size_t expected) {
  if (length != expected)
    throw std::invalid_argument(std::string(name) + " must have " + std::to_string(expected) +
                                " entries, got " + std::to_string(length));
}

void strengths(Address energy, Address gamma, Address variance, const std::vector<double>& epsilon,
               std::int64_t rows, bool normalize, Address strength) {
  cs_kernels::cpu::strengths({pointer<const double>(energy), pointer<const double>(gamma),
                              pointer<const double>(variance), epsilon.data(), rows,
                              static_cast<std::int32_t>(epsilon.size()), normalize,
                              pointer<double>(strength)});
}

void task_priority(Address strength, std::int32_t tasks, std::int64_t rows, Address priority) {
  cs_kernels::cpu::task_priority(pointer<const double>(strength), tasks, rows,
                                 pointer<std::int64_t>(priority));
}

void channel_energies(int type, const Layout& layout, Address weight, Address energy, int threads) {
  cs_kernels::cpu::channel_energies(data_type(type), channel_layout(layout),
                                    pointer<const void>(weight), pointer<double>(energy), threads);
}

// The tensors of Phase 2; the first ones have a priority.
std::vector<cs_kernels::Phase2Tensor> phase2_tensors(const Operands& operands,
                                                     const std::vector<Address>& priorities) {
  if (priorities.size() > operands.count())
    check_length("priorities", priorities.size(), operands.count());
  std::vector<cs_kernels::Phase2Tensor> tensors(operands.count());
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    tensors[t].type = data_type(operands.types[t]);
    tensors[t].layout = operands.layouts[t];
    tensors[t].gradients = &operands.gradients[t * operands.tasks];
    tensors[t].update = operands.outputs[t];
    if (t < priorities.size())
      tensors[t].priority = pointer<std::int64_t>(priorities[t]);
  }
  return tensors;
}

cs_kernels::Phase2Arguments phase2_arguments(const Operands& operands,
                                             const std::vector<cs_kernels::Phase2Tensor>& tensors) {
  return {static_cast<std::int32_t>(operands.tasks), static_cast<std::int64_t>(tensors.size()),
          tensors.data()};
}

// gamma and variance hold [tasks, channels] of one layer after the other, epsilon is [layers,
// tasks]. Without weights the priority is given.
void phase2(const Operands& operands, const std::vector<Address>& priorities,
            const std::vector<Address>& weights, Address gamma, Address variance,
            const std::vector<double>& epsilon, int threads) {
  if (!weights.empty())
    check_length("weights", weights.size(), priorities.size());
  check_length("epsilon", epsilon.size(), weights.size() * operands.tasks);
  std::vector<cs_kernels::Phase2Tensor> tensors = phase2_tensors(operands, priorities);
  std::int64_t first = 0; // entry of gamma and variance
  for (std::size_t t = 0; t < weights.size(); ++t) {
    tensors[t].weight = pointer<const void>(weights[t]);
    tensors[t].gamma = pointer<const double>(gamma) + first;
    tensors[t].variance = pointer<const double>(variance) + first;
    tensors[t].epsilon = &epsilon[t * operands.tasks];
    first += tensors[t].layout.rows() * static_cast<std::int64_t>(operands.tasks);
  }
  const py::gil_scoped_release release;
  cs_kernels::cpu::phase2(phase2_arguments(operands, tensors), threads);
}

// products: [layers, tasks, tasks].
template <void (*stage)(const cs_kernels::Phase2Arguments&, int)>
void phase2_stage(const Operands& operands, const std::vector<Address>& priorities,
                  Address products, int threads) {
  std::vector<cs_kernels::Phase2Tensor> tensors = phase2_tensors(operands, priorities);
  for (std::size_t t = 0; t < priorities.size(); ++t)
    tensors[t].products = pointer<double>(products) + t * operands.tasks * operands.tasks;
  const py::gil_scoped_release release;
  stage(phase2_arguments(operands, tensors), threads);
}

std::vector<cs_kernels::GradientTensor>
gradient_tensors(const Operands& operands, const std::vector<std::int64_t>& group_of) {
  check_length("group_of", group_of.size(), operands.count());
  std::vector<cs_kernels::GradientTensor> tensors(operands.count());
  for (std::size_t t = 0; t < tensors.size(); ++t)
    tensors[t] = {data_type(operands.types[t]), operands.sizes[t],
                  &operands.gradients[t * operands.tasks], operands.outputs[t], group_of[t]};
  return tensors;
}

cs_kernels::GradientArguments
gradient_arguments(const Operands& operands, std::int64_t groups,
                   const std::vector<cs_kernels::GradientTensor>& tensors) {
  return {static_cast<std::int32_t>(operands.tasks), groups,
          static_cast<std::int64_t>(tensors.size()), tensors.data()};
}

void gramian(const Operands& operands, const std::vector<std::int64_t>& group_of,
             std::int64_t groups, Address out, int threads) {
  const auto tensors = gradient_tensors(operands, group_of);
  const py::gil_scoped_release release;
  cs_kernels::cpu::gramian(gradient_arguments(operands, groups, tensors), pointer<double>(out),
                           threads);
}

void combine(const Operands& operands, const std::vector<std::int64_t>& group_of,
             std::int64_t groups, Address weights, int threads) {
  const auto tensors = gradient_tensors(operands, group_of);
  const py::gil_scoped_release release;
  cs_kernels::cpu::combine(gradient_arguments(operands, groups, tensors),
                           pointer<const double>(weights), threads);
}

void drop_signs(const Operands& operands, const std::vector<double>& leaks, std::uint64_t key,
                int threads) {
  check_length("leaks", leaks.size(), operands.tasks);
  const auto tensors = gradient_tensors(operands, std::vector<std::int64_t>(operands.count(), 0));
  const py::gil_scoped_release release;
  cs_kernels::cpu::drop_signs(gradient_arguments(operands, 1, tensors), leaks.data(), key, threads);
}

void solve(std::int32_t solver, Address gramians, std::int64_t count, std::int32_t tasks,
           Address weights, std::uint64_t option) {
  // Few small problems take less time than another thread would get.
  std::optional<py::gil_scoped_release> release;
  if (count * tasks > 64)
    release.emplace();
  cs_kernels::cpu::solve({static_cast<cs_kernels::Solver>(solver), pointer<const double>(gramians),
                          count, tasks, pointer<double>(weights), option});
}

} // namespace

void define_cpu(py::module_& module) {
  module.attr("cpu_instruction_set") = cs_kernels::cpu::instruction_set();
  module.def("strengths", &strengths, py::arg("energy"), py::arg("gamma"), py::arg("variance"),
             py::arg("epsilon"), py::arg("rows"), py::arg("normalize"), py::arg("strength"));
  module.def("task_priority", &task_priority, py::arg("strength"), py::arg("tasks"),
             py::arg("rows"), py::arg("priority"));
  module.def("channel_energies", &channel_energies, py::arg("type"), py::arg("layout"),
             py::arg("weight"), py::arg("energy"), py::arg("threads"));
  module.def("phase2", &phase2, py::arg("operands"), py::arg("priorities"), py::arg("weights"),
             py::arg("gamma"), py::arg("variance"), py::arg("epsilon"), py::arg("threads"));
  module.def("phase2_products", &phase2_stage<cs_kernels::cpu::phase2_products>,
             py::arg("operands"), py::arg("priorities"), py::arg("products"), py::arg("threads"));
  module.def("phase2_apply", &phase2_stage<cs_kernels::cpu::phase2_apply>, py::arg("operands"),
             py::arg("priorities"), py::arg("products"), py::arg("threads"));
  module.def("gramian", &gramian, py::arg("operands"), py::arg("group_of"), py::arg("groups"),
             py::arg("out"), py::arg("threads"));
  module.def("combine", &combine, py::arg("operands"), py::arg("group_of"), py::arg("groups"),
             py::arg("weights"), py::arg("threads"));
  module.def("drop_signs", &drop_signs, py::arg("operands"), py::arg("leaks"), py::arg("key"),
             py::arg("threads"));
  module.def("solve", &solve, py::arg("solver"), py::arg("gramians"), py::arg("count"),
             py::arg("tasks"), py::arg("weights"), py::arg("option"));
}
