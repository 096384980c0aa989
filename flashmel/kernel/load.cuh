// Stage 1: the samples of a tile's frames, padding resolved and converted to float, from global to shared memory.
#pragma once

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(short x) { return float(x) * (1.0f / 32768.0f); }
#ifdef __CUDA_FP16_H__
__device__ inline float to_float(__half x) { return __half2float(x); }
#endif
#ifdef __CUDA_BF16_H__
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
#endif

// Place of staged sample p. Every hop of samples is followed by `skew` unused words, so that the same sample of
// neighbouring frames lies in different shared-memory banks.
template <class Config>
__device__ constexpr int staged(int p) {
  return p + p / Config::hop_length * Config::skew;
}

// Index into the waveform of position j of the signal after `pad`, or -1 where the padded signal is 0.
// Twin of StftSpec.source_index in spec.py.
template <class Config>
__device__ inline long long source_index(long long j, long long n_samples) {
  const long long length = n_samples + 2ll * Config::pad;
  if constexpr (Config::pad_mode == PadMode::reflect) {
    j = j < 0 ? -j : j;
    j = j >= length ? 2 * (length - 1) - j : j;
  } else if constexpr (Config::pad_mode == PadMode::replicate) {
    j = j < 0 ? 0 : j >= length ? length - 1 : j;
  } else if constexpr (Config::pad_mode == PadMode::circular) {
    j = j < 0 ? j + length : j >= length ? j - length : j;
  } else {
    if (j < 0 || j >= length) return -1;
  }
  j -= Config::pad;
  return j >= 0 && j < n_samples ? j : -1;
}

template <class Config>
__device__ inline void load(const Params& params, float* samples) {
  using Input = typename Config::Input;
  constexpr int span = (Config::frames_per_block - 1) * Config::hop_length + Config::n_fft;
  const Input* x = static_cast<const Input*>(params.waveform) + block_row() * params.row_stride;
  const long long j0 = block_first_frame<Config>() * Config::hop_length - Config::margin;  // of the span's first sample, after `pad`
  const long long i0 = j0 - Config::pad;                                   // the same sample in the waveform
  constexpr long long crop = Config::pad < 0 ? -Config::pad : 0;

  if (i0 >= crop && i0 + span <= params.n_samples - crop) {  // no padding in this tile
    x += i0;
    int done = 0;
    if constexpr (Config::skew == 0 ? Config::sample_stride % 2 == 0 : Config::hop_length % 4 == 0) {
      struct alignas(4 * sizeof(Input)) Quad {
        Input v[4];
      };
      if (reinterpret_cast<unsigned long long>(x) % sizeof(Quad) == 0) {
        done = span / 4 * 4;
        for (int p = 4 * threadIdx.x; p < done; p += 4 * Config::threads) {
          const Quad q = *reinterpret_cast<const Quad*>(x + p);
          float2* to = reinterpret_cast<float2*>(samples + staged<Config>(p));
          to[0] = make_float2(to_float(q.v[0]), to_float(q.v[1]));
          to[1] = make_float2(to_float(q.v[2]), to_float(q.v[3]));
        }
      }
    }
    for (int p = done + threadIdx.x; p < span; p += Config::threads) samples[staged<Config>(p)] = to_float(x[p]);
  } else {
    for (int p = threadIdx.x; p < span; p += Config::threads) {
      const long long i = source_index<Config>(j0 + p, params.n_samples);
      samples[staged<Config>(p)] = i < 0 ? 0.0f : to_float(x[i]);
    }
  }
}
