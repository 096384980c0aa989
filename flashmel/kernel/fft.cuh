// The transform of a tile's frames, in pieces: power.cuh puts them together, backward.cuh there and back.
//
// A frame of n_fft samples, if that is even, is one complex transform of m = n_fft / 2 points (even samples real, odd
// samples imaginary); else one of m = n_fft points whose imaginary parts are 0. m = r1 * r2 * r3 (any of them may be 1),
// each factor a whole transform in one thread's registers:
//   columns  r1-point transforms over points c, c + m/r1, ...     twiddle W_m^(c k1)         to e[k1][c]
//   middle   r2-point transforms inside row k1                    twiddle W_(r2 r3)^(c2 k2)  in place, e[k1][k2 r3 + c2]
//   rows     r3-point transforms of rows r = k1 + r1 k2           Z[r + r1 r2 k3]
// Lanes of a warp are frames first: tables are then read by broadcast.
#pragma once

// One of the pair of complex numbers that a table entry holds.
__device__ inline float2 half_of(float4 entry, int which) {
  return which == 0 ? make_float2(entry.x, entry.y) : make_float2(entry.z, entry.w);
}

// Multiply a[1 .. size) by the table's factors and store all of a at stride `stride`.
template <int size>
__device__ inline void twiddle_and_store(const Complex* a, const float4* table, int table_stride, float2* e, int stride) {
#pragma unroll
  for (int k = 0; k < size; k += 2) {
    const float4 entry = table[k / 2 * table_stride];
#pragma unroll
    for (int h = 0; h < 2 && k + h < size; ++h) {
      const Complex z = a[k + h];
      const float2 w = half_of(entry, h);
      e[(k + h) * stride] = k + h == 0 ? make_float2(z.x, z.y) : make_float2(z.x * w.x - z.y * w.y, z.x * w.y + z.y * w.x);
    }
  }
}

// Where in its frame sample p lies, in shared memory; p = c + step * j, c below step.
template <class Config, int step>
__device__ inline int staged(int c, int j) {
  if constexpr (Stage<Config>::pitch % step == 0) return c + Stage<Config>::place(step * j);  // no skew inside a step
  return Stage<Config>::place(c + step * j);
}

// Point c + count * j of the frame's transform: a pair of samples, or one sample and 0.
template <class Config>
__device__ inline float2 point(const typename Config::Input* samples, int c, int j) {
  using Input = typename Config::Input;
  constexpr int count = Config::points / Config::r1;
  if constexpr (!Config::paired) {
    return make_float2(to_float(samples[staged<Config, count>(c, j)]), 0.0f);
  } else {
    const Input* const at = samples + staged<Config, 2 * count>(2 * c, j);
    if constexpr (Config::sample_stride % 2 == 0 && Config::skew % 2 == 0) {
      struct alignas(2 * sizeof(Input)) Pair {
        Input x, y;
      };
      const Pair pair = *reinterpret_cast<const Pair*>(at);
      return make_float2(to_float(pair.x), to_float(pair.y));
    } else {
      return make_float2(to_float(at[0]), to_float(at[1]));
    }
  }
}

// How many of the points c + count * j, for j = 0, 1, ..., have samples of the support for any c.
template <class Config>
__device__ constexpr int supported_points() {
  constexpr int step = Config::points / Config::r1 * (Config::paired ? 2 : 1);
  return (Config::support + step - 1) / step;
}
// x, at the place of point c + count * j; 0 where it is of samples behind the support.
template <class Config>
__device__ inline float2 supported(float2 x, int c, int j) {
  constexpr int samples = Config::paired ? 2 : 1, step = Config::points / Config::r1 * samples;
  if (step * (j + 1) <= Config::support) return x;
  const int p = samples * c + step * j;
  return make_float2(p < Config::support ? x.x : 0.0f, p + samples - 1 < Config::support ? x.y : 0.0f);
}

// What the prologue needs to know of a frame.
struct Frame {
  float mean;  // of its samples that it subtracts
  int end;     // its samples from here on are behind the end of the signal
};

// A sum over a frame, of which each of its threads has a part. frame_sum() after a barrier.
template <class Config>
__device__ inline void store_part_of_sum(float* sums, float part) {
  const Place<Config> place;
  sums[place.of_frame * Config::frames_per_tile + place.frame] = part;
}
template <class Config>
__device__ inline float frame_sum(const float* sums, int frame) {
  float sum = 0.0f;
#pragma unroll 4
  for (int i = 0; i < Config::threads_per_frame; ++i) sum += sums[i * Config::frames_per_tile + frame];
  return sum;
}

// The sum of the thread's samples of its frame.
template <class Config>
__device__ inline float sum_of_points(const typename Config::Input* samples) {
  constexpr int count = Config::points / Config::r1;
  float sum = 0.0f;
#pragma unroll 1
  for (int item = Place<Config>().of_frame; item < count; item += Config::threads_per_frame) {
    const int c = opaque(item);
    float2 parts = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < supported_points<Config>(); ++j) {
      const float2 x = supported<Config>(point<Config>(samples, c, j), c, j);
      parts.x += x.x;
      parts.y += x.y;
    }
    sum += parts.x + parts.y;
  }
  return sum;
}

// The thread's frame; `samples` are the tile's, `sums` is room for sums over them.
template <class Config>
__device__ inline Frame prologue_of(const Params& params, const Tile& tile, const typename Config::Input* samples, float* sums) {
  Frame frame = {0.0f, 0};
  const Place<Config> place;
  if constexpr (Config::remove_dc) {
    store_part_of_sum<Config>(sums, sum_of_points<Config>(samples + place.frame * Config::sample_stride));
    team_barrier<Config>();
    frame.mean = frame_sum<Config>(sums, place.frame) * (1.0f / Config::support);
  }
  if constexpr (Config::preemphasis != 0.0f && !Config::preemphasis_in_frame) {
    const long long begin = (tile.first_frame(params) + place.frame) * Config::hop_length - Config::margin - Config::pad;
    const long long end = row_samples<Config>(params, tile.row(params)) - begin;
    frame.end = int(max(0ll, min(end, (long long)Config::n_fft)));
  }
  return frame;
}

// Sample p = c + step * j of a frame (see `staged`) after the prologue, from itself and the sample before it. What comes before
// the frame's first sample is that sample itself: the rule of pre-emphasis in a frame; and that over the waveform
// is only for windows that begin with 0.
template <class Config>
__device__ inline float emphasised(float x, float before, int p, const Frame& frame) {
  const float y = x - Config::preemphasis * before;
  if constexpr (Config::preemphasis_in_frame) return y;
  return p < frame.end ? y : 0.0f;
}
template <class Config, int step>
__device__ inline float sample_before(const typename Config::Input* samples, int c, int j) {
  const int at_start = j == 0 ? 0 : Stage<Config>::place(step * j - 1);
  return to_float(samples[c > 0 ? staged<Config, step>(c - 1, j) : at_start]);
}
template <class Config>
__device__ inline float2 after_prologue(float2 x, const typename Config::Input* samples, int c, int j, const Frame& frame) {
  constexpr int count = Config::points / Config::r1, step = Config::paired ? 2 * count : count;
  if constexpr (Config::remove_dc) x = make_float2(x.x - frame.mean, Config::paired ? x.y - frame.mean : 0.0f);
  if constexpr (Config::preemphasis != 0.0f) {
    const int first = Config::paired ? 2 * c : c;
    float before = sample_before<Config, step>(samples, first, j);
    if constexpr (Config::remove_dc) before -= frame.mean;
    if constexpr (Config::paired) x.y = emphasised<Config>(x.y, x.x, first + step * j + 1, frame);
    x.x = emphasised<Config>(x.x, before, first + step * j, frame);
  }
  return x;
}

// The points of column c after the prologue, times the window; `samples` are its frame's.
template <class Config>
__device__ inline void load_column(Complex* a, const typename Config::Input* samples, const float4* factors, int c,
                                   const Frame& frame) {
  constexpr int radix = Config::r1, count = Config::points / radix, some = supported_points<Config>();
  const float4* const window = factors + opaque(Config::window_table + c);
#pragma unroll
  for (int j = 0; j < some; j += 2) {
    const float4 entry = window[j / 2 * count];
#pragma unroll
    for (int h = 0; h < 2 && j + h < some; ++h) {
      const float2 x = after_prologue<Config>(point<Config>(samples, c, j + h), samples, c, j + h, frame), w = half_of(entry, h);
      const float2 windowed = supported<Config>(make_float2(x.x * w.x, x.y * w.y), c, j + h);
      a[j + h] = {windowed.x, windowed.y};
      settle(a[j + h].x);
      settle(a[j + h].y);
    }
  }
#pragma unroll
  for (int j = some; j < radix; ++j) a[j] = {0.0f, 0.0f};
}

// How many of a thread's transforms it has under way: two, where its items come in pairs and the registers allow it.
template <class Config, int radix, int count>
__device__ constexpr int items_at_once() {
  return count % (2 * Config::threads_per_frame) == 0 && 4 * radix + 48 <= 65536 / (Config::teams * Config::threads) ? 2 : 1;
}

// The transforms of the middle stage: load(a, at, c) from where the points of column c of a row lie, store(a, at, c) to there.
template <class Config, class Load, class Store>
__device__ inline void in_middle(float2* spectra, Load load, Store store) {
  constexpr int radix = Config::r2, count = Config::points / radix, at_once = items_at_once<Config, radix, count>();
  const Place<Config> place;
  float2* const e = spectra + place.frame * Config::frame_stride;
#pragma unroll 1
  for (int item = place.of_frame; item < count; item += at_once * Config::threads_per_frame) {
    Complex a[at_once][radix];
    float2* at[at_once];
    int c[at_once];
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const int i = opaque(item + n * Config::threads_per_frame);  // else the compiler keeps an address for every access
      c[n] = i % Config::r3;
      at[n] = e + i / Config::r3 * Config::row_stride + c[n];
      load(a[n], at[n], c[n]);
    }
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      dft<radix>(a[n]);
      store(a[n], at[n], c[n]);
    }
  }
}

template <class Config>
__device__ inline void middle(float2* spectra, const float4* factors) {
  constexpr int radix = Config::r2;
  in_middle<Config>(
      spectra,
      [](Complex* a, const float2* at, int) {
#pragma unroll
        for (int j = 0; j < radix; ++j) {
          const float2 z = at[j * Config::r3];
          a[j].x = z.x;
          a[j].y = z.y;
        }
      },
      [&](const Complex* a, float2* at, int c) {
        twiddle_and_store<radix>(a, factors + opaque(Config::middle_table + c), Config::r3, at, Config::r3);
      });
}

// Row r of the spectrum e.
template <class Config>
__device__ inline int row_place(int r) {
  return r % Config::r1 * Config::row_stride + r / Config::r1 * Config::r3;
}
template <class Config>
__device__ inline void load_row(Complex* a, const float2* e, int r) {
  const float2* const row = e + row_place<Config>(r);
#pragma unroll
  for (int j = 0; j < Config::r3; ++j) {
    const float2 z = row[j];
    a[j].x = z.x;
    a[j].y = z.y;
  }
}
