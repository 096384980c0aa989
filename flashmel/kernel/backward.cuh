// The gradient: the adjoints of load, fft and project, in the shared memory where the spectra lie.
//
// With g the gradient of mel and G = fb g, the gradient of bin X is power G |X|^(power - 2) X, and 0 where X is 0. From there the
// transform is walked back. The adjoint of a transform is the transform with conjugate factors; and the conjugate of x + i y is
// y + i x, but for a factor of i. So the forward transforms and tables do all of it, on numbers whose parts are swapped,
// from `differentiate` to `columns_back`.
#pragma once

// From the gradient of a feature to that of its mel value, given the feature; see feature.cuh. gain and bias are the
// filter's own.
template <class Config>
__device__ inline float gradient_of_mel(float g, float feature, float gain, float bias) {
  const float factor = Config::affine ? gain * Config::gain : Config::gain;
  if constexpr (Config::log == Log::none) return g * factor;
  if (Config::affine && factor == 0.0f) return 0.0f;
  constexpr float per_octave = octave<Config>(), per_e = per_octave / 0.693147181f;
  constexpr float per_gain = 1.0f / Config::gain;
  const float value = Config::affine ? (feature - fmaf(gain, Config::bias, bias)) / factor : (feature - Config::bias) * per_gain;
  // At a floor there is no gradient; to rounding, what is just above one counts as being at it. The floor of the logarithm is
  // compared as a logarithm.
  constexpr float margin = 1e-5f * per_e;
  float derivative = factor * per_e * exp2f(value * (-1.0f / per_octave));
  if (Config::has_log_floor && value <= Config::log_floor + margin) derivative = 0.0f;
  if (!Config::floor_is_added && value <= Config::log_of_floor + margin) derivative = 0.0f;
  return g * derivative;
}

// The mel gradient of a tile's frames, filter after filter, as float32; 0 where there is no frame. Asynchronous, if nothing is
// done to it.
template <class Config>
__device__ inline void load_mel(const Params& params, const Tile& tile, float* g) {
  using Output = typename Config::Output;
  if (!tile.exists(params)) return;
  constexpr int n_mels = Config::n_mels, step = Config::threads_per_frame;
  const Place<Config> place;
  const long long first = tile.first_frame(params), valid = row_frames<Config>(params, tile.row(params));
  const Output* const from = static_cast<const Output*>(params.mel) + tile.row(params) * params.mel_row_stride;
  if constexpr (Config::log == Log::none && Config::gain == 1.0f && !Config::affine) {
    const long long t = first + place.frame;
    const Output* value = from + t * params.mel_frame_stride + place.of_frame * params.mel_stride;
    g += place.frame;
#pragma unroll 4
    for (int m = place.of_frame; m < n_mels; m += step) {
      float* const to = g + m * Config::frames_per_tile;
      if (t >= valid) {
        *to = 0.0f;
      } else if constexpr (sizeof(Output) == 4) {
        copy_async<4>(to, value);
      } else {
        *to = to_float(*value);
      }
      value += step * params.mel_stride;
    }
  } else {
    constexpr int at_once = 8;  // loads under way: none of them may wait for a store
    const float* const features = params.features + (long long)tile.row(params) * n_mels * params.frames;
    const auto store = [&](int m, int f, bool inside, float value, float feature) {
      float gain = 1.0f, bias = 0.0f;
      if constexpr (Config::affine) gain = params.affine[m], bias = params.affine[n_mels + m];
      g[m * Config::frames_per_tile + f] = inside ? gradient_of_mel<Config>(value, feature, gain, bias) : 0.0f;
    };
    if constexpr (Config::time_major) {
      // Filters lie side by side in memory: a warp has eight of them in four frames at a time.
      constexpr int wide = (n_mels + 7) / 8, blocks = wide * ((Config::frames_per_tile + 3) / 4), warps = Config::threads / 32;
      const int lane = place.thread % 32;
#pragma unroll 1
      for (int block = place.thread / 32; block < blocks; block += at_once * warps) {
        float value[at_once], feature[at_once];
        const auto filter = [&](int n) { return (block + n * warps) % wide * 8 + lane % 8; };
        const auto frame = [&](int n) { return (block + n * warps) / wide * 4 + lane / 8; };
        const auto exists = [&](int n) { return filter(n) < n_mels && frame(n) < Config::frames_per_tile; };
#pragma unroll
        for (int n = 0; n < at_once; ++n) {
          const bool there = exists(n) && first + frame(n) < valid;
          const long long t = first + frame(n);
          value[n] = there ? to_float(from[filter(n) * params.mel_stride + t * params.mel_frame_stride]) : 0.0f;
          if constexpr (Config::log != Log::none) feature[n] = there ? features[t * n_mels + filter(n)] : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < at_once; ++n) {
          if (exists(n)) store(filter(n), frame(n), first + frame(n) < valid, value[n], feature[n]);
        }
      }
    } else {
      const long long t = first + place.frame;
      const bool inside = t < valid;
      const Output* value_at = from + t * params.mel_frame_stride + place.of_frame * params.mel_stride;
      const float* feature_at = features + t + place.of_frame * params.frames;
#pragma unroll 1
      for (int m = place.of_frame; m < n_mels; m += at_once * step) {
        float value[at_once], feature[at_once];
#pragma unroll
        for (int n = 0; n < at_once; ++n) {
          const bool there = inside && m + n * step < n_mels;
          value[n] = there ? to_float(value_at[n * step * params.mel_stride]) : 0.0f;
          if constexpr (Config::log != Log::none) feature[n] = there ? feature_at[n * step * params.frames] : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < at_once; ++n) {
          if (m + n * step < n_mels) store(m + n * step, place.frame, inside, value[n], feature[n]);
        }
        value_at += at_once * step * params.mel_stride;
        feature_at += at_once * step * params.frames;
      }
    }
  }
}

// The transforms of the columns: load(a, c), then store(a, c).
template <class Config, class Load, class Store>
__device__ inline void in_columns(Load load, Store store) {
  constexpr int radix = Config::r1, count = Config::points / radix, at_once = items_at_once<Config, radix, count>();
  const Place<Config> place;
#pragma unroll 1
  for (int item = place.of_frame; item < count; item += at_once * Config::threads_per_frame) {
    const int first = opaque(item);
    Complex a[at_once][radix];
#pragma unroll
    for (int n = 0; n < at_once; ++n) load(a[n], first + n * Config::threads_per_frame);
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      dft<radix>(a[n]);
      store(a[n], first + n * Config::threads_per_frame);
    }
  }
}

// Samples to spectrum, up to the rows: as `columns`, but samples and spectra have places of their own.
template <class Config>
__device__ inline void columns_in_turn(const typename Config::Input* samples, float2* spectra, const float4* factors,
                                       const Frame& frame) {
  constexpr int radix = Config::r1, count = Config::points / radix;
  const Place<Config> place;
  samples += place.frame * Config::sample_stride;
  float2* const e = spectra + place.frame * Config::frame_stride;
  in_columns<Config>([&](Complex* a, int c) { load_column<Config>(a, samples, factors, c, frame); },
                     [&](const Complex* a, int c) {
                       const float4* const table = factors + opaque(Config::column_table + c);
                       twiddle_and_store<radix>(a, table, count, e + c, Config::row_stride);
                     });
}

// What the power of bin k multiplies: the sum of its filters' gradients. An entry of the bin is two filters.
template <class Config>
__device__ inline float gradient_of_power(const float4* bins, const float* g, int k) {
  float sum = 0.0f;
  const auto add = [&](float4 entry) {
    const auto at = [&](float place) { return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(g) + bits_of_float(place)); };
    sum += entry.x * at(entry.z);
    sum += entry.y * at(entry.w);
  };
  if constexpr (Config::entries_per_bin == 1) {
    add(bins[k]);
  } else {
#pragma unroll 1
    for (int i = 0; i < Config::entries_per_bin; ++i) add(bins[k + i * (Config::n_fft / 2 + 1)]);
  }
  return sum;
}

// What bin k is multiplied by to be its gradient. The factor `power` is in the table of bins.
template <class Config>
__device__ inline float derivative(float squared, const float4* bins, const float* g, int k) {
  const float gradient = gradient_of_power<Config>(bins, g, k);
  if constexpr (Config::epsilon > 0.0f && Config::epsilon_is_added) squared += Config::epsilon;
  if constexpr (Config::epsilon > 0.0f && !Config::epsilon_is_added) {
    if (squared < Config::epsilon) return 0.0f;
  }
  if constexpr (Config::power == 2.0f) return gradient;
  // The bin is multiplied by this: 0 stays 0 if the factor is finite. (A branch here cost up to 84 bytes of spills.)
  if constexpr (Config::power == 1.0f) return gradient * inverse_root(fmaxf(squared, 1e-37f));
  if (squared == 0.0f) return 0.0f;
  return gradient * powf(squared, 0.5f * Config::power - 1.0f);
}

// z = Z[k] and y = Z[m - k] to their gradients, swapped: through `separate` and back.
template <class Config>
__device__ inline void differentiate(Complex& z, Complex& y, float2 w, int k, const float4* bins, const float* g) {
  const float even_x = z.x + y.x, even_y = z.y - y.y;
  const float odd_x = z.y + y.y, odd_y = y.x - z.x;
  float ax = even_x + odd_x * w.x - odd_y * w.y, ay = even_y + odd_x * w.y + odd_y * w.x;
  float bx = fmaf(2.0f, even_x, -ax), by = fmaf(2.0f, even_y, -ay);
  const float a = derivative<Config>(ax * ax + ay * ay, bins, g, k);
  const float b = derivative<Config>(bx * bx + by * by, bins, g, Config::n_fft / 2 - k);
  ax *= a, ay *= a, bx *= b, by *= b;
  const float sum_x = ax + bx, sum_y = ay + by, difference_x = ax - bx, difference_y = ay - by;
  const float odd_gx = difference_x * w.x + difference_y * w.y, odd_gy = difference_y * w.x - difference_x * w.y;
  z = {sum_y + odd_gx, sum_x - odd_gy};
  y = {odd_gx - sum_y, sum_x + odd_gy};
}

// z, which is bin k but for a factor `scale` of its squared magnitude, to its gradient, swapped.
template <class Config>
__device__ inline void differentiate_alone(Complex& z, float scale, int k, const float4* bins, const float* g) {
  const float d = scale * derivative<Config>(scale * (z.x * z.x + z.y * z.y), bins, g, k);
  z = {d * z.y, d * z.x};
}

// Rows u and rows - u (or, with `self`, 0 and rows / 2) to their gradients, swapped; in the order of `separate_rows`.
template <class Config, bool self>
__device__ inline void differentiate_rows(Complex* a, Complex* b, const float4* table, int u, const float4* bins, const float* g) {
  constexpr int m = Config::points, radix = Config::r3, rows = m / radix, pairs = (rows + 1) / 2;
  constexpr int from_row_0 = (radix + 1) / 2;
#pragma unroll
  for (int slot = 0; slot < radix; ++slot) {
    const float2 w = half_of(table[slot / 2 * pairs], slot % 2);
    if constexpr (!self) {
      differentiate<Config>(a[slot], b[radix - 1 - slot], w, u + rows * slot, bins, g);
    } else if (slot == 0) {
      Complex y = a[0];
      differentiate<Config>(a[0], y, w, 0, bins, g);
      a[0] = a[0] + y;
    } else if (slot < from_row_0) {
      differentiate<Config>(a[slot], a[radix - slot], w, rows * slot, bins, g);
    } else if constexpr (rows % 2 == 0) {
      const int q = slot - from_row_0;
      differentiate<Config>(b[q], b[radix - 1 - q], w, rows / 2 + rows * q, bins, g);
    }
  }
  if constexpr (self && m % 2 == 0) {
    differentiate_alone<Config>(radix % 2 == 0 ? a[radix / 2] : b[radix / 2], 4.0f, m / 2, bins, g);
  }
}

template <class Config>
__device__ inline void store_row(const Complex* a, float2* e, int r) {
  float2* const row = e + row_place<Config>(r);
#pragma unroll
  for (int j = 0; j < Config::r3; ++j) row[j] = make_float2(a[j].x, a[j].y);
}

// The last stage of the transform, the gradient of its bins, and the first stage back. A thread's rows stay its own.
template <class Config>
__device__ inline void rows_and_back(float2* spectra, const float4* factors, const float4* bins, const float* g) {
  constexpr int radix = Config::r3, rows = Config::points / radix, pairs = (rows + 1) / 2;
  constexpr int sides = Config::paired && rows > 1 ? 2 : 1;
  const Place<Config> place;
  float2* const e = spectra + place.frame * Config::frame_stride;
  g += place.frame;
#pragma unroll 1
  for (int item = place.of_frame; item < pairs; item += Config::threads_per_frame) {
    const int u = opaque(item);
    const int partner = u > 0 ? rows - u : rows % 2 == 0 ? rows / 2 : 0;  // 0: none; row rows / 2 is another thread's
    Complex a[sides][radix];
    load_row<Config>(a[0], e, u);
    dft<radix>(a[0]);
    if constexpr (sides == 2) {
      load_row<Config>(a[1], e, partner);
      dft<radix>(a[1]);
    }
    if constexpr (Config::paired) {
      const float4* const table = factors + opaque(Config::separation_table + u);
      if (u == 0) {
        differentiate_rows<Config, true>(a[0], a[sides - 1], table, u, bins, g);
      } else {
        differentiate_rows<Config, false>(a[0], a[sides - 1], table, u, bins, g);
      }
    } else {
      // Row rows - u holds the conjugates of row u, in the other order; row 0 its own. Whatever a bin gets goes to one of the two,
      // the other gets nothing: the real part of the result is the same.
#pragma unroll
      for (int j = 0; j < radix; ++j) {
        const int k = u + rows * j;
        differentiate_alone<Config>(a[0][j], 2 * j > radix && u == 0 ? 0.0f : 1.0f, min(k, Config::n_fft - k), bins, g);
      }
      const Complex nothing[radix] = {};
      if (u > 0) store_row<Config>(nothing, e, partner);
    }
    dft<radix>(a[0]);
    store_row<Config>(a[0], e, u);
    if constexpr (sides == 2) {
      dft<radix>(a[1]);
      if (rows % 2 == 0 || u > 0) store_row<Config>(a[1], e, partner);
    }
  }
}

// The counterpart of twiddle_and_store.
template <int size>
__device__ inline void load_and_twiddle(Complex* a, const float4* table, int table_stride, const float2* e, int stride) {
#pragma unroll
  for (int k = 0; k < size; k += 2) {
    const float4 entry = table[k / 2 * table_stride];
#pragma unroll
    for (int h = 0; h < 2 && k + h < size; ++h) {
      const float2 z = e[(k + h) * stride], w = half_of(entry, h);
      a[k + h] = k + h == 0 ? Complex{z.x, z.y} : Complex{z.x * w.x - z.y * w.y, z.x * w.y + z.y * w.x};
    }
  }
}

template <class Config>
__device__ inline void middle_back(float2* spectra, const float4* factors) {
  constexpr int radix = Config::r2;
  in_middle<Config>(
      spectra,
      [&](Complex* a, const float2* at, int c) {
        load_and_twiddle<radix>(a, factors + opaque(Config::middle_table + c), Config::r3, at, Config::r3);
      },
      [&](const Complex* a, float2* at, int) {
#pragma unroll
        for (int j = 0; j < radix; ++j) at[j * Config::r3] = make_float2(a[j].x, a[j].y);
      });
}

// To the gradients of a frame's windowed samples times the window: point c + count * j in the place of e[j][c]. And, where
// a mean was subtracted, their sum, part by part, to `sums`.
template <class Config>
__device__ inline void columns_back(float2* spectra, const float4* factors, float* sums) {
  constexpr int radix = Config::r1, count = Config::points / radix;
  const Place<Config> place;
  float sum = 0.0f;
  float2* const e = spectra + place.frame * Config::frame_stride;
  in_columns<Config>(
      [&](Complex* a, int c) {
        load_and_twiddle<radix>(a, factors + opaque(Config::column_table + c), count, e + c, Config::row_stride);
      },
      [&](const Complex* a, int c) {
        const float4* const window = factors + opaque(Config::window_table + c);
#pragma unroll
        for (int j = 0; j < supported_points<Config>(); ++j) {
          const float2 w = half_of(window[j / 2 * count], j % 2);
          const float2 g = make_float2(a[j].y * w.x, a[j].x * w.y);
          e[j * Config::row_stride + c] = g;
          if constexpr (Config::remove_dc) {
            const float2 counted = supported<Config>(g, c, j);
            sum += Config::paired ? counted.x + counted.y : counted.x;
          }
        }
      });
  if constexpr (Config::remove_dc) store_part_of_sum<Config>(sums, sum);
}

// Where in the spectra, in floats, the gradient of sample n of a frame lies.
template <class Config>
__device__ inline int sample_place(int n) {
  constexpr int count = Config::points / Config::r1, line = Config::paired ? 2 * count : count;
  if constexpr (Config::paired && Config::row_stride == count) return n;
  return n / line * (2 * Config::row_stride) + n % line * (Config::paired ? 1 : 2);
}

__device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
// The largest power of two up to a and b.
__device__ constexpr int power_of_two_up_to(int a, int b) {
  int power = 1;
  while (2 * power <= a && 2 * power <= b) power *= 2;
  return power;
}

// Whether a tile has frames that are none, or samples of `Edges`; or, where the waveform was pre-emphasised, reaches the row's last
// sample, be it in what it carries.
template <class Config>
__device__ inline bool touches_edge(const Params& params, const Tile& tile) {
  constexpr int frames = Config::frames_per_tile;
  constexpr bool last_matters = Config::preemphasis != 0.0f && !Config::preemphasis_in_frame;
  constexpr long long slots = frames + (last_matters ? Config::overlap : 0);
  const long long first = tile.first_frame(params);
  const long long i0 = first * Config::hop_length - Config::margin - Config::pad;
  return first + frames > row_frames<Config>(params, tile.row(params)) || i0 < Edges<Config>::low ||
         i0 + slots * Config::hop_length >= row_samples<Config>(params, tile.row(params)) - Edges<Config>::high;
}

// From the sum of a frame's gradients to what the subtraction of its mean takes from each of its samples, sums[frame].
template <class Config>
__device__ inline void mean_gradients(float* sums) {
  const Place<Config> place;
  constexpr float left = Config::preemphasis_in_frame ? 1.0f - Config::preemphasis : 1.0f;  // of a constant
  if (place.of_frame == 0) sums[place.frame] = frame_sum<Config>(sums, place.frame) * (left / Config::support);
  team_barrier<Config>();
}

// Frames overlap: slot s of a row, the hop_length samples from the start of frame s on, is covered by frames s - overlap ... s.
// A team walks along a row and adds up, for each sample, its frames in ascending order, so that the sum is the same wherever a team
// began. What the frames up to this tile add to the slots after it is carried to the next tile. A thread has its offsets in
// a slot, and of these every groups-th slot: what it carries, it reads itself.
template <class Config, bool edge>
__device__ inline void add_frames(const Params& params, const Tile& tile, const float2* spectra, const float* sums, float* carry) {
  using Input = typename Config::Input;
  constexpr int hop = Config::hop_length, frames = Config::frames_per_tile, overlap = Config::overlap;
  constexpr int lanes = hop >= Config::threads ? Config::threads : (hop + 31) / 32 * 32;
  constexpr int groups = power_of_two_up_to(Config::threads / lanes, frames);  // divides frames
  constexpr int stride = 2 * Config::frame_stride;
  const int thread = Place<Config>().thread, group = groups == 1 ? 0 : thread / lanes;
  if (thread >= groups * lanes) return;
  const float* const gradients = reinterpret_cast<const float*>(spectra);
  // The gradient of sample o + d * hop of a frame, through the prologue; `last`: it is the waveform's last, or behind it.
  const auto of_sample = [&](int frame, int o, int d, bool last) {
    const int p = o + d * hop;
    const float* const of_frame = gradients + frame * stride;
    float g = of_frame[sample_place<Config>(p)];
    if constexpr (Config::preemphasis != 0.0f) {
      if ((d < overlap || p + 1 < Config::support) && !last) g -= Config::preemphasis * of_frame[sample_place<Config>(p + 1)];
      if (Config::preemphasis_in_frame && d == 0 && o == 0) g -= Config::preemphasis * of_frame[0];
    }
    if constexpr (Config::remove_dc) g -= sums[frame];
    return g;
  };
  const long long first = tile.first_frame(params), row = tile.row(params);
  const long long i0 = first * hop - Config::margin - Config::pad;  // the sample where slot 0 of the tile begins
  Input* const gradient = static_cast<Input*>(params.gradient) + row * params.n_samples + i0;
  const bool begins = tile.step == 0;
  // The segment's own slots. Those before are written by whoever walks the segment before; those after, behind.
  const int own_begin = (tile.number(params) == 0 ? 0 : overlap) - tile.step * frames;
  const int own_end = int(min((long long)frames, overlap + params.emitted - tile.step * frames));

  // Offsets behind the signal's end are nobody's. Unsigned, for hops near 2^31.
  const unsigned offsets = unsigned(min((long long)hop, Edges<Config>{params, row}.total()));
#pragma unroll 1
  for (unsigned item = thread % lanes; item < offsets; item += lanes) {
    const int o = opaque(item);
    // Only the frame that began longest ago may end inside the slot.
    const auto covers = [&](int d) { return d < overlap || Config::support % hop == 0 || o + overlap * hop < Config::support; };
    // The sum of slot s over the tile's frames, on top of what is carried.
    const auto sum = [&](int s) {
      float total = s < overlap && !begins ? carry[s * hop + o] : 0.0f;
      bool last = false;
      if constexpr (edge && Config::preemphasis != 0.0f && !Config::preemphasis_in_frame) {
        last = i0 + s * (long long)hop + o + 1 >= row_samples<Config>(params, unsigned(row));
      }
#pragma unroll(overlap < 8 ? overlap + 1 : 1)
      for (int d = overlap; d >= 0; --d) {
        const int frame = s - d;
        bool counts = frame >= 0 && frame < frames && covers(d);
        if constexpr (edge) counts = counts && first + frame < params.frames;
        if (counts) total += of_sample(frame, o, d, last);
      }
      return total;
    };
    const auto store = [&](int s, float total) {
      if (s < own_begin || s >= own_end) return;
      if constexpr (edge) {
        store_edge<Config>(params, row, i0 + s * (long long)hop + o, total);
      } else {
        gradient[s * (long long)hop + o] = from_float<Input>(total);
      }
    };
    constexpr int reached = edge ? frames : min_of(overlap, frames);  // slots that frames outside the tile reach
    constexpr int turns = (reached + groups - 1) / groups, carried_turns = (overlap + groups - 1) / groups;
#pragma unroll(turns > 0 && turns <= 4 && !edge ? turns : 1)
    for (int i = 0; i < turns; ++i) {
      const int s = group + i * groups;
      if (s < reached) store(s, sum(s));
    }
    int s = group + (reached - group + groups - 1) / groups * groups;
    const float* from = gradients + s * stride;  // the other slots have all their frames in the tile
    Input* to = gradient + s * (long long)hop + o;
#pragma unroll 4
    for (; s < own_end; s += groups) {
      float total = 0.0f;
#pragma unroll(overlap < 8 ? overlap + 1 : 1)
      for (int d = overlap; d >= 0; --d) {
        if (!covers(d)) continue;
        if constexpr (Config::remove_dc || Config::preemphasis != 0.0f) {
          total += of_sample(s - d, o, d, false);
        } else {
          total += from[sample_place<Config>(o + d * hop) - d * stride];
        }
      }
      *to = from_float<Input>(total);
      from += groups * stride;
      to += groups * (long long)hop;
    }
#pragma unroll(carried_turns > 0 && carried_turns <= 4 && !edge ? carried_turns : 1)
    for (int i = 0; i < carried_turns; ++i) {
      const int s = group + i * groups;
      if (s < overlap) carry[s * hop + o] = sum(frames + s);
    }
  }
}
