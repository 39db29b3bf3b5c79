// 2x2 max pools with stride 2, and their adjoint, of planes [H, W].
//
// Rows are processed in runs of a vector of outputs, even if a row has fewer. Values beyond a row's end are overwritten by
// the next row, and the last rows use a buffer.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace {

constexpr Mask EVEN = places_by([](int i) { return 2 * i; });
constexpr Mask ODD = places_by([](int i) { return 2 * i + 1; });
// Each number of a vector twice: the first half of the result, and the second.
constexpr Mask TWICE_LOW = places_by([](int i) { return i / 2; });
constexpr Mask TWICE_HIGH = places_by([](int i) { return LANES / 2 + i / 2; });
constexpr Mask PLACES = places_by([](int i) { return i; });
typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

// Small numbers as bytes, and bytes as numbers. g++ converts them one by one if it is not told how.
inline Bytes bytes_of(Mask numbers) {
#if defined(__clang__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    return __builtin_convertvector(numbers, Bytes);
#else
    typedef uint8_t All __attribute__((vector_size(4 * LANES)));
    All lowest = {};
    for (int i = 0; i < LANES; i++) lowest[i] = 4 * i;
    const All all = __builtin_shuffle(All(numbers), lowest);
    Bytes bytes;
    std::memcpy(&bytes, &all, sizeof bytes);
    return bytes;
#endif
}

inline Mask numbers_of(Bytes bytes) {
#if defined(__AVX512F__)
    return Mask(_mm512_maskz_cvtepu8_epi32(0xffff, __m128i(bytes)));
#elif defined(__AVX2__)
    return Mask(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&bytes))));
#else
    return __builtin_convertvector(bytes, Mask);
#endif
}

struct Blocks {
    Vector value[4];  // upper left, upper right, lower left, lower right
};

inline Blocks load_blocks(const float* upper, const float* lower, int left, int64_t room) {
    float copy[2][2 * LANES];
    if (room < 2 * LANES) {
        std::memcpy(copy[0], upper, 8 * left);
        std::memcpy(copy[1], lower, 8 * left);
        upper = copy[0], lower = copy[1];
    }
    const Vector a = load(upper), b = load(upper + LANES), c = load(lower), d = load(lower + LANES);
    return {{shuffle(a, b, EVEN), shuffle(a, b, ODD), shuffle(c, d, EVEN),
             shuffle(c, d, ODD)}};
}

// Planes of one size in a buffer of `size` floats: `apart` is the stride of planes, `pitch` that of rows.
struct Planes {
    int64_t number;
    int H, W, pitch;
    int64_t apart, size;
    int64_t outputs() const { return number * (H / 2) * (W / 2); }
};

inline Planes dense(int64_t number, int H, int W) { return {number, H, W, W, int64_t(H) * W, number * H * W}; }

// Run `work(upper, lower, place, left, room)` on runs of up to a vector of blocks: `place` counts outputs, `left` those of
// the run, `room` the floats of the buffer after the start of the lower row. A row's last run of several begins so early
// that it is whole: some blocks are computed twice.
template <class Work>
void each_run(const Planes& p, Work work) {
    const int h = p.H / 2, w = p.W / 2, left = std::min(LANES, w);
    for (int64_t n = 0; n < p.number; n++)
        for (int i = 0; i < h; i++)
            for (int next = 0; next < w; next += LANES) {
                const int j = std::min(next, w - left);
                const int64_t upper = n * p.apart + 2 * i * p.pitch + 2 * j, lower = upper + p.pitch;
                work(upper, lower, (n * h + i) * w + j, left, p.size - lower);
            }
}

template <class T, class V>
inline void store_run(T* to, V value, int left, int64_t room) {
    if (room >= LANES)
        std::memcpy(to, &value, sizeof(V));
    else
        std::memcpy(to, &value, left * sizeof(T));
}

// Whether b is the maximum: as in PyTorch, a maximum is NaN if one of its numbers is NaN.
inline Mask exceeds(Vector b, Vector a) { return (b > a) | (b != b); }

// The maxima of four vectors, and which of the four numbers is the first maximum.
struct Largest {
    Vector value;
    Mask place;
};

inline Largest largest(const Vector (&v)[4]) {
    const Mask right = exceeds(v[1], v[0]), lower_right = exceeds(v[3], v[2]);
    const Vector top = right ? v[1] : v[0], bottom = lower_right ? v[3] : v[2];
    const Mask below = exceeds(bottom, top), first = right & 1, second = (lower_right & 1) + 2;
    return {below ? bottom : top, below ? second : first};
}

// Maxima, and which of the four values is the first maximum; y and which have room for `outputs` numbers.
inline void pool_planes(const Planes& p, const float* x, float* y, uint8_t* which, int64_t outputs) {
    each_run(p, [&](int64_t upper, int64_t lower, int64_t place, int left, int64_t room) {
        const auto [v] = load_blocks(x + upper, x + lower, left, room);
        const auto [value, corner] = largest(v);
        store_run(y + place, value, left, outputs - place);
        store_run(which + place, bytes_of(corner), left, outputs - place);
    });
}

// Up to a vector of gradients, and the corners to which they go: those beyond `left` go to none.
struct Corners {
    Vector value;
    Mask from;
};

inline Corners load_gradients(const float* g, const uint8_t* which, int left, int64_t room) {
    if (room >= LANES) {
        Bytes bytes;
        std::memcpy(&bytes, which, sizeof bytes);
        const Mask from = numbers_of(bytes);
        return {load(g), left < LANES ? (PLACES < left ? from : Mask{} + 4) : from};
    }
    Bytes bytes = Bytes{} + uint8_t(4);
    Vector value = {};
    std::memcpy(&bytes, which, left);
    std::memcpy(&value, g, 4 * left);
    return {value, numbers_of(bytes)};
}

// Each gradient at the position of its maximum, zeros at the other three. Numbers outside of blocks do not change.
inline void spread_planes(const Planes& p, const float* g, const uint8_t* which, float* x) {
    each_run(p, [&](int64_t upper, int64_t lower, int64_t place, int left, int64_t room) {
        const auto [value, from] = load_gradients(g + place, which + place, left, p.outputs() - place);
        const Vector zero = {};
        const Vector twice[2] = {shuffle(value, value, TWICE_LOW), shuffle(value, value, TWICE_HIGH)};
        const Mask corner[2] = {Mask(shuffle(Vector(from), Vector(from), TWICE_LOW)),
                                Mask(shuffle(Vector(from), Vector(from), TWICE_HIGH))};
        for (int row = 0; row < 2; row++) {
            const Mask wanted = PLACES % 2 + 2 * row;
            const Vector pair[2] = {corner[0] == wanted ? twice[0] : zero, corner[1] == wanted ? twice[1] : zero};
            float* to = x + (row ? lower : upper);
            // Zeros beyond the row's end are overwritten by later rows.
            if (left == LANES || room >= 2 * p.pitch + 2 * LANES)
                store(to, pair[0]), store(to + LANES, pair[1]);
            else
                std::memcpy(to, pair, 8 * left);
        }
    });
}

}  // namespace
