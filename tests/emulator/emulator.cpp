// Runs kernel.cu's blocks one after another, each with real threads. Built by tests/test_kernel_emulated.py.
#include "kernel.cu"

float4 shared_memory[1 << 14];

extern "C" void run(const Params* params, unsigned x, unsigned y, unsigned z) {
  gridDim = {x, y, z};
  for (unsigned block = 0; block < x * y * z; ++block) {
    std::barrier<> barrier(Config::threads);
    block_barrier = &barrier;
    warp_barriers.clear();
    for (int warp = 0; warp < Config::threads / 32; ++warp) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    shuffle_values.assign(Config::threads, 0.0f);
    std::memset(shared_memory, 0xff, sizeof shared_memory);  // NaN
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < unsigned(Config::threads); ++i)
      threads.emplace_back([=] {
        threadIdx = {i, 0, 0};
        blockIdx = {block % x, block / x % y, block / x / y};
        mel_spectrogram(*params);
      });
    for (auto& thread : threads) thread.join();
  }
}
