// K task weights from the Gramian of K gradients: one function per solver, for the host and for a
// GPU, run by a team of lanes (lanes.h). The caller provides the workspace. All iterations are
// bounded.
//
// Most solvers work on the correlations C_ij = G_ij / (d_i d_j), where d_i = |g_i|, and scale the
// unknowns by d, so gradients of very different lengths are no harder to solve for. Except in
// ConFIG and IMTL-G, a ridge on the diagonal makes C regular. A non-finite Gramian gives NaN
// weights.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cs_kernels/host_device.h"
#include "cs_kernels/lanes.h"
#include "cs_kernels/random.h"
#include "cs_kernels/solvers.h"

namespace cs_kernels::solvers {

#define CS_INLINE_SOLVER CS_HOST_DEVICE inline

// The solvers of all backends share these constants.
constexpr double kRidge = 1e-12;     // on the diagonal of the correlations
constexpr double kNashRidge = 1e-10; // Nash-MTL's: keeps the weights of opposed gradients finite
constexpr double kNashStop = 1e-9;   // Nash-MTL stops below this Newton decrement
constexpr double kNashFull = 0.25;   // Newton steps are full below this decrement
constexpr double kSlope = 1e-14;     // slopes up to this share of their absolute terms are zero
constexpr double kStationary = 1e10; // Pareto-stationary above this 1 / |min-norm point|^2
constexpr double kZeroSum = 1e-12;   // weights' sum is zero up to this share of their absolute sum
constexpr double kNoCosine = 1e-20;  // ConFIG's mean squared cosine up to this is zero
constexpr double kEpsilon = 2.220446049250313e-16;
constexpr double kFairStop = 1e-9;        // FairGrad stops below this power * relative step
constexpr double kFairFull = 0.1;         // Newton steps are full below this power * relative step
constexpr double kFairLeast = 1e-290;     // smallest right-hand side, relative to the greatest
constexpr double kFairMost = 1e100;       // cap on the inverse curvature, practically infinite
constexpr double kMostSimilar = 1 - 1e-6; // GradVac's greatest target cosine
constexpr double kVanished = 1e-7;        // GradVac: gradients vanish at this share of their length

// Doubles that UPGrad needs in the workspace per part of a team: a matrix and several vectors.
CS_INLINE_SOLVER constexpr int part_size(int tasks) {
  return tasks * row_stride(tasks) + 5 * (tasks + 1);
}

// Doubles in the workspace of a solver.
CS_INLINE_SOLVER constexpr int workspace_size(int tasks, int parts = 1) {
  return tasks * row_stride(tasks) + 12 * (tasks + 1) + parts * (part_size(tasks) + tasks);
}

struct Options {
  std::uint64_t word;   // a random state, the bits of a number, or the index of a scale
  double rate;          // GradVac's
  double* similarities; // [K, K], GradVac's targets

  CS_HOST_DEVICE double number() const {
    double bits;
    memcpy(&bits, &word, sizeof(bits));
    return bits;
  }
};

struct Gramian {
  const double* data;
  int tasks;
  std::int64_t index; // within a call

  CS_HOST_DEVICE const double* row(int i) const {
    return data + static_cast<std::int64_t>(i) * tasks;
  }
  CS_HOST_DEVICE double operator()(int i, int j) const { return row(i)[j]; }
};

// The tasks with a nonzero gradient, and the correlations of these gradients.
struct Correlations {
  int size = 0;
  int* task;      // [size]
  double* length; // |g|
  Matrix matrix;  // [size, size]

  template <class Team>
  CS_HOST_DEVICE Correlations(const Team& team, const Gramian& gramian, double ridge,
                              Workspace& workspace)
      : task(workspace.integers(gramian.tasks)), length(workspace.numbers(gramian.tasks)),
        matrix(gramian.tasks, workspace) {
    for (int i = 0; i < gramian.tasks; ++i) {
      if (!(gramian(i, i) > 0))
        continue;
      if (team.part() == 0 && size % team.lanes() == team.lane()) {
        task[size] = i;
        length[size] = std::sqrt(gramian(i, i));
      }
      ++size;
    }
    team.sync_parts();
    for (int i = team.part(); i < size; i += team.parts())
      for (int j = team.lane(); j < size; j += team.lanes())
        matrix(i, j) = i == j ? 1 + ridge : correlation(gramian, i, j);
    team.sync_parts();
  }
  CS_HOST_DEVICE double operator()(int i, int j) const { return matrix(i, j); }

  // Clamped to [-1, 1]: with 16-bit gradients, rounding errors of products can exceed the ridge.
  CS_HOST_DEVICE double correlation(const Gramian& gramian, int i, int j) const {
    const double c = gramian(task[i], task[j]) / length[i] / length[j];
    return c > 1 ? 1 : c < -1 ? -1 : c;
  }
};

// Minimizes 1/2 x'Cx - f'x over x >= 0 by Lawson and Hanson's active-set method, starting at zero.
// The Cholesky factor of the free entries' C gains rows one by one; rotations remove a row.
struct NonNegative {
  int* state;   // kFixed, kFree, or kTried: cannot be freed before x changes
  int* indices; // of the free entries, in the order of the factor's rows
  double* z;
  Matrix factor;
  int free_entries = 0;

  enum : int { kFixed, kFree, kTried };

  CS_HOST_DEVICE NonNegative(int size, Workspace& workspace)
      : state(workspace.integers(size)), indices(workspace.integers(size)),
        z(workspace.numbers(size)), factor(size, workspace) {}

  // Frees entry i, unless rounding makes its row of C linearly dependent on the free rows. `z` is
  // workspace.
  template <class Team> CS_HOST_DEVICE bool grow(const Team& team, const Correlations& c, int i) {
    const int n = free_entries;
    for (int k = team.lane(); k < n; k += team.lanes())
      z[k] = c(i, indices[k]);
    team.sync();
    solve_lower(team, factor, n, z);
    const double left = c(i, i) - dot(team, z, z, n);
    if (!(left > 0.25 * kRidge)) { // without rounding, at least kRidge
      if (team.lane() == 0)
        state[i] = kTried;
      team.sync();
      return false;
    }
    for (int k = team.lane(); k <= n; k += team.lanes())
      factor(n, k) = k < n ? z[k] : std::sqrt(left);
    if (team.lane() == 0) {
      indices[n] = i;
      state[i] = kFree;
    }
    free_entries = n + 1;
    team.sync();
    return true;
  }

  // Fixes the entry of row r. Once row r is removed, every row below has one entry beyond the
  // diagonal, which rotations clear.
  template <class Team> CS_HOST_DEVICE void shrink(const Team& team, int r) {
    const int n = --free_entries;
    const int removed = indices[r];
    for (int i = r; i < n; ++i) { // in order: each row moves onto the previous one
      const int moved = indices[i + 1];
      team.sync();
      for (int k = team.lane(); k <= i + 1; k += team.lanes())
        factor(i, k) = factor(i + 1, k);
      if (team.lane() == 0)
        indices[i] = moved;
    }
    if (team.lane() == 0)
      state[removed] = kFixed;
    team.sync();
    for (int k = r; k < n; ++k) {
      const double a = factor(k, k);
      const double b = factor(k, k + 1);
      const double length = std::sqrt(a * a + b * b);
      const double cosine = a / length;
      const double sine = b / length;
      team.sync();
      for (int i = k + team.lane(); i < n; i += team.lanes())
        rotate(factor(i, k), factor(i, k + 1), cosine, -sine);
      team.sync();
    }
  }

  template <class Team>
  CS_HOST_DEVICE void solve(const Team& team, const Correlations& c, const double* f, double* x) {
    const int size = c.size;
    free_entries = 0;
    for (int i = team.lane(); i < size; i += team.lanes()) {
      state[i] = kFixed;
      x[i] = 0;
    }
    team.sync();
    for (int round = 0; round < 8 * size + 16; ++round) {
      Least steepest; // of -slope
      for (int i = team.lane(); i < size; i += team.lanes()) {
        if (state[i] != kFixed)
          continue;
        double slope = f[i];
        double scale = std::fabs(f[i]);
        for (int k = 0; k < free_entries; ++k) {
          const int j = indices[k];
          slope -= c(i, j) * x[j];
          scale += std::fabs(c(i, j) * x[j]);
        }
        if (slope > kSlope * scale)
          steepest.compare(i, -slope);
      }
      const int entered = steepest.of_all(team).index;
      if (entered < 0)
        return;
      if (!grow(team, c, entered))
        continue;
      bool moved = false;
      while (free_entries > 0) {
        const int n = free_entries;
        for (int k = team.lane(); k < n; k += team.lanes())
          z[k] = f[indices[k]];
        team.sync();
        cholesky_solve(team, factor, n, z);
        // The longest step toward z that leaves no entry negative.
        Least blocking;
        for (int k = team.lane(); k < n; k += team.lanes())
          if (z[k] <= 0) {
            const double at = x[indices[k]];
            blocking.compare(k, at > 0 ? at / (at - z[k]) : 0);
          }
        blocking = blocking.of_all(team);
        const bool blocked = blocking.index >= 0;
        for (int k = team.lane(); k < n; k += team.lanes()) {
          double& at = x[indices[k]];
          at = !blocked ? z[k] : k == blocking.index ? 0 : at + blocking.number * (z[k] - at);
        }
        moved = moved || !blocked || blocking.number > 0;
        team.sync();
        if (!blocked)
          break;
        shrink(team, blocking.index);
      }
      for (int i = team.lane(); i < size; i += team.lanes())
        if (state[i] != kFree && (moved || i == entered))
          state[i] = moved ? kFixed : kTried;
      team.sync();
    }
  }
};

// Adjusts each gradient to the other original gradients, in random order, and sums the results. A
// lane changes one gradient at a time, stored in a row of `own` as weights of the original
// gradients. `begin(i)` returns a state for gradient i; `meet(state, i, j)` updates this state and
// own(i, j).
template <class Team, class Begin, class Meet>
CS_INLINE_SOLVER void in_random_order(const Team& team, const Gramian& g, std::uint64_t state,
                                      const Matrix& own, double* weights, Workspace workspace,
                                      const Begin& begin, const Meet& meet) {
  const std::uint64_t key = splitmix64(splitmix64(state) + static_cast<std::uint64_t>(g.index));
  const Matrix orders(g.tasks, workspace);
  for (int i = team.lane(); i < g.tasks; i += team.lanes()) {
    int* order = reinterpret_cast<int*>(orders.row(i));
    int others = 0;
    for (int j = 0; j < g.tasks; ++j) {
      own(i, j) = i == j ? 1 : 0;
      if (j != i)
        order[others++] = j;
    }
    auto of_gradient = begin(i);
    for (int n = others; n > 0; --n) { // Fisher-Yates, one step at a time
      const std::uint64_t drawn = splitmix64(key + static_cast<std::uint64_t>(i * g.tasks + n));
      const int k = static_cast<int>(drawn % static_cast<std::uint64_t>(n));
      const int j = order[k];
      order[k] = order[n - 1];
      meet(of_gradient, i, j);
    }
  }
  team.sync();
  for (int j = team.lane(); j < g.tasks; j += team.lanes()) {
    weights[j] = 0;
    for (int i = 0; i < g.tasks; ++i)
      weights[j] += own(i, j);
  }
}

// PCGrad (Yu et al. 2020): each gradient loses its component along every original gradient with
// which it conflicts.
template <class Team>
CS_INLINE_SOLVER void pcgrad(const Team& team, const Gramian& g, const Options& options,
                             double* weights, Workspace workspace) {
  const Matrix own(g.tasks, workspace);
  in_random_order(
      team, g, options.word, own, weights, workspace, [](int) { return 0; },
      [&](int, int i, int j) {
        const double conflict = dot(own.row(i), g.row(j), g.tasks);
        if (conflict < 0 && g(j, j) > 0)
          own(i, j) -= conflict / g(j, j);
      });
}

// GradVac (Wang et al. 2021): if a gradient's cosine with another original gradient is below its
// target, adds enough of the latter to reach the target. The targets are moving averages of the
// cosines.
template <class Team>
CS_INLINE_SOLVER void gradvac(const Team& team, const Gramian& g, const Options& options,
                              double* weights, Workspace workspace) {
  const Matrix own(g.tasks, workspace);
  in_random_order(
      team, g, options.word, own, weights, workspace,
      [&](int i) { return std::sqrt(std::fmax(g(i, i), 0.0)); },
      [&](double& length, int i, int j) {
        if (!(g(j, j) > 0) || !(length > kVanished * std::sqrt(g(i, i))))
          return;
        const double other = std::sqrt(g(j, j));
        const double product = dot(own.row(i), g.row(j), g.tasks) / length / other;
        const double cosine = std::fmax(-1.0, std::fmin(product, 1.0));
        double& target = options.similarities[i * g.tasks + j];
        const double wanted = std::fmin(target, kMostSimilar);
        if (cosine < wanted) {
          // Keeps the component orthogonal to g_j and adjusts the parallel one to reach the target.
          const double across = std::sqrt((1 - cosine) * (1 + cosine));
          const double sine = std::sqrt((1 - wanted) * (1 + wanted));
          own(i, j) += length / other * (wanted * across / sine - cosine);
          length *= across / sine;
        }
        target += options.rate * (cosine - target);
      });
}

// MGDA (Sener and Koltun 2018): the min-norm point of the gradients' convex hull. It is x / sum x,
// where x >= 0 minimizes 1/2 x'Gx - 1'x. A zero gradient is the min-norm point itself.
template <class Team>
CS_INLINE_SOLVER void mgda(const Team& team, const Gramian& g, const Options&, double* weights,
                           Workspace workspace) {
  const Correlations c(team, g, kRidge, workspace);
  if (c.size < g.tasks) {
    for (int i = team.lane(); i < g.tasks; i += team.lanes())
      weights[i] = g(i, i) > 0 ? 0 : 1.0 / (g.tasks - c.size);
    return;
  }
  double* f = workspace.numbers(c.size);
  double* x = workspace.numbers(c.size);
  NonNegative problem(c.size, workspace);
  // Inverse lengths, relative to the shortest gradient, so that the greatest is 1.
  double shortest = INFINITY;
  for (int i = team.lane(); i < c.size; i += team.lanes())
    shortest = std::fmin(shortest, c.length[i]);
  shortest = team.least(shortest);
  for (int i = team.lane(); i < c.size; i += team.lanes())
    f[i] = shortest / c.length[i];
  team.sync();
  problem.solve(team, c, f, x);
  const double total = dot(team, x, f, c.size);
  for (int i = team.lane(); i < c.size; i += team.lanes())
    weights[i] = x[i] * f[i] / total;
}

// UPGrad (Quinton and Rey 2024): the mean of the gradients, each projected onto the dual cone of
// all gradients: the vectors that conflict with none. The parts of the team take gradients in turn.
template <class Team>
CS_INLINE_SOLVER void upgrad(const Team& team, const Gramian& g, const Options&, double* weights,
                             Workspace workspace) {
  const Correlations c(team, g, kRidge, workspace);
  double* sums = workspace.numbers(team.parts() * c.size);
  double* own = sums + team.part() * c.size;
  workspace.numbers(team.part() * part_size(c.size)); // skips earlier parts' memory
  double* f = workspace.numbers(c.size);
  double* x = workspace.numbers(c.size);
  NonNegative problem(c.size, workspace);
  fill(team, own, c.size, 0);
  for (int i = team.part(); i < c.size; i += team.parts()) {
    for (int j = team.lane(); j < c.size; j += team.lanes())
      f[j] = -c(i, j);
    team.sync();
    problem.solve(team, c, f, x);
    for (int j = team.lane(); j < c.size; j += team.lanes())
      own[j] += x[j] * (c.length[i] / c.length[j]) / g.tasks;
  }
  team.sync_parts();
  if (team.part() > 0)
    return;
  fill(team, weights, g.tasks, 1.0 / g.tasks);
  team.sync();
  for (int j = team.lane(); j < c.size; j += team.lanes())
    for (int part = 0; part < team.parts(); ++part)
      weights[c.task[j]] += sums[part * c.size + j];
}

// CAGrad (Liu et al. 2021): maximizes min_i g_i.d for d = g_0 + w, where g_0 is the mean and w is a
// combination of the gradients with |w| <= r = c |g_0|. The shortest w for which the minimum is at
// least mu is a projection onto a polyhedron. Its length is convex in mu; the solution is the mu at
// which this length is r. If no direction descends for all tasks, mu is at most zero.
template <class Team>
CS_INLINE_SOLVER void cagrad(const Team& team, const Gramian& g, const Options& options,
                             double* weights, Workspace workspace) {
  const double c = options.number();
  const int tasks = g.tasks;
  fill(team, weights, tasks, 1.0 / tasks);
  double* along = workspace.numbers(tasks); // g_i.g_0
  double square = 0;
  for (int i = team.lane(); i < tasks; i += team.lanes()) {
    along[i] = 0;
    for (int j = 0; j < tasks; ++j)
      along[i] += g(i, j) / tasks;
    square += along[i] / tasks;
  }
  square = team.sum(square);
  const Correlations correlations(team, g, kRidge, workspace);
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
  fill(team, f, size, 1);
  team.sync();
  problem.solve(team, correlations, f, x);
  double inverse = 0; // 1 / the smallest squared norm in the hull of the unit gradients
  double low = INFINITY;
  double high = INFINITY;
  for (int i = team.lane(); i < size; i += team.lanes()) {
    const double b = along[correlations.task[i]];
    const double length = correlations.length[i];
    inverse += x[i];
    low = std::fmin(low, b);
    high = std::fmin(high, b + radius * length);
    p[i] = 1 / length;
    q[i] = b / length;
  }
  const bool stationary = size < tasks || team.sum(inverse) > kStationary;
  low = team.least(low);
  high = team.least(high);
  double mu = stationary ? std::fmin(high, 0.0) : high;
  high = mu;
  for (int round = 0; round < 64; ++round) {
    for (int i = team.lane(); i < size; i += team.lanes())
      f[i] = mu * p[i] - q[i];
    team.sync();
    problem.solve(team, correlations, f, x);
    const double length = std::sqrt(std::fmax(dot(team, f, x, size), 0.0)); // f'x = x'Cx
    if (length > radius)
      high = mu;
    else
      low = mu;
    if (std::fabs(length - radius) <= 1e-12 * radius || (round == 0 && length <= radius) ||
        high - low <= 1e-15 * (std::fabs(high) + std::fabs(low)))
      break;
    // While the same entries are free, length^2 = pp mu^2 - 2 pq mu + qq.
    const int n = problem.free_entries;
    for (int k = team.lane(); k < n; k += team.lanes()) {
      free_p[k] = p[problem.indices[k]];
      free_q[k] = q[problem.indices[k]];
      solved[k] = free_p[k];
    }
    team.sync();
    cholesky_solve(team, problem.factor, n, solved);
    const double pp = dot(team, solved, free_p, n);
    const double pq = dot(team, solved, free_q, n);
    team.sync();
    for (int k = team.lane(); k < n; k += team.lanes())
      solved[k] = free_q[k];
    team.sync();
    cholesky_solve(team, problem.factor, n, solved);
    const double qq = dot(team, solved, free_q, n);
    const double root =
        (pq + std::sqrt(std::fmax(pq * pq - pp * (qq - radius * radius), 0.0))) / pp;
    mu = n > 0 && root > low && root < high ? root : 0.5 * (low + high);
  }
  for (int i = team.lane(); i < size; i += team.lanes())
    weights[correlations.task[i]] += x[i] / correlations.length[i];
}

// The length of a Newton step that roughly minimizes Nash-MTL's objective along the step. shares:
// step / v. A damped Newton method in one dimension keeps every 1 - length * share, and therefore
// every v, positive.
template <class Team>
CS_INLINE_SOLVER double nash_length(const Team& team, const double* shares, int n,
                                    double decrement) {
  double sum = 0;
  double squares = 0;
  for (int i = team.lane(); i < n; i += team.lanes()) {
    sum += shares[i];
    squares += shares[i] * shares[i];
  }
  // step'C v and step'C step, because (C + diag(v^-2)) step = slope = C v - 1 / v.
  const double linear = decrement * decrement + team.sum(sum);
  const double quadratic = std::fmax(decrement * decrement - team.sum(squares), 0.0);
  double length = 1 / (1 + decrement);
  for (int turn = 0; turn < 8; ++turn) {
    double slope = 0;
    double curvature = 0;
    for (int i = team.lane(); i < n; i += team.lanes()) {
      const double share = shares[i] / (1 - length * shares[i]);
      slope += share;
      curvature += share * share;
    }
    slope = team.sum(slope) + length * quadratic - linear;
    curvature = team.sum(curvature) + quadratic;
    const double left = std::fabs(slope) / std::sqrt(curvature);
    length -= slope / curvature * (left < kNashFull ? 1 : 1 / (1 + left));
    if (left < kNashFull)
      break;
  }
  return length;
}

// Solves C v = 1 / v for v > 0, i.e. minimizes 1/2 v'Cv - sum log v_i. The function is
// self-concordant, so damped Newton steps converge from any start. With the best length for each
// step, linearly dependent gradients need only a fifth of the rounds.
template <class Team>
CS_INLINE_SOLVER void bargain(const Team& team, const Correlations& c, double* v,
                              const Matrix& hessian, Workspace workspace) {
  const int n = c.size;
  double* step = workspace.numbers(n);
  double* slope = workspace.numbers(n);
  fill(team, v, n, 1);
  team.sync();
  double before = 1;
  for (int round = 0; round < 100; ++round) {
    for (int i = team.lane(); i < n; i += team.lanes()) {
      for (int j = 0; j <= i; ++j)
        hessian(i, j) = c(i, j);
      hessian(i, i) += 1 / (v[i] * v[i]);
      slope[i] = dot(c.matrix.row(i), v, n) - 1 / v[i];
      step[i] = slope[i];
    }
    team.sync();
    cholesky(team, hessian, n);
    cholesky_solve(team, hessian, n, step);
    const double decrement = std::sqrt(std::fmax(dot(team, slope, step, n), 0.0));
    double length = 1;
    if (!(decrement < kNashFull)) {
      for (int i = team.lane(); i < n; i += team.lanes())
        slope[i] = step[i] / v[i];
      length = nash_length(team, slope, n, decrement);
    }
    for (int i = team.lane(); i < n; i += team.lanes())
      v[i] -= length * step[i];
    team.sync();
    // Full Newton steps roughly square the decrement. When it no longer halves, only rounding error
    // is left: stop.
    if (decrement < kNashStop || (before < kNashFull && !(decrement < before / 2)))
      break;
    before = decrement;
  }
}

// Nash-MTL (Navon et al. 2022): the a > 0 with G a = 1 / a. A zero gradient has weight 0.
template <class Team>
CS_INLINE_SOLVER void nash_mtl(const Team& team, const Gramian& g, const Options&, double* weights,
                               Workspace workspace) {
  const Correlations c(team, g, kNashRidge, workspace);
  fill(team, weights, g.tasks, 0);
  double* v = workspace.numbers(c.size);
  const Matrix hessian(c.size, workspace);
  bargain(team, c, v, hessian, workspace);
  for (int i = team.lane(); i < c.size; i += team.lanes())
    weights[c.task[i]] = v[i] / c.length[i];
}

// The length of a Newton step that roughly minimizes FairGrad's objective along the step. At the
// minimum, -linear + length * quadratic + sum parts * shares (1 - length * shares)^-power is zero.
template <class Team>
CS_INLINE_SOLVER double fair_length(const Team& team, const double* shares, const double* parts,
                                    int n, double power, double linear, double quadratic) {
  double greatest = 0;
  for (int i = team.lane(); i < n; i += team.lanes())
    greatest = std::fmax(greatest, shares[i]);
  greatest = -team.least(-greatest);
  double low = 0;
  double high = greatest > 0 ? 1 / greatest : INFINITY;
  double length = std::fmin(1.0, 0.9 * high);
  for (int turn = 0; turn < 30; ++turn) {
    double slope = 0;
    double curvature = 0;
    for (int i = team.lane(); i < n; i += team.lanes()) {
      const double left = 1 - length * shares[i];
      const double part = parts[i] * shares[i] * std::exp(-power * std::log(left));
      slope += part;
      curvature += power * part * shares[i] / left;
    }
    slope = team.sum(slope) + length * quadratic - linear;
    curvature = team.sum(curvature) + quadratic;
    if (std::fabs(slope) <= 0.1 * linear)
      break;
    (slope > 0 ? high : low) = length;
    const double next = length - slope / curvature;
    length = next > low && next < high ? next : high < INFINITY ? 0.5 * (low + high) : 2 * length;
  }
  return length;
}

// FairGrad (Ban and Ji 2024): the w > 0 with G w = w^-p, where p = 1 / alpha. With w = v / d this
// becomes C v = b v^-p, where b = d^(p-1). For p >= 1 the unknown is v, which minimizes
// 1/2 v'Cv + sum b v^(1-p) / (p-1). For p < 1 the unknown is s = C v, which minimizes
// 1/2 s'C^-1 s + sum k s^(1-alpha) / (alpha-1), where k = b^alpha; Newton steps do not need C^-1.
// Both objectives grow without bound as an unknown approaches zero, so Newton's method converges
// fast, and Nash-MTL's solution is a feasible start for both.
template <class Team>
CS_INLINE_SOLVER void fair_grad(const Team& team, const Gramian& g, const Options& options,
                                double* weights, Workspace workspace) {
  const Correlations c(team, g, kNashRidge, workspace);
  const int n = c.size;
  fill(team, weights, g.tasks, 0);
  const double alpha = options.number();
  const bool of_sums = alpha > 1; // whether the unknown is s; otherwise, it is v
  const double power = of_sums ? alpha : 1 / alpha;
  const Matrix hessian(n, workspace);
  double* v = workspace.numbers(n);
  double* s = workspace.numbers(n);
  double* b = workspace.numbers(n);
  double* target = workspace.numbers(n);
  double* diagonal = workspace.numbers(n);
  double* step = workspace.numbers(n);
  double* image = workspace.numbers(n); // C step
  bargain(team, c, v, hessian, workspace);
  // Lengths are relative to the length with the greatest b.
  double unit = INFINITY;
  for (int i = team.lane(); i < n; i += team.lanes())
    unit = std::fmin(unit, of_sums ? c.length[i] : -c.length[i]);
  unit = std::fabs(team.least(unit));
  double* x = of_sums ? s : v;
  const double* y = of_sums ? v : s;
  double square = 0;
  double sum = 0;
  for (int i = team.lane(); i < n; i += team.lanes()) {
    s[i] = 1 / v[i];
    const double exponent = of_sums ? 1 - alpha : power - 1;
    b[i] = std::fmax(std::pow(c.length[i] / unit, exponent), kFairLeast);
    square += 1; // v_i s_i
    sum += b[i] * std::pow(x[i], 1 - power);
  }
  square = team.sum(square);
  sum = team.sum(sum);
  // Starts at the best multiple of Nash-MTL's solution.
  const double scale = n > 0 ? std::pow(sum / square, 1 / (1 + power)) : 1;
  team.sync();
  for (int i = team.lane(); i < n; i += team.lanes()) {
    v[i] *= scale;
    s[i] *= scale;
  }
  team.sync();
  double before = INFINITY;
  for (int round = 0; round < 100; ++round) {
    for (int i = team.lane(); i < n; i += team.lanes()) {
      target[i] = b[i] * std::exp(-power * std::log(x[i])); // the value that y should have
      diagonal[i] =
          of_sums ? std::fmin(x[i] / (power * target[i]), kFairMost) : power * target[i] / x[i];
      step[i] = (target[i] - y[i]) * (of_sums ? diagonal[i] : 1);
      for (int j = 0; j <= i; ++j)
        hessian(i, j) = c(i, j);
      hessian(i, i) += diagonal[i];
    }
    team.sync();
    cholesky(team, hessian, n);
    cholesky_solve(team, hessian, n, step);
    double largest = 0;
    double quadratic = 0;
    double linear = 0;
    for (int i = team.lane(); i < n; i += team.lanes()) {
      image[i] = dot(c.matrix.row(i), step, n);
      quadratic += image[i] * step[i];
      linear -= s[i] * step[i];
      // From here on, `diagonal` and `target` hold `shares` and `parts` of `fair_length`.
      diagonal[i] = -(of_sums ? image[i] : step[i]) / x[i];
      target[i] *= x[i];
      largest = std::fmax(largest, std::fabs(diagonal[i]));
    }
    largest = -power * team.least(-largest);
    quadratic = team.sum(quadratic);
    linear = team.sum(linear);
    team.sync();
    const double length =
        largest < kFairFull ? 1 : fair_length(team, diagonal, target, n, power, linear, quadratic);
    for (int i = team.lane(); i < n; i += team.lanes()) {
      v[i] += length * step[i];
      s[i] += length * image[i];
    }
    team.sync();
    if (!(largest >= kFairStop) || (before < kFairFull && !(largest < before / 2)))
      break;
    before = largest;
  }
  const double back = std::pow(unit, (1 / alpha - 1) / (1 / alpha + 1));
  for (int i = team.lane(); i < n; i += team.lanes()) {
    const double found = of_sums ? b[i] * std::exp(-power * std::log(s[i])) : v[i];
    weights[c.task[i]] = back * found / c.length[i];
  }
}

// out += factor * (v'1) v, where v is eigenvector k.
template <class Team>
CS_INLINE_SOLVER void add_component_of_ones(const Team& team, const Matrix& vectors, int n, int k,
                                            double factor, double* out) {
  double part = 0;
  for (int i = team.lane(); i < n; i += team.lanes())
    part += vectors(k, i);
  part = team.sum(part);
  for (int i = team.lane(); i < n; i += team.lanes())
    out[i] += vectors(k, i) * part * factor;
}

// Eigenvalues up to this tolerance count as zero.
CS_INLINE_SOLVER double rank_tolerance(const Matrix& diagonal, int n) {
  double greatest = 0;
  for (int i = 0; i < n; ++i)
    greatest = std::fmax(greatest, diagonal(i, i));
  return greatest * n * kEpsilon;
}

// Computes y = C^+ 1 and, unless `cosines` is null, cosines = C y, which are all ones if C is
// regular. Replaces C by a matrix with its eigenvalues on the diagonal.
template <class Team>
CS_INLINE_SOLVER void equal_cosines(const Team& team, const Correlations& c, double* y,
                                    double* cosines, Workspace workspace) {
  const int n = c.size;
  const Matrix vectors(n, workspace);
  eigen(team, c.matrix, n, vectors);
  const double tolerance = 8 * rank_tolerance(c.matrix, n);
  fill(team, y, n, 0);
  if (cosines != nullptr)
    fill(team, cosines, n, 0);
  for (int k = 0; k < n; ++k)
    if (c(k, k) > tolerance) {
      add_component_of_ones(team, vectors, n, k, 1 / c(k, k), y);
      if (cosines != nullptr)
        add_component_of_ones(team, vectors, n, k, 1, cosines);
    }
}

// ConFIG (Liu et al. 2024): the update has the same cosine to every gradient, and its length is the
// sum of the gradients' components along it. If no direction has equal cosines, the least-squares
// direction is used; if it vanishes, the weights are zero.
template <class Team>
CS_INLINE_SOLVER void config(const Team& team, const Gramian& g, const Options&, double* weights,
                             Workspace workspace) {
  const Correlations c(team, g, 0, workspace);
  const int n = c.size;
  fill(team, weights, g.tasks, 0);
  double* y = workspace.numbers(n);
  double* cosines = workspace.numbers(n);
  equal_cosines(team, c, y, cosines, workspace);
  double size = 0;
  double square = 0;
  double along = 0;
  for (int i = team.lane(); i < n; i += team.lanes()) {
    size += cosines[i] * cosines[i];
    square += y[i] * cosines[i];
    along += c.length[i] * cosines[i];
  }
  size = team.sum(size);
  square = team.sum(square);
  along = team.sum(along);
  team.sync();
  if (size > kNoCosine * n)
    for (int i = team.lane(); i < n; i += team.lanes())
      weights[c.task[i]] = along / square * y[i] / c.length[i];
}

// IMTL-G (Liu et al. 2021): the update has the same component along every gradient, and the weights
// sum to one. If several weights qualify, the norm of weights times lengths is minimal; if the
// weights cannot sum to one, they are zero.
template <class Team>
CS_INLINE_SOLVER void imtl_g(const Team& team, const Gramian& g, const Options&, double* weights,
                             Workspace workspace) {
  const Correlations c(team, g, 0, workspace);
  const int n = c.size;
  fill(team, weights, g.tasks, 0);
  double* y = workspace.numbers(n);
  equal_cosines(team, c, y, nullptr, workspace);
  double total = 0;
  double size = 0;
  for (int i = team.lane(); i < n; i += team.lanes()) {
    y[i] *= c.length[0] / c.length[i];
    total += y[i];
    size += std::fabs(y[i]);
  }
  total = team.sum(total);
  size = team.sum(size);
  team.sync();
  if (std::fabs(total) > kZeroSum * size)
    for (int i = team.lane(); i < n; i += team.lanes())
      weights[c.task[i]] = y[i] / total;
}

enum class AlignedScale : std::uint64_t { kMin = 0, kMedian = 1, kRmse = 2 };

// Aligned-MTL (Senushkin et al. 2023): the sum of the gradients, after their principal components
// are scaled to one length: the smallest, the lower median or the root mean square of the
// components' lengths. If all gradients are zero, the weights are ones.
template <class Team>
CS_INLINE_SOLVER void aligned_mtl(const Team& team, const Gramian& g, const Options& options,
                                  double* weights, Workspace workspace) {
  const auto scale = static_cast<AlignedScale>(options.word);
  const int n = g.tasks;
  const Matrix a(n, workspace);
  const Matrix vectors(n, workspace);
  for (int i = team.lane(); i < n; i += team.lanes())
    for (int j = 0; j < n; ++j)
      a(i, j) = g(i, j);
  team.sync();
  eigen(team, a, n, vectors);
  const double tolerance = rank_tolerance(a, n);
  int rank = 0;
  double mean = 0;
  for (int k = 0; k < n; ++k)
    if (a(k, k) > tolerance) {
      ++rank;
      mean += a(k, k);
    }
  fill(team, weights, n, rank == 0 ? 1 : 0);
  if (rank == 0)
    return;
  const int wanted = scale == AlignedScale::kMin ? 0 : (rank - 1) / 2; // in ascending order
  double length = 0;
  for (int k = team.lane(); k < n; k += team.lanes()) {
    if (!(a(k, k) > tolerance))
      continue;
    int before = 0;
    for (int i = 0; i < n; ++i)
      before += a(i, i) > tolerance && (a(i, i) < a(k, k) || (a(i, i) == a(k, k) && i < k));
    if (before == wanted)
      length = a(k, k);
  }
  length = scale == AlignedScale::kRmse ? mean / rank : team.sum(length);
  team.sync();
  for (int k = 0; k < n; ++k)
    if (a(k, k) > tolerance)
      add_component_of_ones(team, vectors, n, k, std::sqrt(length / a(k, k)), weights);
}

// Solves for one Gramian with one of the functions above; a non-finite Gramian gives NaN weights.
template <class Team, class Function>
CS_INLINE_SOLVER void solve_one(const Team& team, const SolverArguments& arguments, std::int64_t n,
                                double* memory, const Function& function) {
  const std::int64_t tasks = arguments.tasks;
  const Gramian gramian{arguments.gramians + n * tasks * tasks, arguments.tasks, n};
  double* weights = arguments.weights + n * tasks;
  double bad = 0;
  for (int i = team.lane(); i < arguments.tasks * arguments.tasks; i += team.lanes())
    if (!std::isfinite(gramian.data[i]))
      bad = 1;
  const Options options{
      advanced(arguments.option, arguments.counter), arguments.rate,
      arguments.similarities == nullptr ? nullptr : arguments.similarities + n * tasks * tasks};
  if (team.sum(bad) == 0)
    function(team, gramian, options, weights, Workspace(memory));
  else if (team.part() == 0)
    fill(team, weights, arguments.tasks, NAN);
}

// Calls run(function) with the function of a solver.
template <class Run> CS_INLINE_SOLVER void with_solver(Solver solver, const Run& run) {
  switch (solver) {
#define CS_SOLVER(name)                                                                            \
  case Solver::name:                                                                               \
    return run([](const auto& team, const Gramian& g, const Options& options, double* weights,     \
                  Workspace workspace) { name(team, g, options, weights, workspace); });
    CS_SOLVERS(CS_SOLVER)
#undef CS_SOLVER
  }
}

#undef CS_INLINE_SOLVER

} // namespace cs_kernels::solvers
