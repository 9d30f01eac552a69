// Sketches of gradients: of one tensor, and in the hooks of a backward pass.
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arguments.h"
#include "cs_kernels/sketch.h"
#include "module.h"
#include "tensors.h"

namespace py = pybind11;

namespace {

using namespace cs_kernels;
using namespace cs_kernels_python;

// A sketch of fewer elements takes less time than a thread switch.
constexpr std::int64_t kReleasingElements = 1 << 14;

struct Run {
  dlpack::Tensor sketch; // float32
  std::uint64_t key;
  int threads;
};

// Returns false, without any change, if the kernel cannot use the tensors' memory. Without
// `update`, only sketches.
bool add_to_sketch(Run run, const dlpack::Tensor& x, std::int64_t index,
                   const dlpack::Tensor* update = nullptr, double weight = 1.0, bool add = false) {
  const int type = type_of(x);
  if (type == kUnknownType || type_of(run.sketch) != to_python(DataType::kFloat32) ||
      !same_device(x.device, run.sketch.device) || !is_dense(x) || !is_aligned(x) ||
      (update != nullptr && !has_layout_of(*update, x)))
    return false;
  const std::int64_t size = elements(x);
  if (size == 0)
    return true;
  const SketchTensor tensor = {from_python(type),
                               address_of(x),
                               size,
                               index,
                               update == nullptr ? nullptr : address_of(*update),
                               weight,
                               add};
  std::optional<py::gil_scoped_release> release;
  if (size >= kReleasingElements)
    release.emplace();
  cpu::sketch(tensor, run.key, static_cast<float*>(address_of(run.sketch)), elements(run.sketch),
              run.threads);
  return true;
}

bool sketch(py::handle sketch, py::handle tensor, std::int64_t index, std::uint64_t key,
            py::handle update, double weight, bool add, int threads) {
  const auto sums = as_dlpack(sketch), x = as_dlpack(tensor);
  const auto y = update.is_none() ? x : as_dlpack(update);
  return sums && x && y &&
         add_to_sketch({*sums, key, threads}, *x, index, update.is_none() ? nullptr : &*y, weight,
                       add);
}

// An attribute whose name is interned, so that no string is made.
class Attribute {
public:
  explicit Attribute(const char* name)
      : name_(py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name))) {}

  py::object of(py::handle object) const {
    PyObject* const found = PyObject_GetAttr(object.ptr(), name_.ptr());
    if (found == nullptr)
      throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
  }
  bool is_true_of(py::handle object) const { return PyObject_IsTrue(of(object).ptr()) == 1; }

private:
  py::object name_;
};

// The state of one task's backward pass, shared by all hooks.
class SketchPass {
public:
  // `reached` receives the indices of the parameters whose gradients the hooks have taken.
  SketchPass(py::set reached, py::object grad_enabled, py::object increment_versions)
      : reached_(std::move(reached)), grad_enabled_(std::move(grad_enabled)),
        increment_versions_(std::move(increment_versions)),
        tensor_type_(py::module_::import("torch").attr("Tensor")) {}

  // Takes the task's sketches and weights, by module; without weights, hooks change no gradient.
  void open(const py::list& sketches, std::uint64_t key, std::vector<double> weights, int threads) {
    runs_.clear();
    for (const py::handle tensor : sketches)
      if (const auto found = as_dlpack(tensor))
        runs_.push_back({*found, key, threads});
    weights_ = std::move(weights);
    is_open_ = runs_.size() == sketches.size();
  }

  void close() { is_open_ = false; }

  bool changes_gradients() const { return !weights_.empty(); }

  // Sketches the gradient and, with weights, adds the weighted gradient to `.grad`, as autograd
  // would add it in place. Returns false, without any change, if this is not possible.
  bool add(py::handle grad, py::handle leaf, py::handle parameter, std::size_t module,
           std::int64_t index) {
    if (!is_open_ || grad.is_none() || !requires_grad_.is_true_of(leaf) || !is_plain(grad))
      return false;
    const auto x = as_dlpack(grad);
    const bool done = x && (changes_gradients() ? add_weighted(*x, leaf, module, index)
                                                : add_to_sketch(runs_.at(module), *x, index));
    if (done)
      reached_.add(parameter);
    return done;
  }

private:
  bool add_weighted(const dlpack::Tensor& x, py::handle leaf, std::size_t module,
                    std::int64_t index) {
    const py::object total = total_.of(leaf);
    if (total.is_none() || !is_plain(total) || late_hooks_.is_true_of(leaf) ||
        grad_enabled_().ptr() == Py_True)
      return false;
    const auto y = as_dlpack(total);
    if (!y || !add_to_sketch(runs_.at(module), x, index, &*y, weights_.at(module), true))
      return false;
    increment_versions_(py::make_tuple(total));
    return true;
  }

  // Whether a tensor is a torch.Tensor, not of a subclass, that is not lazily negated.
  bool is_plain(py::handle tensor) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())) == tensor_type_.ptr() &&
           is_neg_.of(tensor)().ptr() != Py_True;
  }

  py::set reached_;
  py::object grad_enabled_;
  py::object increment_versions_;
  py::object tensor_type_;
  Attribute requires_grad_{"requires_grad"};
  Attribute total_{"grad"};
  Attribute late_hooks_{"_post_accumulate_grad_hooks"};
  Attribute is_neg_{"is_neg"};
  std::vector<Run> runs_;
  std::vector<double> weights_;
  bool is_open_ = false;
};

// The hook of the node that accumulates a leaf's gradient: calls the hook `otherwise` for whatever
// SketchPass::add cannot do.
struct SketchHook {
  py::object run(const py::object& grads) const {
    // Compiled autograd passes a list.
    if (!PyTuple_Check(grads.ptr()) ||
        !pass->add(PyTuple_GET_ITEM(grads.ptr(), 0), leaf, parameter, module, index))
      return otherwise(grads);
    return pass->changes_gradients() ? nothing : py::none();
  }

  std::shared_ptr<SketchPass> pass;
  py::object leaf;
  py::object parameter; // an int
  std::size_t module;
  std::int64_t index; // of the first element
  py::object otherwise;
  py::object nothing = py::make_tuple(py::none()); // there is nothing left to accumulate
};

} // namespace

void define_sketch(py::module_& module) {
  define(module, "sketch", &sketch, "sketch", "tensor", "index", "key", "update", "weight", "add",
         "threads");
  py::class_<SketchPass, std::shared_ptr<SketchPass>> pass(module, "SketchPass");
  pass.def(py::init<py::set, py::object, py::object>(), py::arg("reached"), py::arg("grad_enabled"),
           py::arg("increment_versions"));
  define(pass, "open", &SketchPass::open, "sketches", "key", "weights", "threads");
  define(pass, "close", &SketchPass::close);
  py::class_<SketchHook> hook(module, "SketchHook");
  hook.def(py::init([](std::shared_ptr<SketchPass> of, py::object leaf, py::object parameter,
                       std::size_t number, std::int64_t index, py::object otherwise) {
             return SketchHook{std::move(of), std::move(leaf), std::move(parameter),
                               number,        index,           std::move(otherwise)};
           }),
           py::arg("sketch_pass"), py::arg("leaf"), py::arg("parameter"), py::arg("module"),
           py::arg("index"), py::arg("otherwise"));
  define(hook, "__call__", &SketchHook::run, "grads");
}
