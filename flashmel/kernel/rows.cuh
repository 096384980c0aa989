// How long a row is, in samples and frames.
#pragma once

// Samples of a row. Behind its length it is as if the waveform had ended.
template <class Config, class Params>
__device__ inline long long row_samples(const Params& params, unsigned row) {
  if constexpr (!Config::ragged) return params.n_samples;
  return max(0ll, min(params.lengths[row], params.n_samples));
}
// Frames of a row that do not hold the pad value. Twin of StftSpec.valid_frames in spec.py.
template <class Config, class Params>
__device__ inline long long row_frames(const Params& params, unsigned row) {
  if constexpr (!Config::ragged && !Config::fitted) return params.frames - Config::masked_frames;
  const long long padded = row_samples<Config>(params, row) + Config::around;  // of the signal with all padding
  if (padded < Config::minimum_padded) return 0;
  const long long frames = 1 + (padded - Config::n_fft) / Config::hop_length - Config::masked_frames;
  return max(0ll, min(frames, params.frames));
}
