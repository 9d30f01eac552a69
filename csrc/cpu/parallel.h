#pragma once

#include <cfenv>

namespace cs_kernels::cpu {

// Runs `work` once on each of `threads` threads; `work` claims pieces through an atomic counter.
// Uses OpenMP's threads, as PyTorch does: they are still awake after PyTorch's last operator, and a
// second thread pool would compete with them for the cores. Every thread adopts the caller's
// rounding and flush-to-zero modes, so that results do not depend on the number of threads. A build
// without OpenMP has one thread.
template <class Work> void run_parallel(int threads, const Work& work) {
#ifdef _OPENMP
  if (threads <= 1) {
    work();
    return;
  }
  std::fenv_t caller;
  std::fegetenv(&caller);
#pragma omp parallel num_threads(threads)
  {
    std::fenv_t before;
    std::fegetenv(&before);
    std::fesetenv(&caller);
    work();
    std::fesetenv(&before);
  }
#else
  static_cast<void>(threads);
  work();
#endif
}

} // namespace cs_kernels::cpu
