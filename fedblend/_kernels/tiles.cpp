// Convolutions on the matrix units of x86 processors (AMX), in float32.
//
// The units multiply bfloat16 numbers (8 bits of precision) exactly, and add in float32. A float32 number (24 bits) is
// the sum of three bfloat16 numbers: a = a1 + a2 + a3. Of the nine products in (a1 + a2 + a3)(b1 + b2 + b3), three are
// below float32's last bit. The other six give a product as exact as float32's, in less than half of its time.
//
// All tensors are float32 and contiguous; K clients with B samples each have x [K, B, C, H, W],
// w [K, O, C, kh, kw], y [K, B, O, h, w]; the stride is 1 and p < kh, kw the padding.

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "pools.h"

namespace {

constexpr int SIDE = 16;          // rows of a tile, and float32 columns
constexpr int DEPTH = 32;         // terms of a product of tiles
constexpr int TILE = SIDE * SIDE; // dwords of a tile: float32 numbers or pairs of bfloat16
constexpr int PARTS = 3;

// Sizes of blocks that fit into caches: bytes of input, positions of a sum, and blocks of positions whose products for
// all taps of the kernel are computed in a row.
constexpr size_t READ_AT_ONCE = 1 << 20;
constexpr int SUMMED_AT_ONCE = 512;
constexpr int NEAR = 2;

inline int up(int n, int to) { return (n + to - 1) / to * to; }
inline int blocks(int n, int of) { return (n + of - 1) / of; }

// Samples per group, for the fewest groups of at most `most` samples and about equal sizes.
inline int chunk_of(int samples, int most) { return blocks(samples, blocks(samples, std::max(most, 1))); }

// Memory that a thread keeps between calls, since new pages take as much time as the computation.
template <int PURPOSE>
uint32_t* scratch(size_t dwords) {
    struct Kept {
        uint32_t* memory = nullptr;
        size_t room = 0;
        ~Kept() { std::free(memory); }
    };
    static thread_local Kept kept;
    if (kept.room < dwords) {
        std::free(kept.memory);
        kept.room = (dwords + dwords / 8 + 1023) / 1024 * 1024;
        kept.memory = static_cast<uint32_t*>(std::aligned_alloc(64, 4 * kept.room));
        if (!kept.memory) {
            kept.room = 0;
            throw std::bad_alloc();
        }
    }
    return kept.memory;
}

// The instructions by the number of the tile; compilers' intrinsics do not accept a template's constant.
template <int NUMBER>
inline __attribute__((always_inline)) void load_tile(const void* from, size_t step) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(step), "i"(NUMBER) : "memory");
}
template <int NUMBER>
inline __attribute__((always_inline)) void store_tile(void* to, size_t step) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(step), "i"(NUMBER) : "memory");
}
template <int SUM, int A, int B>
inline __attribute__((always_inline)) void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}
template <int NUMBER>
inline __attribute__((always_inline)) void clear_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(NUMBER));
}

// Configure all tiles at full size, and restore the caller's configuration in the destructor.
class Tiles {
    struct alignas(64) Settings {
        uint8_t palette, start_row, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } before;

  public:
    Tiles() {
        Settings full = {};
        full.palette = 1;
        for (int t = 0; t < 8; t++) full.bytes[t] = 64, full.rows[t] = SIDE;
        asm volatile("sttilecfg %0" : "=m"(before));
        asm volatile("ldtilecfg %0" : : "m"(full));
    }
    ~Tiles() { asm volatile("ldtilecfg %0" : : "m"(before)); }
};

// Two times 16 numbers as three parts each; every dword is a pair: the low half first, or low[i] with high[i].
template <bool INTERLEAVED>
inline void split(__m512 low, __m512 high, __m512i parts[PARTS]) {
    alignas(64) static const uint16_t order[32] = {0,  16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8,  24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    for (int part = 0; part < PARTS; part++) {
        const __m512i rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        __m512i first, second;
        if (INTERLEAVED) {
            parts[part] = _mm512_permutexvar_epi16(_mm512_load_si512(order), rounded);
            first = _mm512_slli_epi32(parts[part], 16);
            second = _mm512_and_si512(parts[part], _mm512_set1_epi32(0xffff0000));
        } else {
            parts[part] = rounded;
            first = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(rounded)), 16);
            second = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(rounded, 1)), 16);
        }
        low = _mm512_sub_ps(low, _mm512_castsi512_ps(first));
        high = _mm512_sub_ps(high, _mm512_castsi512_ps(second));
    }
}

inline __mmask16 first16(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

// The input of a convolution with a border of ph rows and pw columns of zeros, as one run of numbers: the zeros at the
// right of a row are also the zeros at the left of the next row. Output (i, j) is at position i * pitch + j of a run.
// Row i, column j of the kernel reads the position i * pitch + j later. Positions between the outputs' rows are
// computed, but not used. All channels of a position are in one cache line, so tiles are loaded in whole lines.
struct Geometry {
    int C, H, W, kh, kw, ph, pw;
    int h() const { return H + 2 * ph - kh + 1; }
    int w() const { return W + 2 * pw - kw + 1; }
    int n() const { return h() * w(); }
    int taps() const { return kh * kw; }
    int deep() const { return blocks(C, DEPTH); }
    int pitch() const { return W + pw; }
    int places() const { return h() * pitch(); }
    // Positions from one sample to the next in one run: the zeros below a sample are also those above the next.
    int below() const { return (H + ph) * pitch(); }
    // Numbers of a run that are read for `places` in blocks. The number of cache lines is odd, since runs at a distance
    // of a power of two share one cache set.
    int run(int places, int block) const {
        return (blocks(up(places, block) + (kh - 1) * pitch() + kw, SIDE) | 1) * SIDE;
    }
};

// Copy n numbers of a row.
inline void copy_some(float* to, const float* from, int n) {
    for (int t = 0; t < n; t += SIDE)
        _mm512_mask_storeu_ps(to + t, first16(n - t), _mm512_maskz_loadu_ps(first16(n - t), from + t));
}

// Gradients [samples, O, h, w], either of the outputs or of a max pool of the outputs.
struct Gradients {
    const float* g;
    const uint8_t* which;
    // The gradients of some samples, valid until the next call.
    const float* of(int O, int h, int w, int sample, int samples) const {
        if (!which) return g + size_t(sample) * O * h * w;
        const Planes planes = dense(int64_t(samples) * O, h, w);
        float* made = reinterpret_cast<float*>(scratch<6>(planes.size));
        if (h % 2 || w % 2) std::fill(made, made + planes.size, 0.0f);
        const size_t before = size_t(sample) * O * (h / 2) * (w / 2);
        spread_planes(planes, g + before, which + before, made);
        return made;
    }
    Gradients after(int samples, int O, int h, int w) const {
        const size_t on = size_t(samples) * O * (which ? (h / 2) * (w / 2) : h * w);
        return {g + on, which ? which + on : which};
    }
};

// Copy a channel's rows to their positions in a run of zeros.
inline void lay(const Geometry& s, const float* x, float* run) {
    run += s.ph * s.pitch() + s.pw;
    for (int y = 0; y < s.H; y++) copy_some(run + y * s.pitch(), x + y * s.W, s.W);
}

void transpose(__m512i r[SIDE]) {
    __m512i t[SIDE];
    for (int i = 0; i < 16; i += 4) {
        const __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]), d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
        t[i] = _mm512_unpacklo_epi64(a, c), t[i + 1] = _mm512_unpackhi_epi64(a, c);
        t[i + 2] = _mm512_unpacklo_epi64(b, d), t[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
        r[i] = _mm512_shuffle_i32x4(a, c, 0x88), r[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

// Load sixteen numbers of each of sixteen runs, transposed.
inline void load_turned(const float* runs, int run, __m512i rows[SIDE]) {
    for (int r = 0; r < SIDE; r++) rows[r] = _mm512_load_si512(runs + size_t(r) * run);
    transpose(rows);
}

// Runs for 32 channels, filled with zeros.
float* empty_runs(int run) {
    float* runs = reinterpret_cast<float*>(scratch<0>(size_t(DEPTH) * run));
    std::fill(runs, runs + size_t(DEPTH) * run, 0.0f);
    return runs;
}

// One sample by positions: [part][channels / 32][position][32 channels in bfloat16]. `runs` has room for 32 channels.
void places_of(const Geometry& s, int run, const float* x, float* runs, uint32_t* out) {
    const size_t part_size = size_t(s.deep()) * run * SIDE;
    for (int c = 0; c < s.C; c += DEPTH) {
        for (int r = 0; r < DEPTH; r++)
            if (c + r < s.C)
                lay(s, x + size_t(c + r) * s.H * s.W, runs + size_t(r) * run);
            else
                std::fill(runs + size_t(r) * run, runs + size_t(r + 1) * run, 0.0f);
        for (int q = 0; q < run; q += SIDE) {
            __m512i low[SIDE], high[SIDE];
            load_turned(runs + q, run, low);
            load_turned(runs + size_t(SIDE) * run + q, run, high);
            for (int r = 0; r < SIDE; r++, out += SIDE) {
                __m512i parts[PARTS];
                split<false>(_mm512_castsi512_ps(low[r]), _mm512_castsi512_ps(high[r]), parts);
                for (int part = 0; part < PARTS; part++) _mm512_store_si512(out + part * part_size, parts[part]);
            }
        }
    }
}

// The positions of some samples as runs: one run for each sample or one for all, by the smaller number of blocks.
struct Runs {
    int number, samples, blocks_of_places, run;
    Runs(const Geometry& s, int some) {
        const int all = (some - 1) * s.below() + s.places();
        const bool joined = blocks(all, DEPTH) < some * blocks(s.places(), DEPTH);
        number = joined ? 1 : some, samples = joined ? some : 1;
        blocks_of_places = blocks(joined ? all : s.places(), DEPTH);
        run = s.run(blocks_of_places * DEPTH, DEPTH);
    }
    size_t part(const Geometry& s) const { return size_t(blocks(s.C, SIDE)) * run * SIDE; }
};

// A run's samples by pairs of positions: [part][channels / 16][position][16 channels, here and at the next one].
void pairs_of_places(const Geometry& s, const Runs& all, const float* x, uint32_t* out) {
    const int run = all.run;
    float* runs = empty_runs(run);
    float* turned = reinterpret_cast<float*>(scratch<5>(size_t(run + 1) * SIDE));
    std::fill(turned + size_t(run) * SIDE, turned + size_t(run + 1) * SIDE, 0.0f);
    for (int c = 0; c < s.C; c += SIDE) {
        for (int r = 0; r < std::min(SIDE, s.C - c); r++)
            for (int b = 0; b < all.samples; b++)
                lay(s, x + (size_t(b) * s.C + c + r) * s.H * s.W, runs + size_t(r) * run + b * s.below());
        for (int q = 0; q < run; q += SIDE) {
            __m512i rows[SIDE];
            load_turned(runs + q, run, rows);
            for (int r = 0; r < SIDE; r++) _mm512_store_si512(turned + size_t(q + r) * SIDE, rows[r]);
        }
        for (int q = 0; q < run; q++, out += SIDE) {
            __m512i parts[PARTS];
            const float* here = turned + size_t(q) * SIDE;
            split<true>(_mm512_load_ps(here), _mm512_load_ps(here + SIDE), parts);
            for (int part = 0; part < PARTS; part++) _mm512_store_si512(out + part * all.part(s), parts[part]);
        }
    }
}

// A run's gradients [samples, O, h, w] as tiles of 16 outputs by 32 positions: [part][outputs/16][positions/32][tile].
void gradient_tiles(const Geometry& s, const Runs& all, int O, const float* g, uint32_t* out, size_t part_size) {
    const int run = all.run;
    float* runs = empty_runs(run);
    for (int o = 0; o < O; o += SIDE) {
        for (int r = 0; r < std::min(SIDE, O - o); r++)
            for (int b = 0; b < all.samples; b++)
                for (int y = 0; y < s.h(); y++)
                    copy_some(runs + size_t(r) * run + b * s.below() + y * s.pitch(),
                             g + (size_t(b) * O + o + r) * s.n() + y * s.w(), s.w());
        for (int q = 0; q < all.blocks_of_places * DEPTH; q += DEPTH)
            for (int r = 0; r < SIDE; r++, out += SIDE) {
                const float* from = runs + size_t(r) * run + q;
                __m512i parts[PARTS];
                split<false>(_mm512_load_ps(from), _mm512_load_ps(from + SIDE), parts);
                for (int part = 0; part < PARTS; part++) _mm512_store_si512(out + part * part_size, parts[part]);
            }
    }
}

// A client's weights, M outputs of a product over `depth` inputs, as tiles of 32 inputs by 16 outputs:
// [M / 32][inputs / 32][tap][part][up to 2][tile]. `along` and `down` are the strides of inputs
// and outputs.
void weight_tiles(int M, int depth, int taps, size_t down, size_t along, bool flipped, const float* w, uint32_t* out) {
    const __m512i steps = _mm512_mullo_epi32(_mm512_set1_epi32(int(along)),
                                             _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    const __m512 none = _mm512_setzero_ps();
    for (int first = 0; first < M; first += 2 * SIDE) {
        const int wide = M - first > SIDE ? 2 : 1;
        for (int k = 0; k < depth; k += DEPTH)
            for (int tap = 0; tap < taps; tap++, out += size_t(PARTS) * wide * TILE)
                for (int tile = 0; tile < wide; tile++) {
                    __m512i rows[PARTS][SIDE];
                    for (int r = 0; r < SIDE; r++) {
                        const int m = first + tile * SIDE + r, left = m < M ? depth - k : 0;
                        const float* from = w + m * down + k * along + (flipped ? taps - 1 - tap : tap);
                        __m512i parts[PARTS];
                        split<false>(_mm512_mask_i32gather_ps(none, first16(left), steps, from, 4),
                                     _mm512_mask_i32gather_ps(none, first16(left - 16), steps, from + 16 * along, 4),
                                     parts);
                        for (int part = 0; part < PARTS; part++) rows[part][r] = parts[part];
                    }
                    for (int part = 0; part < PARTS; part++) {
                        transpose(rows[part]);
                        uint32_t* to = out + (part * wide + tile) * TILE;
                        for (int r = 0; r < SIDE; r++) _mm512_store_si512(to + r * SIDE, rows[part][r]);
                    }
                }
    }
}

size_t weight_room(int M, int depth, int taps) {
    return size_t(blocks(M, SIDE)) * blocks(depth, DEPTH) * taps * PARTS * TILE;
}

// The products of the six pairs of parts, added to tiles 0 to 3: [first of a][first, second of b], [second of a][...].
template <int TALL, int WIDE, class LoadA, class LoadB>
inline __attribute__((always_inline)) void six_products(LoadA load_a, LoadB load_b) {
    const auto multiply = []() __attribute__((always_inline)) {
        multiply_tiles<0, 4, 6>();
        if (WIDE == 2) multiply_tiles<1, 4, 7>();
        if (TALL == 2) multiply_tiles<2, 5, 6>();
        if (TALL == 2 && WIDE == 2) multiply_tiles<3, 5, 7>();
    };
    load_a(0), load_b(2), multiply();
    load_b(1), multiply();
    load_b(0), multiply();
    load_a(2), multiply();
    load_a(1), multiply();
    load_b(1), multiply();
}

inline __attribute__((always_inline)) void clear_sums() {
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
}

// Sixteen positions of a sample: the address of their inputs, and the positions in y of those that are outputs.
struct Place {
    const uint32_t* from;
    float* to;
    __mmask16 outputs;
};

// The sixteen positions from q on, of a sample with the outputs y.
Place place_of(const Geometry& s, const uint32_t* image, float* y, int q) {
    Place place{image + size_t(q) * SIDE, y + q / s.pitch() * s.w() + std::min(q % s.pitch(), s.w()), 0};
    for (int lane = 0; lane < SIDE; lane++)
        if (q + lane < s.places() && (q + lane) % s.pitch() < s.w()) place.outputs |= 1u << lane;
    return place;
}

// Write a tile of sums [position][output] to `outputs` rows of y.
template <int NUMBER>
inline void put(const Place& place, int n, int first, int outputs) {
    alignas(64) uint32_t tile[TILE];
    store_tile<NUMBER>(tile, 64);
    __m512i rows[SIDE];
    for (int r = 0; r < SIDE; r++) rows[r] = _mm512_load_si512(tile + r * SIDE);
    transpose(rows);
    float* y = place.to + size_t(first) * n;
    const __mmask16 some = first16(__builtin_popcount(place.outputs));
    for (int r = 0; r < std::min(outputs - first, SIDE); r++, y += n)
        _mm512_mask_storeu_epi32(y, some, _mm512_maskz_compress_epi32(place.outputs, rows[r]));
}

// Up to 16 WIDE outputs at TALL times 16 positions.
template <int TALL, int WIDE>
void output_block(const Geometry& s, int run, const Place* places, const uint32_t* weights, int outputs) {
    const size_t part_size = size_t(s.deep()) * run * SIDE;
    clear_sums();
    for (int k = 0; k < s.deep(); k++)
        for (int i = 0; i < s.kh; i++)
            for (int j = 0; j < s.kw; j++, weights += PARTS * WIDE * TILE) {
                const size_t at = (size_t(k) * run + i * s.pitch() + j) * SIDE;
                const uint32_t *first = places[0].from + at, *second = places[TALL - 1].from + at;
                six_products<TALL, WIDE>(
                    [&](int part) __attribute__((always_inline)) {
                        load_tile<4>(first + part * part_size, 64);
                        if (TALL == 2) load_tile<5>(second + part * part_size, 64);
                    },
                    [&](int part) __attribute__((always_inline)) {
                        load_tile<6>(weights + part * WIDE * TILE, 64);
                        if (WIDE == 2) load_tile<7>(weights + part * WIDE * TILE + TILE, 64);
                    });
            }
    put<0>(places[0], s.n(), 0, outputs);
    if (WIDE == 2) put<1>(places[0], s.n(), SIDE, outputs);
    if (TALL == 2) put<2>(places[1], s.n(), 0, outputs);
    if (TALL == 2 && WIDE == 2) put<3>(places[1], s.n(), SIDE, outputs);
}

// y [B, M, h, w] of x [B, C, H, W] and weights as tiles; with `which`, y is the max pool and has `room`.
void products_at_places(const Geometry& s, int B, int M, const Gradients& x, const uint32_t* weights, float* y,
                        uint8_t* which = nullptr, int64_t room = 0) {
    const int run = s.run(s.places(), SIDE);
    const size_t image_size = size_t(PARTS) * s.deep() * run * SIDE;
    const int chunk = chunk_of(B, int(READ_AT_ONCE / (4 * image_size)));
    uint32_t* images = scratch<1>(chunk * image_size);
    float* runs = empty_runs(run);
    const size_t tile_size = size_t(s.deep()) * s.taps() * PARTS * TILE;
    std::vector<Place> places;
    for (int first = 0; first < B; first += chunk) {
        const Planes planes = dense(int64_t(std::min(B - first, chunk)) * M, s.h(), s.w());
        float* made = which ? reinterpret_cast<float*>(scratch<7>(planes.size)) : y + size_t(first) * M * s.n();
        places.clear();
        for (int b = first; b < std::min(B, first + chunk); b++) {
            uint32_t* image = images + (b - first) * image_size;
            places_of(s, run, x.of(s.C, s.H, s.W, b, 1), runs, image);
            for (int q = 0; q < s.places(); q += SIDE)
                places.push_back(place_of(s, image, made + size_t(b - first) * M * s.n(), q));
        }
        for (int m = 0; m < M; m += 2 * SIDE) {
            for (size_t i = 0; i < places.size(); i += 2) {
                const bool tall = places.size() - i > 1, wide = M - m > SIDE;
                const auto work = tall ? wide ? output_block<2, 2> : output_block<2, 1>
                                       : wide ? output_block<1, 2> : output_block<1, 1>;
                work(s, run, &places[i], weights + m / SIDE * tile_size, M - m);
            }
            for (Place& place : places) place.to += size_t(2 * SIDE) * s.n();
        }
        if (which) {
            pool_planes(planes, made, y, which, room);
            y += planes.outputs(), which += planes.outputs(), room -= planes.outputs();
        }
    }
}

// Addresses of the two factors of products over positions: tiles of gradients, and pairs of positions.
struct Sides {
    const uint32_t *g, *x;
    size_t g_next, g_part, x_next, x_part;
};

// Sums over `some` blocks of positions, for 16 TALL outputs and 16 WIDE channels, added to `sums`.
template <int TALL, int WIDE>
void sum_block(Sides at, int some, float* sums) {
    load_tile<0>(sums, 64);
    if (WIDE == 2) load_tile<1>(sums + TILE, 64);
    if (TALL == 2) load_tile<2>(sums + 2 * TILE, 64);
    if (TALL == 2 && WIDE == 2) load_tile<3>(sums + 3 * TILE, 64);
    for (int block = 0; block < some; block++, at.g += TILE, at.x += DEPTH * SIDE)
        six_products<TALL, WIDE>(
            [&](int part) __attribute__((always_inline)) {
                load_tile<4>(at.g + part * at.g_part, 64);
                if (TALL == 2) load_tile<5>(at.g + part * at.g_part + at.g_next, 64);
            },
            // Every second position, since a pair includes the next one.
            [&](int part) __attribute__((always_inline)) {
                load_tile<6>(at.x + part * at.x_part, 128);
                if (WIDE == 2) load_tile<7>(at.x + part * at.x_part + at.x_next, 128);
            });
    store_tile<0>(sums, 64);
    if (WIDE == 2) store_tile<1>(sums + TILE, 64);
    if (TALL == 2) store_tile<2>(sums + 2 * TILE, 64);
    if (TALL == 2 && WIDE == 2) store_tile<3>(sums + 3 * TILE, 64);
}

// Add a run's products to sums [channels / 32][outputs / 32][tap][4 tiles].
void add_run(const Geometry& s, const Runs& all, int O, const Sides& sides, float* sums) {
    for (int c = 0; c < s.C; c += 2 * SIDE)
        for (int o = 0; o < O; o += 2 * SIDE, sums += size_t(s.taps()) * 4 * TILE) {
            const bool tall = O - o > SIDE, wide = s.C - c > SIDE;
            const auto work = tall ? wide ? sum_block<2, 2> : sum_block<2, 1>
                                   : wide ? sum_block<1, 2> : sum_block<1, 1>;
            for (int block = 0; block < all.blocks_of_places; block += NEAR)
                for (int tap = 0; tap < s.taps(); tap++) {
                    const int place = tap / s.kw * s.pitch() + tap % s.kw + block * DEPTH;
                    Sides at = sides;
                    at.g += o / SIDE * sides.g_next + size_t(block) * TILE;
                    at.x += c / SIDE * sides.x_next + size_t(place) * SIDE;
                    work(at, std::min(NEAR, all.blocks_of_places - block), sums + size_t(tap) * 4 * TILE);
                }
        }
}

// Write sums to w [O, C, kh, kw].
void put_sums(const Geometry& s, int O, const float* sums, float* w) {
    const int taps = s.taps();
    const __m512i steps = _mm512_mullo_epi32(_mm512_set1_epi32(taps),
                                             _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    for (int c = 0; c < s.C; c += 2 * SIDE)
        for (int o = 0; o < O; o += 2 * SIDE)
            for (int tap = 0; tap < taps; tap++)
                for (int tile = 0; tile < 4; tile++, sums += TILE) {
                    const int output = o + tile / 2 * SIDE, channel = c + tile % 2 * SIDE;
                    for (int r = 0; r < std::min(SIDE, O - output); r++)
                        _mm512_mask_i32scatter_ps(w + (size_t(output + r) * s.C + channel) * taps + tap,
                                                  first16(s.C - channel), steps, _mm512_load_ps(sums + r * SIDE), 4);
                }
}

// w [O, C, kh, kw] of x [B, C, H, W] and gradients [B, O, h, w].
void products_over_places(const Geometry& s, int B, int O, const float* x, const Gradients& g, float* w) {
    const int chunk = chunk_of(B, SUMMED_AT_ONCE / s.n());
    const size_t sums_size = size_t(blocks(s.C, 2 * SIDE)) * blocks(O, 2 * SIDE) * s.taps() * 4 * TILE;
    float* sums = reinterpret_cast<float*>(scratch<3>(sums_size));
    std::fill(sums, sums + sums_size, 0.0f);
    for (int first = 0; first < B; first += chunk) {
        const Runs all(s, std::min(chunk, B - first));
        const size_t g_next = size_t(all.blocks_of_places) * TILE, g_part = blocks(O, SIDE) * g_next;
        uint32_t *pairs = scratch<1>(PARTS * all.part(s)), *gradients = scratch<2>(PARTS * g_part);
        for (int sample = first; sample < first + all.number * all.samples; sample += all.samples) {
            pairs_of_places(s, all, x + size_t(sample) * s.C * s.H * s.W, pairs);
            gradient_tiles(s, all, O, g.of(O, s.h(), s.w(), sample, all.samples), gradients, g_part);
            add_run(s, all, O, {gradients, pairs, g_next, g_part, size_t(all.run) * SIDE, all.part(s)}, sums);
        }
    }
    put_sums(s, O, sums, w);
}

constexpr int ASK_FOR_PERMISSION = 0x1023, TILE_DATA = 18;

}  // namespace

extern "C" {

// Whether the system permits this process to use the units.
int tiles_usable() { return syscall(SYS_arch_prctl, ASK_FOR_PERMISSION, TILE_DATA) == 0; }

// With `which`, y is the max pool of the outputs.
void tiles_conv(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* x, const float* w,
                float* y, uint8_t* which) {
    const Geometry s{C, H, W, kh, kw, p, p};
    const int64_t made = int64_t(B) * O * (which ? (s.h() / 2) * (s.w() / 2) : s.n());
    uint32_t* weights = scratch<4>(weight_room(O, C, s.taps()));
    const Tiles tiles;
    for (int k = 0; k < K; k++, y += made, which += which ? made : 0) {
        weight_tiles(O, C, s.taps(), size_t(C) * s.taps(), s.taps(), false, w + size_t(k) * O * C * s.taps(), weights);
        products_at_places(s, B, O, {x + size_t(k) * B * C * H * W, nullptr}, weights, y, which, (K - k) * made);
    }
}

// With `which`, the gradients are those of the outputs' max pool, here and below.
void tiles_conv_input(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* g, const float* w,
                      float* x, const uint8_t* which) {
    // A convolution of the gradients with the rotated kernels.
    const Geometry s{O, H + 2 * p - kh + 1, W + 2 * p - kw + 1, kh, kw, kh - 1 - p, kw - 1 - p};
    uint32_t* weights = scratch<4>(weight_room(C, O, s.taps()));
    const Tiles tiles;
    const Gradients all{g, which};
    for (int k = 0; k < K; k++) {
        weight_tiles(C, O, s.taps(), s.taps(), size_t(C) * s.taps(), true, w + size_t(k) * O * C * s.taps(), weights);
        products_at_places(s, B, C, all.after(k * B, O, s.H, s.W), weights, x + size_t(k) * B * C * H * W);
    }
}

void tiles_conv_weight(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* x, const float* g,
                       float* w, const uint8_t* which) {
    const Geometry s{C, H, W, kh, kw, p, p};
    const Tiles tiles;
    const Gradients all{g, which};
    for (int k = 0; k < K; k++)
        products_over_places(s, B, O, x + size_t(k) * B * C * H * W, all.after(k * B, O, s.h(), s.w()),
                             w + size_t(k) * O * C * s.taps());
}

}  // extern "C"

#else

extern "C" int tiles_usable() { return 0; }

#endif
