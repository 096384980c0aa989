// waveform -> load -> fft -> project -> epilogue -> mel, for one tile of frames_per_block frames at a time.
#include <cufftdx.hpp>

enum class PadMode { reflect, constant, replicate, circular };

// Run-time arguments. driver.py packs the same fields in the same order.
struct Params {
  const void* waveform;   // (rows, n_samples), rows row_stride samples apart
  void* mel;              // (rows, n_mels, frames), contiguous
  const float4* tables;   // window, twiddle and separation factors: tables.py, kernel_tables
  const int4* filters;    // (n_mels,): first bin, rounds, place of the first weight
  const float* weights;   // of all filters, one after another, in the order of project.cuh's reads
  long long n_samples, row_stride, frames, rows;
  int n_mels;
};

#include "config.h"

// The grid is (tiles of a row, rows, more rows): no division, and nothing to keep in registers.
__device__ inline long long block_row() { return (long long)blockIdx.z * gridDim.y + blockIdx.y; }
template <class Config>
__device__ inline long long block_first_frame() {
  return (long long)blockIdx.x * Config::frames_per_block;
}

#include "load.cuh"
#include "epilogue.cuh"
#include "project.cuh"
#include "fft.cuh"

// One tile a block: in a loop over tiles the compiler keeps every stage's addresses in registers, and spills.
extern "C" __global__ void __launch_bounds__(Config::threads, Config::min_blocks)
    mel_spectrogram(const __grid_constant__ Params params) {
  extern __shared__ float4 shared_memory[];  // float4 for its alignment
  unsigned char* const shared = reinterpret_cast<unsigned char*>(shared_memory);
  if (block_row() >= params.rows) return;
  load<Config>(params, reinterpret_cast<float*>(shared));
  const Columns<Config> mine(params.tables);
  __syncthreads();
  fft<Config>(mine, params.tables, shared);
  project<Config>(params, reinterpret_cast<const float*>(shared));
}
