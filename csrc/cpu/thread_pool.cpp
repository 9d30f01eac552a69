#include "thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace cs_kernels::cpu {
namespace {

class ThreadPool {
public:
  explicit ThreadPool(pid_t owner) : owner_(owner) {}

  pid_t owner() const { return owner_; }

  // False, with nothing done, when another caller has the pool.
  bool try_run(int helpers, const std::function<void()>& work) {
    const std::unique_lock<std::mutex> turn(caller_, std::try_to_lock);
    if (!turn.owns_lock())
      return false;
    for (; size_ < helpers; ++size_)
      std::thread(&ThreadPool::serve, this).detach();
    {
      const std::scoped_lock lock(mutex_);
      work_ = &work;
      places_ = helpers;
      // Rounding and flush-to-zero are the caller's: the same bits on every thread.
      std::fegetenv(&environment_);
    }
    wake_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    places_ = 0;
    idle_.wait(lock, [this] { return running_ == 0; });
    work_ = nullptr;
    return true;
  }

private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return places_ > 0; });
      --places_;
      ++running_;
      const std::function<void()>* work = work_;
      const std::fenv_t environment = environment_;
      lock.unlock();
      std::fesetenv(&environment);
      (*work)();
      lock.lock();
      if (--running_ == 0)
        idle_.notify_one();
    }
  }

  const pid_t owner_;
  std::mutex caller_;
  int size_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  const std::function<void()>* work_ = nullptr;
  std::fenv_t environment_{};
  int places_ = 0;
  int running_ = 0;
};

// Never destroyed: its threads outlive every static object. A forked child has none of the threads
// and may have inherited a locked mutex, so it leaves the parent's pool alone and makes its own.
ThreadPool& pool_of_this_process() {
  static std::mutex mutex;
  static ThreadPool* pool = nullptr;
  const pid_t process = getpid();
  const std::scoped_lock lock(mutex);
  if (pool == nullptr || pool->owner() != process)
    pool = new ThreadPool(process);
  return *pool;
}

} // namespace

void run_parallel(int threads, const std::function<void()>& work) {
  if (threads <= 1 || !pool_of_this_process().try_run(threads - 1, work))
    work();
}

} // namespace cs_kernels::cpu
