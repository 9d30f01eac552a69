// cs_kernels._C: addresses and sizes from Python into the arguments structures. The shapes, types
// and devices behind them are checked in cs_kernels/ops/native.py; here, only the list lengths.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "cs_kernels/gradients.h"
#include "cs_kernels/phase2.h"
#include "cs_kernels/random.h"
#include "cs_kernels/weights.h"
#include "operands.h"
#ifdef CS_KERNELS_CUDA
#include "cuda.h"
#endif

namespace py = pybind11;

namespace {

using cs_kernels::ChannelLayout;

using namespace cs_kernels_python;
using Layout = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

ChannelLayout channel_layout(const Layout& layout) {
  const auto [groups, outer, channels, inner] = layout;
  return {groups, outer, channels, inner};
}

void check_length(const char* name, std::size_t length, std::size_t expected) {
  if (length != expected)
    throw std::invalid_argument(std::string(name) + " must have " + std::to_string(expected) +
                                " entries, got " + std::to_string(length));
}

void connection_strength(int type, const Layout& layout, Address weight, std::int64_t kernel_size,
                         Address gamma, Address variance, const std::vector<double>& epsilon,
                         bool normalize, Address strength, int threads) {
  const cs_kernels::StrengthArguments arguments{data_type(type),
                                                channel_layout(layout),
                                                pointer<const void>(weight),
                                                kernel_size,
                                                pointer<const double>(gamma),
                                                pointer<const double>(variance),
                                                epsilon.data(),
                                                static_cast<std::int32_t>(epsilon.size()),
                                                normalize,
                                                pointer<double>(strength)};
  const py::gil_scoped_release release;
  cs_kernels::cpu::connection_strength(arguments, threads);
}

void task_priority(Address strength, std::int32_t tasks, std::int64_t rows, Address priority) {
  cs_kernels::cpu::task_priority(pointer<const double>(strength), tasks, rows,
                                 pointer<std::int64_t>(priority));
}

// Lists over tensors; the first ones have a priority. `gradients` is [tensors, tasks] and `epsilon`
// [layers, tasks]; `gamma` and `variance` hold [tasks, channels] of one layer after the other.
// Without weights the priority is given.
void phase2(std::int32_t tasks, const std::vector<int>& types, const std::vector<Layout>& layouts,
            const std::vector<Address>& updates, const std::vector<Address>& gradients,
            const std::vector<Address>& priorities, const std::vector<Address>& weights,
            Address gamma, Address variance, const std::vector<double>& epsilon, int threads) {
  const auto width = static_cast<std::size_t>(tasks);
  const std::size_t count = updates.size();
  check_length("types", types.size(), count);
  check_length("layouts", layouts.size(), count);
  check_length("gradients", gradients.size(), count * width);
  if (priorities.size() > count)
    check_length("priorities", priorities.size(), count);
  if (!weights.empty())
    check_length("weights", weights.size(), priorities.size());
  check_length("epsilon", epsilon.size(), weights.size() * width);

  std::vector<const void*> gradient_pointers;
  gradient_pointers.reserve(gradients.size());
  for (const Address address : gradients)
    gradient_pointers.push_back(pointer<const void>(address));

  std::vector<cs_kernels::Phase2Tensor> tensors(count);
  std::int64_t channels = 0; // of the layers before
  for (std::size_t t = 0; t < count; ++t) {
    cs_kernels::Phase2Tensor& tensor = tensors[t];
    tensor.type = data_type(types[t]);
    tensor.layout = channel_layout(layouts[t]);
    tensor.gradients = &gradient_pointers[t * width];
    tensor.update = pointer<void>(updates[t]);
    if (t < priorities.size())
      tensor.priority = pointer<std::int64_t>(priorities[t]);
    if (t < weights.size()) {
      tensor.weight = pointer<const void>(weights[t]);
      tensor.gamma = pointer<const double>(gamma) + channels * tasks;
      tensor.variance = pointer<const double>(variance) + channels * tasks;
      tensor.epsilon = &epsilon[t * width];
      channels += tensor.layout.rows();
    }
  }
  const py::gil_scoped_release release;
  cs_kernels::cpu::phase2({tasks, static_cast<std::int64_t>(count), tensors.data()}, threads);
}

// GradientArguments out of lists over tensors; `gradients` is [tensors, tasks].
class Gradients {
public:
  Gradients(std::int32_t tasks, std::int64_t groups, const std::vector<int>& types,
            const std::vector<std::int64_t>& sizes, const std::vector<Address>& gradients,
            const std::vector<Address>& updates, const std::vector<std::int64_t>& group_of)
      : tasks_(tasks), groups_(groups), tensors_(sizes.size()) {
    const auto width = static_cast<std::size_t>(tasks);
    check_length("types", types.size(), sizes.size());
    check_length("gradients", gradients.size(), sizes.size() * width);
    if (!updates.empty())
      check_length("updates", updates.size(), sizes.size());
    check_length("group_of", group_of.size(), sizes.size());
    pointers_.reserve(gradients.size());
    for (const Address address : gradients)
      pointers_.push_back(pointer<const void>(address));
    for (std::size_t t = 0; t < tensors_.size(); ++t)
      tensors_[t] = {data_type(types[t]), sizes[t], &pointers_[t * width],
                     updates.empty() ? nullptr : pointer<void>(updates[t]), group_of[t]};
  }

  cs_kernels::GradientArguments arguments() const {
    return {tasks_, groups_, static_cast<std::int64_t>(tensors_.size()), tensors_.data()};
  }

private:
  std::int32_t tasks_;
  std::int64_t groups_;
  std::vector<const void*> pointers_;
  std::vector<cs_kernels::GradientTensor> tensors_;
};

void gramian(std::int32_t tasks, std::int64_t groups, const std::vector<int>& types,
             const std::vector<std::int64_t>& sizes, const std::vector<Address>& gradients,
             const std::vector<std::int64_t>& group_of, Address out, int threads) {
  const Gradients all(tasks, groups, types, sizes, gradients, {}, group_of);
  const py::gil_scoped_release release;
  cs_kernels::cpu::gramian(all.arguments(), pointer<double>(out), threads);
}

void combine(std::int32_t tasks, std::int64_t groups, const std::vector<int>& types,
             const std::vector<std::int64_t>& sizes, const std::vector<Address>& gradients,
             const std::vector<std::int64_t>& group_of, const std::vector<Address>& updates,
             Address weights, int threads) {
  const Gradients all(tasks, groups, types, sizes, gradients, updates, group_of);
  const py::gil_scoped_release release;
  cs_kernels::cpu::combine(all.arguments(), pointer<const double>(weights), threads);
}

void drop_signs(std::int32_t tasks, const std::vector<int>& types,
                const std::vector<std::int64_t>& sizes, const std::vector<Address>& gradients,
                const std::vector<Address>& updates, const std::vector<double>& leaks,
                std::uint64_t seed, std::uint64_t step, int threads) {
  check_length("leaks", leaks.size(), static_cast<std::size_t>(tasks));
  const std::vector<std::int64_t> group_of(sizes.size(), 0);
  const Gradients all(tasks, 1, types, sizes, gradients, updates, group_of);
  const py::gil_scoped_release release;
  cs_kernels::cpu::drop_signs(all.arguments(), leaks.data(), cs_kernels::random_key(seed, step),
                              threads);
}

// A solver of cs_kernels/weights.h with its options.
template <class... Options>
void define_solver(py::module_& module, const char* name,
                   void (*solver)(const cs_kernels::WeightArguments&, Options...)) {
  module.def(name, [solver](Address gramians, std::int64_t count, std::int32_t tasks,
                            Address weights, Options... options) {
    solver({pointer<const double>(gramians), count, tasks, pointer<double>(weights)}, options...);
  });
}

} // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The native kernels of cs_kernels, on addresses.";
  module.attr("cpu_instruction_set") = cs_kernels::cpu::instruction_set();
  module.def("connection_strength", &connection_strength, py::arg("type"), py::arg("layout"),
             py::arg("weight"), py::arg("kernel_size"), py::arg("gamma"), py::arg("variance"),
             py::arg("epsilon"), py::arg("normalize"), py::arg("strength"), py::arg("threads"));
  module.def("task_priority", &task_priority, py::arg("strength"), py::arg("tasks"),
             py::arg("rows"), py::arg("priority"));
  module.def("phase2", &phase2, py::arg("tasks"), py::arg("types"), py::arg("layouts"),
             py::arg("updates"), py::arg("gradients"), py::arg("priorities"), py::arg("weights"),
             py::arg("gamma"), py::arg("variance"), py::arg("epsilon"), py::arg("threads"));
  module.attr("max_tasks") = cs_kernels::kMaxTasks;
  module.def("gramian", &gramian, py::arg("tasks"), py::arg("groups"), py::arg("types"),
             py::arg("sizes"), py::arg("gradients"), py::arg("group_of"), py::arg("out"),
             py::arg("threads"));
  module.def("combine", &combine, py::arg("tasks"), py::arg("groups"), py::arg("types"),
             py::arg("sizes"), py::arg("gradients"), py::arg("group_of"), py::arg("updates"),
             py::arg("weights"), py::arg("threads"));
  module.def("drop_signs", &drop_signs, py::arg("tasks"), py::arg("types"), py::arg("sizes"),
             py::arg("gradients"), py::arg("updates"), py::arg("leaks"), py::arg("seed"),
             py::arg("step"), py::arg("threads"));
  define_solver(module, "pcgrad_weights", cs_kernels::cpu::pcgrad_weights);
  define_solver(module, "cagrad_weights", cs_kernels::cpu::cagrad_weights);
  define_solver(module, "mgda_weights", cs_kernels::cpu::mgda_weights);
  define_solver(module, "aligned_mtl_weights", cs_kernels::cpu::aligned_mtl_weights);
  define_solver(module, "nash_mtl_weights", cs_kernels::cpu::nash_mtl_weights);
  define_solver(module, "imtl_g_weights", cs_kernels::cpu::imtl_g_weights);
  define_solver(module, "upgrad_weights", cs_kernels::cpu::upgrad_weights);
  define_operands(module);
#ifdef CS_KERNELS_CUDA
  define_cuda(module.def_submodule("cuda"));
#endif
}
