// Vectors of sixteen numbers, as a compiler's extension.

#pragma once

namespace {

constexpr int LANES = 16;
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int Mask __attribute__((vector_size(4 * LANES)));
typedef float Half __attribute__((vector_size(32), aligned(4), may_alias));

inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

// Rows are too short for calls of memcpy.
inline void copy_row(float* to, const float* from, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8) *reinterpret_cast<Half*>(to + i) = *reinterpret_cast<const Half*>(from + i);
    for (; i < n; i++) to[i] = from[i];
}

// The sum of a vector's numbers, by halves.
inline float total(Vector v) {
    constexpr Mask EIGHT = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
    constexpr Mask FOUR = {4, 5, 6, 7, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0};
    v += __builtin_shuffle(v, EIGHT);
    v += __builtin_shuffle(v, FOUR);
    return (v[0] + v[2]) + (v[1] + v[3]);
}

}  // namespace
