// The scheduler of the emulation, and the module that replaces _C.cuda in tests.
#include <platform.h>
#include <pybind11/pybind11.h>
#include <sanitizer/common_interface_defs.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "module.h"

namespace cs_kernels::cuda::emulation {
namespace {

constexpr int kWarp = 32;
constexpr std::size_t kStack = 256 << 10;

enum class State { kReady, kPausing, kAtBarrier, kExchanging, kDone };

#ifdef __x86_64__
using Context = void*; // the top of a stack, where its registers are saved

// Switches to another stack. swapcontext would make a system call, and under the sanitizer would
// also clear the shadow memory of the whole stack.
[[gnu::naked, gnu::noipa]] void enter(Context& /* left */, const Context& /* entered */) {
  asm("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n"
      "mov %rsp, (%rdi); mov (%rsi), %rsp\n"
      "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}

void begin_with(Context& context, char* stack, void (*function)()) {
  void** top = reinterpret_cast<void**>(stack + kStack) - 8;
  std::fill_n(top, 8, nullptr);
  top[6] = reinterpret_cast<void*>(function); // above the six registers
  context = static_cast<void*>(top);
}
#else
using Context = ucontext_t;

void enter(Context& left, const Context& entered) { swapcontext(&left, &entered); }

void begin_with(Context& context, char* stack, void (*function)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStack;
  makecontext(&context, function, 0);
}
#endif

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "emulation: %s\n", why);
  std::abort();
}

struct Block;

// A thread of a block.
struct Fiber {
  Block* block = nullptr;
  int index = 0;
  State state = State::kDone;
  double value = 0; // sent or received in an exchange
  int mask = 0;
  Context context{};
  void* fake_stack = nullptr;
  std::unique_ptr<char[]> stack{new char[kStack]};
};

struct Block {
  std::int64_t index = -1; // -1 if no block is resident
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::unique_ptr<unsigned char[]> shared;
  std::size_t ahead = 0; // first thread of the warp that currently runs ahead
};

std::mt19937 random_numbers;
std::int64_t most_resident = 1;
const std::function<void()>* body = nullptr;
Fiber* current = nullptr;
Context scheduler{};
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_size = 0;

int drawn(int below) { return static_cast<int>(random_numbers() % static_cast<unsigned>(below)); }

void to_scheduler(State state) {
  Fiber& fiber = *current;
  fiber.state = state;
  __sanitizer_start_switch_fiber(&fiber.fake_stack, scheduler_stack, scheduler_stack_size);
  enter(fiber.context, scheduler);
  __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
}

void to_fiber(Fiber& fiber) {
  current = &fiber;
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack.get(), kStack);
  enter(scheduler, fiber.context);
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
  current = nullptr;
}

// A fiber is reused for the next block.
void fiber_main() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
  for (;;) {
    (*body)();
    to_scheduler(State::kDone);
  }
}

void begin(Block& block, std::int64_t index, int threads, std::size_t shared_bytes) {
  block.index = index;
  block.shared.reset(new unsigned char[shared_bytes + 1]);
  std::memset(block.shared.get(), 0xff, shared_bytes);
  if (block.fibers.size() != static_cast<std::size_t>(threads))
    block.fibers.clear();
  while (block.fibers.size() < static_cast<std::size_t>(threads)) {
    auto& fiber = *block.fibers.emplace_back(new Fiber);
    fiber.block = &block;
    fiber.index = static_cast<int>(block.fibers.size()) - 1;
    begin_with(fiber.context, fiber.stack.get(), fiber_main);
  }
  for (const auto& fiber : block.fibers)
    fiber->state = State::kReady;
}

// Completes an exchange if all lanes of the warp have reached it.
bool exchange(Block& block, std::size_t first) {
  double values[kWarp];
  for (std::size_t lane = 0; lane < kWarp; ++lane) {
    if (first + lane >= block.fibers.size())
      fail("only a part of a warp takes part in an exchange");
    const Fiber& fiber = *block.fibers[first + lane];
    if (fiber.state != State::kExchanging)
      return false;
    if (fiber.mask != block.fibers[first]->mask)
      fail("the lanes of a warp exchange with different masks");
    values[lane] = fiber.value;
  }
  for (std::size_t lane = 0; lane < kWarp; ++lane) {
    Fiber& fiber = *block.fibers[first + lane];
    fiber.value = values[lane ^ static_cast<std::size_t>(fiber.mask)];
    fiber.state = State::kReady;
  }
  return true;
}

// The threads of a warp that can run.
std::vector<Fiber*> runnable_of(Block& block, std::size_t first) {
  std::vector<Fiber*> runnable;
  for (std::size_t i = first; i < std::min(first + kWarp, block.fibers.size()); ++i)
    if (block.fibers[i]->state == State::kReady || block.fibers[i]->state == State::kPausing)
      runnable.push_back(block.fibers[i].get());
  return runnable;
}

// Runs the threads of a warp until they wait; returns whether any progressed beyond polling a flag.
bool advance_warp(Block& block, std::size_t first) {
  std::vector<Fiber*> runnable = runnable_of(block, first);
  std::shuffle(runnable.begin(), runnable.end(), random_numbers);
  bool moved = false;
  for (Fiber* fiber : runnable) {
    to_fiber(*fiber);
    moved = moved || fiber->state != State::kPausing;
  }
  return (block.fibers[first]->state == State::kExchanging && exchange(block, first)) || moved;
}

// With several resident blocks, runs one warp, often the same one repeatedly: running ahead reveals
// missing synchronization. With one resident block, runs every warp.
bool advance(Block& block) {
  const std::size_t threads = block.fibers.size();
  std::vector<std::size_t> warps;
  for (std::size_t first = 0; first < threads; first += kWarp)
    if (!runnable_of(block, first).empty())
      warps.push_back(first);
  bool moved = false;
  if (most_resident > 1 && !warps.empty()) {
    const bool can_go_on = std::find(warps.begin(), warps.end(), block.ahead) != warps.end();
    if (!can_go_on || drawn(8) == 0)
      block.ahead = warps[static_cast<std::size_t>(drawn(static_cast<int>(warps.size())))];
    moved = advance_warp(block, block.ahead);
    if (warps.size() > 1)
      return moved; // other warps can run, so no barrier is complete
  } else {
    for (const std::size_t first : warps)
      moved = advance_warp(block, first) || moved;
  }
  std::size_t waiting = 0;
  std::size_t done = 0;
  for (const auto& fiber : block.fibers) {
    waiting += fiber->state == State::kAtBarrier;
    done += fiber->state == State::kDone;
  }
  if (waiting > 0 && done > 0)
    fail("a thread ended while others wait at a barrier");
  if (waiting == threads)
    for (const auto& fiber : block.fibers)
      fiber->state = State::kReady;
  if (done == threads)
    block.index = -1;
  return moved;
}

} // namespace

int thread_index() { return current->index; }
int block_size() { return static_cast<int>(current->block->fibers.size()); }
std::int64_t block_index() { return current->block->index; }
unsigned char* shared_memory() { return current->block->shared.get(); }
void synchronize_block() { to_scheduler(State::kAtBarrier); }
void pause() { to_scheduler(State::kPausing); }
double exchanged(double value, int mask) {
  Fiber& fiber = *current;
  fiber.value = value;
  fiber.mask = mask;
  to_scheduler(State::kExchanging);
  return fiber.value;
}

std::int64_t resident_blocks() { return most_resident; }

int run(std::int64_t blocks, int threads, std::size_t shared_bytes,
        const std::function<void()>& thread) {
  static std::vector<std::unique_ptr<Block>> resident;
  while (resident.size() < static_cast<std::size_t>(most_resident))
    resident.emplace_back(new Block);
  body = &thread;
  std::vector<std::int64_t> left(static_cast<std::size_t>(blocks));
  std::iota(left.rbegin(), left.rend(), 0);
  if (most_resident > 1)
    std::shuffle(left.begin(), left.end(), random_numbers);
  int idle = 0;
  const Block* stopped = nullptr; // paused for a while, because a GPU may delay any block
  int stopped_for = 0;
  for (;;) {
    if (stopped_for > 0)
      --stopped_for;
    else if (most_resident > 1 && drawn(500) == 0)
      stopped_for = drawn(3000);
    std::vector<Block*> running;
    for (std::size_t i = 0; i < static_cast<std::size_t>(most_resident); ++i) {
      Block& block = *resident[i];
      if (block.index < 0 && !left.empty()) {
        begin(block, left.back(), threads, shared_bytes);
        left.pop_back();
      }
      if (block.index >= 0)
        running.push_back(&block);
    }
    if (running.empty())
      return 0;
    Block& block = *running[static_cast<std::size_t>(drawn(static_cast<int>(running.size())))];
    if (stopped_for == 0)
      stopped = &block;
    else if (&block == stopped && running.size() > 1)
      continue;
    idle = advance(block) ? 0 : idle + 1;
    if (idle > 10000)
      fail("every thread waits");
  }
}

} // namespace cs_kernels::cuda::emulation

PYBIND11_MODULE(_emulation, module) {
  namespace emulation = cs_kernels::cuda::emulation;
  define_cuda(module);
  module.def(
      "order",
      [](unsigned seed, std::int64_t resident) {
        emulation::random_numbers.seed(seed);
        emulation::most_resident = resident;
      },
      pybind11::arg("seed"), pybind11::arg("resident"),
      "Sets the number of resident blocks, and the seed of the order of blocks and threads.");
}
