// Stage 1: the samples of a tile's frames, padding resolved, from global to shared memory, in the waveform's own type.
#pragma once
#include "rows.cuh"

// The samples that a tile needs: its span of the signal, or where hops are longer than frames, frame after frame.
template <class Config>
struct Stage {
  static constexpr bool gaps = Config::hop_length > Config::n_fft;
  static constexpr int pitch = gaps ? Config::n_fft : Config::hop_length;
  static constexpr long long span = (Config::frames_per_tile - 1ll) * Config::hop_length + Config::n_fft;
  static constexpr int count = gaps ? Config::frames_per_tile * Config::n_fft : int(span);

  // Where in the span needed sample p lies.
  __device__ static constexpr long long source(int p) { return gaps ? p / pitch * (long long)Config::hop_length + p % pitch : p; }
  // Where in shared memory it goes. Every pitch of samples is followed by `skew` unused places, so that the same sample
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
  } else if constexpr (Config::pad_mode == PadMode::symmetric) {
    j = j < 0 ? -1 - j : j;
    j = j >= length ? 2 * length - 1 - j : j;
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

// A copy of a whole tile, chunk after chunk, with constant strides. Asynchronous.
template <class Config>
struct InnerCopy {
  using Input = typename Config::Input;
  using S = Stage<Config>;
  static constexpr int bytes = Config::chunk * sizeof(Input), step = Config::chunk * Config::threads;
  static constexpr int copies = (S::count + step - 1) / step;
  static constexpr bool possible = bytes >= 4 && !S::gaps && (Config::skew == 0 || step % S::pitch == 0) && copies <= 32;

  __device__ static void run(const Input* x, Input* samples, int thread) {
    x += Config::chunk * thread;
    samples += S::place(Config::chunk * thread);
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      if ((i + 1) * step <= S::count || Config::chunk * thread < S::count - i * step) {
        copy_async<bytes>(samples + S::place(i * step), x + i * step);
      }
    }
  }
};

// A copy of any tile, which starts i0 samples into x, a row of n_samples(): chunks where they lie inside the waveform, else sample by
// sample.
template <class Config, int chunk, class Length>
__device__ inline void copy_any(const typename Config::Input* x, long long i0, Length n_samples, typename Config::Input* samples,
                                int thread) {
  using Input = typename Config::Input;
  using S = Stage<Config>;
  constexpr int bytes = chunk * sizeof(Input), crop = Config::pad < 0 ? -Config::pad : 0;
#pragma unroll 1
  for (int p = chunk * thread; p < S::count; p += chunk * Config::threads) {
    const long long i = i0 + S::source(p);
    Input* const to = samples + S::place(p);
    if constexpr (bytes >= 4) {
      if (i >= crop && i + chunk <= n_samples() - crop) {
        copy_async<bytes>(to, x + i);
        continue;
      }
    }
#pragma unroll 1
    for (int h = 0; h < chunk; ++h) {
      const long long from = source_index<Config>(i + h + Config::pad, n_samples());
      if (from < 0) {
        to[h] = Input{};
      } else if constexpr (sizeof(Input) == 4) {
        copy_async<4>(to + h, x + from);  // not one after another
      } else {
        to[h] = x[from];
      }
    }
  }
}

// The samples of a tile, if it is one for InnerCopy (no padding, aligned), or, with `edge`, any other; else nothing. They
// may be read after wait_for_copies() and a barrier.
template <class Config, bool edge>
__device__ inline void load(const Params& params, const Tile& tile, typename Config::Input* samples) {
  using Input = typename Config::Input;
  if constexpr (!edge && !InnerCopy<Config>::possible) return;
  const auto begin = [&] { return tile.first_frame(params) * Config::hop_length - Config::margin - Config::pad; };
  bool inner = InnerCopy<Config>::possible && tile.is_inner(params) && params.aligned;
  if constexpr (Config::ragged) {
    inner = inner && tile.exists(params) && begin() + Stage<Config>::span <= row_samples<Config>(params, tile.row(params));
  }
  if (inner == edge || !tile.exists(params)) return;
  const Input* const x = static_cast<const Input*>(params.waveform) + tile.row(params) * params.row_stride;
  const long long i0 = begin();
  // Not a value, but where to find it: it would take a register throughout.
  const long long own = Config::ragged ? row_samples<Config>(params, tile.row(params)) : 0;
  const auto n_samples = [&] { return Config::ragged ? own : params.n_samples; };
  const int thread = Place<Config>().thread;
  if constexpr (!edge) {
    InnerCopy<Config>::run(x + i0, samples, thread);
  } else if (params.aligned) {
    copy_any<Config, Config::chunk>(x, i0, n_samples, samples, thread);
  } else {
    copy_any<Config, 1>(x, i0, n_samples, samples, thread);
  }
}
