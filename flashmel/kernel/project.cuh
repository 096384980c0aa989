// Stage 3: mel filters times powers. A warp takes one filter of all the tile's frames at a time: lanes are frames, and
// where the tile has fewer than 32 frames, slices of the filter's bins as well.
#pragma once

template <class Config>
__device__ inline void project(const Params& params, const float* powers) {
  constexpr int frames = Config::frames_per_block, slices = 32 / frames;
  const int lane = threadIdx.x % 32, frame = lane % frames, slice = lane / frames;
  const float* power = powers + frame * Config::power_stride;
  const long long t = block_first_frame<Config>() + frame;
  const bool stored = slice == 0 && t < params.frames;
  for (int m = threadIdx.x / 32; m < params.n_mels; m += Config::threads / 32) {
    const int4 filter = params.filters[m];  // first bin, number of bins, place of the first weight
    const float* weights = params.weights + filter.z;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = slice; i < filter.y; i += slices) sum += weights[i] * power[filter.x + i];
#pragma unroll
    for (int offset = frames; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (stored) {
      const long long at = (block_row() * params.n_mels + m) * params.frames + t;
      static_cast<typename Config::Output*>(params.mel)[at] = from_float<typename Config::Output>(sum);
    }
  }
}
