// K task weights from the Gramian of K gradients: one function for each solver, on the host or in a
// GPU thread. K is small, the caller provides the workspace, and iterations are bounded.
//
// The solvers take the correlations C_ij = G_ij / (d_i d_j), d_i = |g_i|, and unknowns scaled by d,
// so that gradients of very different lengths are no harder than others. A ridge on C's diagonal
// makes singular Gramians regular. A Gramian that is not finite gives weights of NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cs_kernels/host_device.h"
#include "cs_kernels/random.h"
#include "cs_kernels/solvers.h"

namespace cs_kernels::solvers {

#define CS_INLINE_SOLVER CS_HOST_DEVICE inline

// Shared by the solvers of all backends.
constexpr double kRidge = 1e-12;     // on the diagonal of the correlations
constexpr double kNashRidge = 1e-10; // Nash-MTL's: keeps the weights of opposed gradients finite
constexpr double kNashStop = 1e-9;   // its last Newton decrement
constexpr double kSlope = 1e-14;     // of the sum of absolute terms: a slope of zero
constexpr double kStationary =
    1e10;                          // 1 / squared norm in the hull of unit gradients: none descends
constexpr double kZeroSum = 1e-12; // of the sum of absolute weights: they cannot sum to one
constexpr double kEpsilon = 2.220446049250313e-16;

// Memory for a solver's arrays: a GPU thread has few registers. It is passed by value, so that a
// function's arrays are released when it returns.
class Workspace {
public:
  CS_HOST_DEVICE explicit Workspace(double* memory) : next_(memory) {}
  CS_HOST_DEVICE double* numbers(int n) {
    double* taken = next_;
    next_ += n;
    return taken;
  }
  CS_HOST_DEVICE int* integers(int n) { return reinterpret_cast<int*>(numbers((n + 1) / 2)); }

private:
  double* next_;
};

// Doubles in the workspace of a solver: two matrices and some vectors.
CS_INLINE_SOLVER constexpr int workspace_size(int tasks) { return 2 * tasks * tasks + 16 * tasks; }

struct Gramian {
  const double* data;
  int tasks;
  std::int64_t index; // in a call

  CS_HOST_DEVICE double operator()(int i, int j) const { return data[i * tasks + j]; }

  CS_HOST_DEVICE bool finite() const {
    for (int i = 0; i < tasks * tasks; ++i)
      if (!std::isfinite(data[i]))
        return false;
    return true;
  }
};

CS_INLINE_SOLVER void fill(double* x, int n, double value) {
  for (int i = 0; i < n; ++i)
    x[i] = value;
}

CS_INLINE_SOLVER double dot(const double* x, const double* y, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i)
    sum += x[i] * y[i];
  return sum;
}

CS_INLINE_SOLVER const double* row(const double* matrix, int i, int columns) {
  return matrix + static_cast<std::int64_t>(i) * columns;
}

// Solves A x = b for a positive definite A [n, n] (lower triangle, overwritten by its factor).
CS_INLINE_SOLVER void cholesky(double* a, int n) {
  for (int j = 0; j < n; ++j) {
    const double pivot =
        std::sqrt(std::fmax(a[j * n + j] - dot(row(a, j, n), row(a, j, n), j), 1e-300));
    a[j * n + j] = pivot;
    for (int i = j + 1; i < n; ++i)
      a[i * n + j] = (a[i * n + j] - dot(row(a, i, n), row(a, j, n), j)) / pivot;
  }
}

CS_INLINE_SOLVER void cholesky_solve(const double* factor, int n, double* x) {
  for (int i = 0; i < n; ++i)
    x[i] = (x[i] - dot(row(factor, i, n), x, i)) / factor[i * n + i];
  for (int i = n; i-- > 0;) {
    double sum = x[i];
    for (int j = i + 1; j < n; ++j)
      sum -= factor[j * n + i] * x[j];
    x[i] = sum / factor[i * n + i];
  }
}

// The tasks with a nonzero gradient, and the correlations of these gradients.
struct Correlations {
  int size = 0;
  int* task;      // [size]
  double* length; // |g|
  double* matrix; // [size, size]

  CS_HOST_DEVICE Correlations(const Gramian& gramian, double ridge, Workspace& workspace)
      : task(workspace.integers(gramian.tasks)), length(workspace.numbers(gramian.tasks)),
        matrix(workspace.numbers(gramian.tasks * gramian.tasks)) {
    for (int i = 0; i < gramian.tasks; ++i)
      if (gramian(i, i) > 0) {
        task[size] = i;
        length[size++] = std::sqrt(gramian(i, i));
      }
    for (int i = 0; i < size; ++i)
      for (int j = 0; j < size; ++j)
        matrix[i * size + j] =
            i == j ? 1 + ridge : gramian(task[i], task[j]) / length[i] / length[j];
  }
  CS_HOST_DEVICE double operator()(int i, int j) const { return matrix[i * size + j]; }
};

// min 1/2 x'Cx - f'x over x >= 0, by the active-set method of Lawson and Hanson from zero.
struct NonNegative {
  int* free_;
  int* tried; // freed, and sent back at once, since x last changed
  int* indices;
  double* factor;
  double* z;

  CS_HOST_DEVICE NonNegative(int size, Workspace& workspace)
      : free_(workspace.integers(size)), tried(workspace.integers(size)),
        indices(workspace.integers(size)), factor(workspace.numbers(size * size)),
        z(workspace.numbers(size)) {}

  CS_HOST_DEVICE int factorize(const Correlations& c) {
    int n = 0;
    for (int i = 0; i < c.size; ++i)
      if (free_[i] != 0)
        indices[n++] = i;
    for (int i = 0; i < n; ++i)
      for (int j = 0; j <= i; ++j)
        factor[i * n + j] = c(indices[i], indices[j]);
    cholesky(factor, n);
    return n;
  }

  CS_HOST_DEVICE void solve(const Correlations& c, const double* f, double* x) {
    const int size = c.size;
    for (int i = 0; i < size; ++i) {
      free_[i] = tried[i] = 0;
      x[i] = 0;
    }
    for (int round = 0; round < 8 * size + 16; ++round) {
      int next = -1;
      double best = 0;
      for (int i = 0; i < size; ++i) {
        if (free_[i] != 0 || tried[i] != 0)
          continue;
        double slope = f[i];
        double scale = std::fabs(f[i]);
        for (int j = 0; j < size; ++j) {
          slope -= c(i, j) * x[j];
          scale += std::fabs(c(i, j) * x[j]);
        }
        if (slope > kSlope * scale && (next < 0 || slope > best)) {
          next = i;
          best = slope;
        }
      }
      if (next < 0)
        return;
      free_[next] = 1;
      bool moved = false;
      for (int step = 0; step <= size; ++step) {
        const int n = factorize(c);
        for (int i = 0; i < n; ++i)
          z[i] = f[indices[i]];
        cholesky_solve(factor, n, z);
        // The longest step toward z that leaves no entry negative.
        double fraction = 1;
        int blocking = -1;
        for (int i = 0; i < n; ++i)
          if (z[i] <= 0) {
            const double at = x[indices[i]];
            const double reach = at > 0 ? at / (at - z[i]) : 0;
            if (blocking < 0 || reach < fraction) {
              fraction = reach;
              blocking = indices[i];
            }
          }
        for (int i = 0; i < n; ++i)
          x[indices[i]] = blocking < 0 ? z[i] : x[indices[i]] + fraction * (z[i] - x[indices[i]]);
        moved = moved || fraction > 0;
        if (blocking < 0)
          break;
        x[blocking] = 0;
        free_[blocking] = 0;
      }
      for (int i = 0; i < size; ++i)
        tried[i] = !moved && (tried[i] != 0 || i == next);
    }
  }
};

// PCGrad (Yu et al. 2020): in a random order of the others, each gradient loses its component along
// every original one that it conflicts with; then the sum.
CS_INLINE_SOLVER void pcgrad(const Gramian& g, std::uint64_t call_key, double* weights,
                             Workspace workspace) {
  const std::uint64_t key = splitmix64(call_key + static_cast<std::uint64_t>(g.index));
  fill(weights, g.tasks, 0);
  double* own = workspace.numbers(g.tasks);
  int* order = workspace.integers(g.tasks);
  for (int i = 0; i < g.tasks; ++i) {
    fill(own, g.tasks, 0);
    own[i] = 1;
    int others = 0;
    for (int j = 0; j < g.tasks; ++j)
      if (j != i)
        order[others++] = j;
    for (int n = others; n > 0; --n) { // Fisher-Yates, one step at a time
      const std::uint64_t drawn = splitmix64(key + static_cast<std::uint64_t>(i * g.tasks + n));
      const int k = static_cast<int>(drawn % static_cast<std::uint64_t>(n));
      const int j = order[k];
      order[k] = order[n - 1];
      const double conflict = dot(own, row(g.data, j, g.tasks), g.tasks);
      if (conflict < 0 && g(j, j) > 0)
        own[j] -= conflict / g(j, j);
    }
    for (int j = 0; j < g.tasks; ++j)
      weights[j] += own[j];
  }
}

// MGDA (Sener and Koltun 2018): the point of least norm in the convex hull of the gradients. With
// x >= 0 the minimizer of 1/2 x'Gx - 1'x, it is x / sum x. A gradient of zero is such a point.
CS_INLINE_SOLVER void mgda(const Gramian& g, std::uint64_t, double* weights, Workspace workspace) {
  const Correlations c(g, kRidge, workspace);
  fill(weights, g.tasks, 0);
  if (c.size < g.tasks) {
    for (int i = 0; i < g.tasks; ++i)
      weights[i] = g(i, i) > 0 ? 0 : 1.0 / (g.tasks - c.size);
    return;
  }
  double* f = workspace.numbers(c.size);
  double* x = workspace.numbers(c.size);
  NonNegative problem(c.size, workspace);
  // Relative to the shortest, so that the greatest is 1.
  double shortest = c.length[0];
  for (int i = 1; i < c.size; ++i)
    shortest = std::fmin(shortest, c.length[i]);
  for (int i = 0; i < c.size; ++i)
    f[i] = shortest / c.length[i];
  problem.solve(c, f, x);
  double total = 0;
  for (int i = 0; i < c.size; ++i)
    total += x[i] *= f[i];
  for (int i = 0; i < c.size; ++i)
    weights[i] = x[i] / total;
}

// UPGrad (Quinton and Rey 2024): each gradient is projected onto the dual cone of all, the vectors
// that conflict with none; then the mean.
CS_INLINE_SOLVER void upgrad(const Gramian& g, std::uint64_t, double* weights,
                             Workspace workspace) {
  const Correlations c(g, kRidge, workspace);
  fill(weights, g.tasks, 1.0 / g.tasks);
  double* f = workspace.numbers(c.size);
  double* x = workspace.numbers(c.size);
  NonNegative problem(c.size, workspace);
  for (int i = 0; i < c.size; ++i) {
    for (int j = 0; j < c.size; ++j)
      f[j] = -c(i, j);
    problem.solve(c, f, x);
    for (int j = 0; j < c.size; ++j)
      weights[c.task[j]] += x[j] * (c.length[i] / c.length[j]) / g.tasks;
  }
}

// CAGrad (Liu et al. 2021): the d = g_0 + w with the greatest min_i g_i.d, for combinations w of
// the gradients with |w| <= r = c |g_0|; g_0 is the mean. The shortest w for which that minimum is
// at least mu is a projection onto a polyhedron. Its length is convex in mu, which is found where
// the length is r. If no direction is good for all tasks, mu is at most zero.
CS_INLINE_SOLVER void cagrad(const Gramian& g, std::uint64_t bits_of_c, double* weights,
                             Workspace workspace) {
  double c;
  memcpy(&c, &bits_of_c, sizeof(c));
  const int tasks = g.tasks;
  fill(weights, tasks, 1.0 / tasks);
  double* along = workspace.numbers(tasks); // g_i.g_0
  double square = 0;
  for (int i = 0; i < tasks; ++i) {
    along[i] = 0;
    for (int j = 0; j < tasks; ++j)
      along[i] += g(i, j) / tasks;
    square += along[i] / tasks;
  }
  const Correlations correlations(g, kRidge, workspace);
  const int size = correlations.size;
  const double radius = c * std::sqrt(std::fmax(square, 0.0));
  if (radius <= 0 || size == 0)
    return;

  double* p = workspace.numbers(size);
  double* q = workspace.numbers(size);
  double* f = workspace.numbers(size);
  double* x = workspace.numbers(size);
  double* solved = workspace.numbers(size);
  double* free_p = workspace.numbers(size);
  double* free_q = workspace.numbers(size);
  NonNegative problem(size, workspace);
  fill(f, size, 1);
  problem.solve(correlations, f, x);
  double inverse = 0; // of the least squared norm in the hull of the unit gradients
  for (int i = 0; i < size; ++i)
    inverse += x[i];
  const bool stationary = size < tasks || inverse > kStationary;

  double low = along[correlations.task[0]];
  double high = INFINITY;
  for (int i = 0; i < size; ++i) {
    const double b = along[correlations.task[i]];
    low = std::fmin(low, b);
    high = std::fmin(high, b + radius * correlations.length[i]);
  }
  double mu = stationary ? std::fmin(high, 0.0) : high;
  high = mu;
  for (int i = 0; i < size; ++i) {
    p[i] = 1 / correlations.length[i];
    q[i] = along[correlations.task[i]] / correlations.length[i];
  }
  for (int round = 0; round < 64; ++round) {
    for (int i = 0; i < size; ++i)
      f[i] = (mu - along[correlations.task[i]]) / correlations.length[i];
    problem.solve(correlations, f, x);
    const double length = std::sqrt(std::fmax(dot(f, x, size), 0.0)); // f'x = x'Cx
    if (length > radius)
      high = mu;
    else
      low = mu;
    if (std::fabs(length - radius) <= 1e-12 * radius || (round == 0 && length <= radius) ||
        high - low <= 1e-15 * (std::fabs(high) + std::fabs(low)))
      break;
    // With the same entries free, length^2 = pp mu^2 - 2 pq mu + qq.
    const int n = problem.factorize(correlations);
    for (int i = 0; i < n; ++i) {
      free_p[i] = p[problem.indices[i]];
      free_q[i] = q[problem.indices[i]];
      solved[i] = free_p[i];
    }
    cholesky_solve(problem.factor, n, solved);
    const double pp = dot(solved, free_p, n);
    const double pq = dot(solved, free_q, n);
    for (int i = 0; i < n; ++i)
      solved[i] = free_q[i];
    cholesky_solve(problem.factor, n, solved);
    const double qq = dot(solved, free_q, n);
    const double root =
        (pq + std::sqrt(std::fmax(pq * pq - pp * (qq - radius * radius), 0.0))) / pp;
    mu = n > 0 && root > low && root < high ? root : 0.5 * (low + high);
  }
  for (int i = 0; i < size; ++i)
    weights[correlations.task[i]] += x[i] / correlations.length[i];
}

// NashMTL (Navon et al. 2022): G a = 1 / a, a > 0, the minimum of 1/2 a'Ga - sum log a_i. The
// function is self-concordant: the damped Newton method converges from any start. A task without a
// gradient gets no weight.
CS_INLINE_SOLVER void nash_mtl(const Gramian& g, std::uint64_t, double* weights,
                               Workspace workspace) {
  const Correlations c(g, kNashRidge, workspace);
  const int n = c.size;
  fill(weights, g.tasks, 0);
  double* v = workspace.numbers(n);
  double* step = workspace.numbers(n);
  double* slope = workspace.numbers(n);
  double* hessian = workspace.numbers(n * n);
  fill(v, n, 1);
  for (int round = 0; round < 100; ++round) {
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j)
        hessian[i * n + j] = c(i, j);
      hessian[i * n + i] += 1 / (v[i] * v[i]);
      step[i] = slope[i] = dot(row(c.matrix, i, n), v, n) - 1 / v[i];
    }
    cholesky(hessian, n);
    cholesky_solve(hessian, n, step);
    const double decrement = std::sqrt(std::fmax(dot(slope, step, n), 0.0));
    const double length = decrement < 0.25 ? 1 : 1 / (1 + decrement);
    for (int i = 0; i < n; ++i)
      v[i] -= length * step[i];
    if (decrement < kNashStop)
      break;
  }
  for (int i = 0; i < n; ++i)
    weights[c.task[i]] = v[i] / c.length[i];
}

// Eigenvalues and vectors (columns) of a symmetric matrix, by cyclic Jacobi rotations.
CS_INLINE_SOLVER void eigen(double* a, int n, double* values, double* vectors) {
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j)
      vectors[i * n + j] = i == j ? 1 : 0;
  double trace = 0;
  for (int i = 0; i < n; ++i)
    trace += std::fabs(a[i * n + i]);
  for (int sweep = 0; sweep < 40; ++sweep) {
    bool rotated = false;
    for (int p = 0; p < n; ++p)
      for (int q = p + 1; q < n; ++q) {
        const double off = a[p * n + q];
        if (std::fabs(off) <= 1e-18 * trace)
          continue;
        rotated = true;
        const double theta = (a[q * n + q] - a[p * n + p]) / (2 * off);
        const double t = (theta < 0 ? -1 : 1) / (std::fabs(theta) + std::hypot(theta, 1.0));
        const double cosine = 1 / std::hypot(t, 1.0);
        const double sine = t * cosine;
        const auto rotate = [cosine, sine](double& x, double& y) {
          const double before = x;
          x = cosine * before - sine * y;
          y = sine * before + cosine * y;
        };
        for (int k = 0; k < n; ++k)
          rotate(a[k * n + p], a[k * n + q]);
        for (int k = 0; k < n; ++k) {
          rotate(a[p * n + k], a[q * n + k]);
          rotate(vectors[k * n + p], vectors[k * n + q]);
        }
        a[p * n + q] = a[q * n + p] = 0;
      }
    if (!rotated)
      break;
  }
  for (int i = 0; i < n; ++i)
    values[i] = a[i * n + i];
}

// out += factor v (v'1) for eigenvector k.
CS_INLINE_SOLVER void add_component_of_ones(const double* vectors, int n, int k, double factor,
                                            double* out) {
  double part = 0;
  for (int i = 0; i < n; ++i)
    part += vectors[i * n + k];
  for (int i = 0; i < n; ++i)
    out[i] += vectors[i * n + k] * part * factor;
}

// Eigenvalues up to this one count as zero.
CS_INLINE_SOLVER double rank_tolerance(const double* values, int n) {
  double greatest = 0;
  for (int i = 0; i < n; ++i)
    greatest = std::fmax(greatest, values[i]);
  return greatest * n * kEpsilon;
}

// IMTL-G (Liu et al. 2021): the update has the same component along every gradient, and the weights
// sum to one. If several weights do, those of least norm, each times its gradient's length; if they
// cannot sum to one, zeros.
CS_INLINE_SOLVER void imtl_g(const Gramian& g, std::uint64_t, double* weights,
                             Workspace workspace) {
  const Correlations c(g, 0, workspace);
  const int n = c.size;
  fill(weights, g.tasks, 0);
  double* values = workspace.numbers(n);
  double* vectors = workspace.numbers(n * n);
  double* y = workspace.numbers(n);
  fill(y, n, 0);
  eigen(c.matrix, n, values, vectors);
  const double tolerance = 8 * rank_tolerance(values, n);
  for (int k = 0; k < n; ++k)
    if (values[k] > tolerance)
      add_component_of_ones(vectors, n, k, 1 / values[k], y);
  double total = 0;
  double size = 0;
  for (int i = 0; i < n; ++i) {
    y[i] *= c.length[0] / c.length[i];
    total += y[i];
    size += std::fabs(y[i]);
  }
  if (std::fabs(total) > kZeroSum * size)
    for (int i = 0; i < n; ++i)
      weights[c.task[i]] = y[i] / total;
}

enum class AlignedScale : std::uint64_t { kMin = 0, kMedian = 1, kRmse = 2 };

// Aligned-MTL (Senushkin et al. 2023): the gradients' principal components are scaled to one length
// (the least, the lower median or the root mean square of their lengths); then the sum. Without any
// gradient, ones.
CS_INLINE_SOLVER void aligned_mtl(const Gramian& g, std::uint64_t scale_number, double* weights,
                                  Workspace workspace) {
  const auto scale = static_cast<AlignedScale>(scale_number);
  const int n = g.tasks;
  double* a = workspace.numbers(n * n);
  double* values = workspace.numbers(n);
  double* vectors = workspace.numbers(n * n);
  for (int i = 0; i < n * n; ++i)
    a[i] = g.data[i];
  eigen(a, n, values, vectors);
  const double tolerance = rank_tolerance(values, n);
  double* kept = workspace.numbers(n); // ascending
  int rank = 0;
  double mean = 0;
  for (int k = 0; k < n; ++k) {
    if (!(values[k] > tolerance))
      continue;
    mean += values[k];
    int index = rank++;
    for (; index > 0 && kept[index - 1] > values[k]; --index)
      kept[index] = kept[index - 1];
    kept[index] = values[k];
  }
  if (rank == 0) {
    fill(weights, n, 1);
    return;
  }
  const double length = scale == AlignedScale::kMin      ? kept[0]
                        : scale == AlignedScale::kMedian ? kept[(rank - 1) / 2]
                                                         : mean / rank;
  fill(weights, n, 0);
  for (int k = 0; k < n; ++k)
    if (values[k] > tolerance)
      add_component_of_ones(vectors, n, k, std::sqrt(length / values[k]), weights);
}

// Solves Gramian number n with a function from above; NaN if the Gramian is not finite.
template <class Function>
CS_INLINE_SOLVER void solve_one(const SolverArguments& arguments, std::int64_t n, double* memory,
                                const Function& function) {
  const std::int64_t tasks = arguments.tasks;
  const Gramian gramian{arguments.gramians + n * tasks * tasks, arguments.tasks, n};
  double* weights = arguments.weights + n * tasks;
  if (gramian.finite())
    function(gramian, arguments.option, weights, Workspace(memory));
  else
    fill(weights, arguments.tasks, NAN);
}

// run(function) with the function of a solver.
template <class Run> CS_INLINE_SOLVER void with_solver(Solver solver, const Run& run) {
  switch (solver) {
#define CS_SOLVER(name)                                                                            \
  case Solver::name:                                                                               \
    return run([](const Gramian& g, std::uint64_t option, double* weights, Workspace workspace) {  \
      name(g, option, weights, workspace);                                                         \
    });
    CS_SOLVERS(CS_SOLVER)
#undef CS_SOLVER
  }
}

#undef CS_INLINE_SOLVER

} // namespace cs_kernels::solvers
