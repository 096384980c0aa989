// Discrete Fourier transforms in one thread's registers: dft<n>(a) replaces a[0 .. n) by sum_j a[j] exp(-2 pi i j k / n).
// Every index and every factor is a constant: what remains is additions and multiplications.
#pragma once

struct Complex {
  float x, y;
};
__device__ inline Complex operator+(Complex a, Complex b) { return {a.x + b.x, a.y + b.y}; }
__device__ inline Complex operator-(Complex a, Complex b) { return {a.x - b.x, a.y - b.y}; }

// f(Int<0>), ..., f(Int<n - 1>): a loop whose index is a constant.
template <int value>
struct Int {
  __device__ constexpr operator int() const { return value; }
};
template <int n, int i = 0, class F>
__device__ inline void each(F&& f) {
  if constexpr (i < n) {
    f(Int<i>());
    each<n, i + 1>(f);
  }
}

constexpr double pi = 3.14159265358979323846;
// The series of cos x (first = 0) and sin x (first = 1), for x up to pi / 4.
__device__ constexpr double series(double x, int first) {
  double term = first ? x : 1, sum = term;
  for (int i = first + 2; i < 20; i += 2) sum += term *= -x * x / (i * (i - 1));
  return sum;
}
// cos(2 pi k / n) and sin(2 pi k / n), exact at multiples of a quarter turn.
__device__ constexpr double cosine(long long k, long long n) {
  k = (k % n + n) % n;
  if (2 * k > n) k = n - k;
  if (4 * k > n) return -cosine(n - 2 * k, 2 * n);
  return 8 * k > n ? series(2 * pi * (n - 4 * k) / (4 * n), 1) : series(2 * pi * k / n, 0);
}
__device__ constexpr double sine(long long k, long long n) { return cosine(4 * k - n, 4 * n); }

// a exp(-2 pi i k / n)
template <int k, int n>
__device__ inline Complex turned(Complex a) {
  constexpr int quarters = 4 * k % n == 0 ? 4 * k / n % 4 : -1;
  if constexpr (quarters == 0) return a;
  if constexpr (quarters == 1) return {a.y, -a.x};
  if constexpr (quarters == 2) return {-a.x, -a.y};
  if constexpr (quarters == 3) return {-a.y, a.x};
  constexpr float c = float(cosine(k, n)), s = float(sine(k, n));
  return {a.x * c + a.y * s, a.y * c - a.x * s};
}

__device__ constexpr int smallest_prime(int n) {
  for (int p = 2; p * p <= n; ++p)
    if (n % p == 0) return p;
  return n;
}
// How to split a composite n: into coprime factors if there are such (no twiddles), else near its root.
__device__ constexpr int first_factor(int n) {
  const int p = smallest_prime(n);
  int power = 1, exponent = 0, rest = n;
  for (; rest % p == 0; rest /= p, ++exponent) power *= p;
  if (rest > 1) return power;
  int root = 1;
  for (int i = 0; i < exponent / 2; ++i) root *= p;
  return root;
}
__device__ constexpr bool coprime(int a, int b) {
  while (b) {
    const int rest = a % b;
    a = b;
    b = rest;
  }
  return a == 1;
}
// The number below p * q that is i modulo p and j modulo q.
__device__ constexpr int chinese(int i, int j, int p, int q) {
  int k = i;
  while (k % q != j % q) k += p;
  return k;
}

template <int n>
__device__ inline void dft(Complex* a);

template <int p>
__device__ inline void dft_prime(Complex* a) {
  constexpr int half = (p - 1) / 2;
  Complex sum[half], difference[half];  // of a[j] and a[p - j]
  Complex total = a[0];
  each<half>([&](auto i) {
    sum[i] = a[i + 1] + a[p - 1 - i];
    difference[i] = a[i + 1] - a[p - 1 - i];
    total = total + sum[i];
  });
  const Complex first = a[0];
  a[0] = total;
  each<half>([&](auto row) {
    constexpr int k = decltype(row)() + 1;
    Complex even = first, odd = {0, 0};
    each<half>([&](auto i) {
      constexpr int j = decltype(i)() + 1;
      constexpr float c = float(cosine(j * k, p)), s = float(sine(j * k, p));
      even = {even.x + c * sum[i].x, even.y + c * sum[i].y};
      odd = j == 1 ? Complex{s * difference[i].x, s * difference[i].y}
                   : Complex{odd.x + s * difference[i].x, odd.y + s * difference[i].y};
    });
    a[k] = {even.x + odd.y, even.y - odd.x};
    a[p - k] = {even.x - odd.y, even.y + odd.x};
  });
}

// n = p q: p-point transforms over every q-th element, q-point transforms of what they give.
template <int p, int q>
__device__ inline void dft_product(Complex* a) {
  constexpr int n = p * q;
  constexpr bool is_coprime = coprime(p, q);
  Complex b[q][p];
  each<q>([&](auto column) {
    constexpr int j = decltype(column)();
    each<p>([&](auto row) {
      constexpr int i = decltype(row)();
      b[j][i] = a[is_coprime ? (i * q + j * p) % n : i * q + j];
    });
    dft<p>(b[j]);
  });
  each<p>([&](auto row) {
    constexpr int i = decltype(row)();
    Complex c[q];
    each<q>([&](auto column) {
      constexpr int j = decltype(column)();
      c[j] = turned<is_coprime ? 0 : i * j, n>(b[j][i]);
    });
    dft<q>(c);
    each<q>([&](auto column) {
      constexpr int k = decltype(column)();
      a[is_coprime ? chinese(i, k, p, q) : i + p * k] = c[k];
    });
  });
}

template <int n>
__device__ inline void dft(Complex* a) {
  if constexpr (n == 2) {
    const Complex b = a[1];
    a[1] = a[0] - b;
    a[0] = a[0] + b;
  } else if constexpr (n == 4) {
    const Complex s02 = a[0] + a[2], d02 = a[0] - a[2], s13 = a[1] + a[3], d13 = a[1] - a[3];
    a[0] = s02 + s13;
    a[1] = {d02.x + d13.y, d02.y - d13.x};
    a[2] = s02 - s13;
    a[3] = {d02.x - d13.y, d02.y + d13.x};
  } else if constexpr (n > 2 && smallest_prime(n) == n) {
    dft_prime<n>(a);
  } else if constexpr (n > 4) {
    dft_product<first_factor(n), n / first_factor(n)>(a);
  }
}
