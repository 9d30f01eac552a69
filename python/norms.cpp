#include "norms.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "module.h"
#include "tensors.h"

namespace py = pybind11;

namespace cs_kernels_python {
namespace {

// The address of an entry that is a dense vector of this length, device and type, or null. The
// first one defines the type.
const void* vector_at(py::handle dictionary, const py::str& key, std::int64_t length,
                      dlpack::Device device, int& type) {
  PyObject* const found = PyDict_GetItemWithError(dictionary.ptr(), key.ptr());
  if (found == nullptr || found == Py_None)
    return nullptr;
  const std::optional<dlpack::Tensor> tensor = as_dlpack(found);
  if (!tensor || type_of(*tensor) == kUnknownType || !same_device(tensor->device, device) ||
      tensor->dimensions != 1 || tensor->shape[0] != length ||
      (length > 1 && tensor->strides[0] != 1))
    return nullptr;
  if (type == kUnknownType)
    type = type_of(*tensor);
  return type == type_of(*tensor) ? address_of(*tensor) : nullptr;
}

} // namespace

NormFactors::NormFactors(const Operands& operands, const py::list& parameters,
                         const py::list& buffers, const py::list& norms)
    : gamma_type(kUnknownType), variance_type(kUnknownType) {
  const std::size_t count = parameters.size();
  if (buffers.size() != count || norms.size() != count ||
      count > operands.types.size() * operands.tasks)
    throw std::invalid_argument(
        "parameters, buffers and norms must be as many, at most one for each"
        " output and task, got " +
        std::to_string(count));
  const py::str weight("weight");
  const py::str running_var("running_var");
  const py::str eps("eps");
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t rows = operands.layouts[i / operands.tasks].rows();
    gamma.push_back(vector_at(parameters[i], weight, rows, operands.device, gamma_type));
    variance.push_back(vector_at(buffers[i], running_var, rows, operands.device, variance_type));
    const py::object number = norms[i].attr(eps);
    fit = gamma.back() != nullptr && variance.back() != nullptr && PyFloat_Check(number.ptr());
    if (!fit)
      return;
    epsilon.push_back(PyFloat_AS_DOUBLE(number.ptr()));
    sizes.push_back(rows);
  }
}

void NormFactors::write_copies(Address table, Address gammas, Address variances) const {
  auto* row = static_cast<std::uintptr_t*>(table);
  const auto write = [&](const std::vector<const void*>& sources, int type, Address target) {
    for (std::size_t i = 0; i < sources.size(); ++i, row += 3) {
      row[0] = Address(sources[i]).number;
      row[1] = target.number;
      row[2] = sizes[i] * cs_kernels::item_size(from_python(type));
      target.number += row[2];
    }
  };
  write(gamma, gamma_type, gammas);
  write(variance, variance_type, variances);
}

} // namespace cs_kernels_python

void define_norms(py::module_& module) {
  using namespace cs_kernels_python;
  py::class_<NormFactors>(module, "NormFactors")
      .def(py::init<const Operands&, const py::list&, const py::list&, const py::list&>(),
           py::arg("operands"), py::arg("parameters"), py::arg("buffers"), py::arg("norms"))
      .def_readonly("fit", &NormFactors::fit)
      .def_readonly("gamma_type", &NormFactors::gamma_type)
      .def_readonly("variance_type", &NormFactors::variance_type)
      .def_readonly("epsilon", &NormFactors::epsilon)
      .def_readonly("sizes", &NormFactors::sizes)
      .def("write_copies", &NormFactors::write_copies, py::arg("table"), py::arg("gammas"),
           py::arg("variances"));
}
