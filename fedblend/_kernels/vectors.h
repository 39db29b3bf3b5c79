// Vectors of the width that the processor computes with, as a compiler's extension, and the number of its registers.
//
// The kernels choose their tiles by REGISTERS: a tile's sums, its operands and one factor stay in registers. Where they
// do not fit, the compiler stores sums to memory in the inner loop, which makes a kernel several times as slow.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int Mask __attribute__((vector_size(4 * LANES)));

// Floats of images and gradients that are read again and again, which fit into the first-level cache.
constexpr int CACHED = 6 << 10;

inline int up(int n, int to) { return (n + to - 1) / to * to; }

// Room for numbers, from the start of a cache line on.
class Room {
  public:
    explicit Room(int64_t size) : all_(new float[size + 16]) {
        const auto beyond = reinterpret_cast<uintptr_t>(all_.get()) % 64 / sizeof(float);
        data_ = all_.get() + (16 - beyond) % 16;
    }
    operator float*() { return data_; }

  private:
    std::unique_ptr<float[]> all_;
    float* data_;
};

inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

// The same numbers, in a register: left to itself, g++ loads them from memory anew for each use in a tile.
inline Vector kept(Vector v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
    return v;
}

// Rows are too short for calls of memcpy, which g++ makes of a loop whose index it can follow. The last numbers may be
// copied twice.
template <class T>
inline void copy_row(T* to, const T* from, int n) {
    constexpr int SOME = LANES < 8 ? LANES : 8;
    typedef T Some __attribute__((vector_size(SOME * sizeof(T)), aligned(1), may_alias));
    const auto copy = [&](int i) { *reinterpret_cast<Some*>(to + i) = *reinterpret_cast<const Some*>(from + i); };
    int i = 0;
    for (; i + SOME <= n; i += SOME) {
        asm("" : "+r"(i));
        copy(i);
    }
    if (i < n && n >= SOME) return copy(n - SOME);
    for (; i < n; i++) {
        asm("" : "+r"(i));
        to[i] = from[i];
    }
}

// Numbers that are read soon.
template <class T>
inline void prefetch(const T* from, int64_t n) {
    constexpr int LINE = 64 / sizeof(T);
    for (int64_t i = 0; i < n; i += LINE) __builtin_prefetch(from + i);
}

template <class Place, int... I>
constexpr Mask places_by(Place place, std::integer_sequence<int, I...>) {
    return Mask{place(I)...};
}

// The vector of place(0), place(1), ...
template <class Place>
constexpr Mask places_by(Place place) {
    return places_by(place, std::make_integer_sequence<int, LANES>());
}

template <int... I>
Vector splat(float number, std::integer_sequence<int, I...>) {
    return Vector{(static_cast<void>(I), number)...};
}

// A vector of one number, in a register.
inline Vector splat(float number) {
    return kept(splat(number, std::make_integer_sequence<int, LANES>()));
}

// The numbers at `places` of a and b, counted through both.
inline Vector shuffle(Vector a, Vector b, Mask places) {
#if defined(__clang__)
    Vector made;
    for (int i = 0; i < LANES; i++) made[i] = places[i] < LANES ? a[places[i]] : b[places[i] - LANES];
    return made;
#else
    return __builtin_shuffle(a, b, places);
#endif
}

// Transpose LANES vectors: exchange the blocks beside the diagonal, of S numbers in S vectors, in blocks of twice the size.
template <int S = 1>
void exchange(Vector (&v)[LANES]) {
    constexpr Mask upper = places_by([](int i) { return i & S ? LANES + i - S : i; });
    constexpr Mask lower = places_by([](int i) { return i & S ? LANES + i : i + S; });
    for (int i = 0; i < LANES; i++)
        if (!(i & S)) {
            const Vector a = v[i], b = v[i + S];
            v[i] = shuffle(a, b, upper), v[i + S] = shuffle(a, b, lower);
        }
    if constexpr (2 * S < LANES) exchange<2 * S>(v);
}

// The sum of a vector's numbers, by halves.
inline float total(Vector v) {
    if (LANES > 8) v += shuffle(v, v, places_by([](int i) { return (i + 8) % LANES; }));
    if (LANES > 4) v += shuffle(v, v, places_by([](int i) { return (i + 4) % LANES; }));
    return (v[0] + v[2]) + (v[1] + v[3]);
}

// Call `work(first, rows)` on blocks of about as many rows, at most `most`: few rows are few sums at a time.
template <class Work>
void each_block(int rows, int most, Work work) {
    for (int done = 0, blocks = (rows + most - 1) / most; blocks > 0; blocks--) {
        const int some = (rows - done + blocks - 1) / blocks;
        work(done, some);
        done += some;
    }
}

}  // namespace
