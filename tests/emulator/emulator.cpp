// Runs a unit of flashmel/kernel, its blocks one after another, each with real threads. Built by tests/test_kernel_emulated.py.
#if defined BACKWARD
#include "backward.cu"
constexpr auto main_kernel = mel_spectrogram_backward;
#elif defined NORMALIZE
#include "normalize.cu"
constexpr auto main_kernel = normalize;
#else
#include "forward.cu"
constexpr auto main_kernel = mel_spectrogram;
#endif

float4 shared_memory[1 << 14];

void launch(void (*kernel)(Params), const Params* params, unsigned blocks, int block_threads) {
  blockDim = {unsigned(block_threads), 1, 1};
  gridDim = {blocks, 1, 1};
  for (unsigned block = 0; block < blocks; ++block) {
    std::barrier<> barrier(block_threads);
    block_barrier = &barrier;
    team_barriers.clear();
#ifndef NORMALIZE
    for (int team = 0; team < block_threads / Config::threads; ++team) team_barriers.push_back(std::make_unique<std::barrier<>>(Config::threads));
#endif
    warp_barriers.clear();
    for (int warp = 0; warp < block_threads / 32; ++warp) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    shuffle_values.assign(block_threads, 0.0f);
    std::memset(shared_memory, 0xff, sizeof shared_memory);  // NaN
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < blockDim.x; ++i)
      threads.emplace_back([=] {
        threadIdx = {i, 0, 0};
        blockIdx = {block, 0, 0};
        kernel(*params);
      });
    for (auto& thread : threads) thread.join();
  }
}

extern "C" void run(const Params* params, unsigned blocks, int block_threads) { launch(main_kernel, params, blocks, block_threads); }

#ifdef BACKWARD
extern "C" void fold(const Params* params, unsigned blocks, int block_threads) { launch(fold_edges, params, blocks, block_threads); }
#endif
