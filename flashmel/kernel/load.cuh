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

// The samples that a tile needs: its span of the signal, or where hops are longer than frames, frame after frame.
template <class Config>
struct Stage {
  static constexpr bool gaps = Config::hop_length > Config::n_fft;
  static constexpr int pitch = gaps ? Config::n_fft : Config::hop_length;
  static constexpr long long span = (Config::frames_per_block - 1ll) * Config::hop_length + Config::n_fft;
  static constexpr int count = gaps ? Config::frames_per_block * Config::n_fft : int(span);

  // Where in the span needed sample p lies.
  __device__ static constexpr long long source(int p) { return gaps ? p / pitch * (long long)Config::hop_length + p % pitch : p; }
  // Where in shared memory it goes. Every pitch of samples is followed by `skew` unused words, so that the same sample
  // of neighbouring frames lies in different banks.
  __device__ static constexpr int place(int p) { return p + p / pitch * Config::skew; }
};

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
  using S = Stage<Config>;
  const Input* x = static_cast<const Input*>(params.waveform) + block_row() * params.row_stride;
  const long long j0 = block_first_frame<Config>() * Config::hop_length - Config::margin;  // of the span's first sample, after `pad`
  const long long i0 = j0 - Config::pad;                                   // the same sample in the waveform
  constexpr long long crop = Config::pad < 0 ? -Config::pad : 0;

  if (i0 >= crop && i0 + S::span <= params.n_samples - crop) {  // no padding in this tile
    x += i0;
    int done = 0;
    if constexpr (!S::gaps && (Config::skew == 0 || S::pitch % 4 == 0)) {
      struct alignas(4 * sizeof(Input)) Quad {
        Input v[4];
      };
      if (reinterpret_cast<unsigned long long>(x) % sizeof(Quad) == 0) {
        done = S::count / 4 * 4;
        for (int p = 4 * threadIdx.x; p < done; p += 4 * Config::threads) {
          const Quad q = *reinterpret_cast<const Quad*>(x + p);
          float2* to = reinterpret_cast<float2*>(samples + S::place(p));
          to[0] = make_float2(to_float(q.v[0]), to_float(q.v[1]));
          to[1] = make_float2(to_float(q.v[2]), to_float(q.v[3]));
        }
      }
    }
    for (int p = done + threadIdx.x; p < S::count; p += Config::threads) samples[S::place(p)] = to_float(x[S::source(p)]);
  } else {
    for (int p = threadIdx.x; p < S::count; p += Config::threads) {
      const long long i = source_index<Config>(j0 + S::source(p), params.n_samples);
      samples[S::place(p)] = i < 0 ? 0.0f : to_float(x[i]);
    }
  }
}
