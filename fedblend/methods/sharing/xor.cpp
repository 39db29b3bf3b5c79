// XorMixFL's blending, encoding and decoding of 8-bit samples in one pass over them (equations 1 to 3).

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t BLOCK = 4096;  // pixels of a sample that are worked on at a time: they stay in a core's first cache
constexpr int64_t AHEAD = 2;     // samples that are fetched before they are needed: they lie anywhere in memory
constexpr int64_t LINE = 64;

// Rounding, as in xor.py: what lies within WINDOW of a half counts as one, and goes to the even number.
constexpr int32_t BITS = 23, HALF = 1 << (BITS - 1), MASK = (1 << BITS) - 1, WINDOW = 128;

// Shares of two samples: of 2^23 in all, and, where that is exact too, of 2^16.
struct Weights {
    int32_t fine;
    int32_t coarse;  // 0: not exact
};

// room <- alpha b + (1 - alpha) a, rounded; b may be the room itself, pixel by pixel.
void blend_finely(const uint8_t* b, const uint8_t* a, int64_t count, int32_t weight, uint8_t* room) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) {
        const int32_t exact = (int32_t(a[i]) << BITS) + (int32_t(b[i]) - a[i]) * weight + HALF + WINDOW;
        const int32_t up = exact >> BITS, tie = (exact & MASK) < 2 * WINDOW;
        room[i] = uint8_t(up - (tie & up));
    }
}

// The same of shares of 2^16, in 16 bits: the sum's upper 16 of 24 bits are built of products with a share's two bytes,
// none of which passes 65,535. The lower byte of what stands before the point is then 0 for a half, and for that alone.
void blend_coarsely(const uint8_t* b, const uint8_t* a, int64_t count, int32_t weight, uint8_t* room) {
    const int32_t rest = 65536 - weight;
    const uint16_t b1 = uint16_t(weight >> 8), b0 = weight & 255, a1 = uint16_t(rest >> 8), a0 = rest & 255;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) {
        const uint16_t high = uint16_t(uint16_t(b[i] * b1) + uint16_t(a[i] * a1));
        const uint16_t low = uint16_t(uint16_t(uint16_t(b[i] * b0) + uint16_t(a[i] * a0)) + WINDOW);
        const uint16_t sum = uint16_t(uint16_t(high + uint16_t(low >> 8)) + 128);
        const uint8_t up = uint8_t(sum >> 8), rest_of = uint8_t(sum);
        room[i] = uint8_t(up - (rest_of == 0 ? up & 1 : 0));
    }
}

struct Sources {
    const uint8_t* x;
    int64_t pixels, p;
    const int64_t* places;  // [count, p], -1: none; null: there are none at all

    const uint8_t* sample(int64_t row, int64_t k) const {
        const int64_t place = places[row * p + k];
        return place < 0 ? nullptr : x + place * pixels;
    }

    void fetch(int64_t row) const {
        if (!places) return;
        for (int64_t k = 0; k < p; k++) {
            if (const uint8_t* from = sample(row, k)) {
                for (int64_t i = 0; i < std::min(pixels, BLOCK); i += LINE) __builtin_prefetch(from + i);
            }
        }
    }

    // The blend of a sample's pixels; where there is one source only, that itself.
    const uint8_t* blended(int64_t row, int64_t start, int64_t count, Weights weights, uint8_t* room) const {
        const uint8_t* b = sample(row, 0) + start;
        for (int64_t k = 1; k < p; k++) {
            const uint8_t* a = sample(row, k);
            if (!a) continue;
            if (weights.coarse) {
                blend_coarsely(b, a + start, count, weights.coarse, room);
            } else {
                blend_finely(b, a + start, count, weights.fine, room);
            }
            b = room;
        }
        return b;
    }
};

}  // namespace

extern "C" {

// out [count, pixels] = first XOR (second + noise, at most 255); first are blends, or `given` as they are; `second` and
// `noise` may be null.
void xor_of_blends(const uint8_t* x, int64_t pixels, int64_t count, int64_t p_first, const int64_t* first,
                   const uint8_t* given, int64_t p_second, const int64_t* second, const uint8_t* noise, int32_t fine,
                   int32_t coarse, uint8_t* out) {
    const Weights weight{fine, coarse};
    const Sources one{x, pixels, p_first, first}, other{x, pixels, p_second, second};
    uint8_t room[BLOCK], more[BLOCK];
    for (int64_t row = 0; row < count; row++) {
        if (row + AHEAD < count) {
            one.fetch(row + AHEAD);
            other.fetch(row + AHEAD);
        }
        for (int64_t start = 0; start < pixels; start += BLOCK) {
            const int64_t n = std::min(BLOCK, pixels - start), at = row * pixels + start;
            const uint8_t* a = first ? one.blended(row, start, n, weight, room) : given + at;
            uint8_t* made = out + at;
            if (!second) {
                std::copy(a, a + n, made);
                continue;
            }
            const uint8_t* b = other.blended(row, start, n, weight, more);
            if (noise) {
                for (int64_t i = 0; i < n; i++) {
                    const int lifted = b[i] + noise[at + i];
                    made[i] = a[i] ^ uint8_t(lifted > 255 ? 255 : lifted);
                }
            } else {
                for (int64_t i = 0; i < n; i++) made[i] = a[i] ^ b[i];
            }
        }
    }
}
}
