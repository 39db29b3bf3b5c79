// Convolutions on the matrix units of x86 processors (AMX), in float32.
//
// The units multiply bfloat16 numbers, of 8 bits, exactly, and add up in float32. A float32 number, of 24 bits, is the
// sum of three of them: a = a1 + a2 + a3. Of the nine products in (a1 + a2 + a3)(b1 + b2 + b3) three are below
// float32's last bit; the other six make a product as exact as float32's own, in less than half of its time.
//
// All tensors are float32 and contiguous; a stack of K clients with B samples each comes as x [K, B, C, H, W],
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

namespace {

constexpr int SIDE = 16;          // rows of a tile, and float32 columns
constexpr int DEPTH = 32;         // terms of a product of tiles
constexpr int TILE = SIDE * SIDE; // dwords of a tile: float32 numbers or pairs of bfloat16
constexpr int PARTS = 3;

// What is worked on at once, so that caches hold it: bytes of what is read, and places of a sum.
constexpr size_t READ_AT_ONCE = 1 << 20;
constexpr int SUMMED_AT_ONCE = 512;

inline int up(int n, int to) { return (n + to - 1) / to * to; }
inline int blocks(int n, int of) { return (n + of - 1) / of; }

// Samples in each of as few groups of at most `most` as there must be, all about as large.
inline int chunk_of(int samples, int most) { return blocks(samples, blocks(samples, std::max(most, 1))); }

// Memory that a thread keeps from call to call, since fresh pages cost as much as the work.
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

// The instructions, with the number of the tile; compilers' own names for them do not take it from a template.
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

// All tiles at full size while it lives; the settings of whoever calls come back after it.
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

// Two times 16 numbers as three parts each, every dword a pair of them: low half first, or low[i] with high[i].
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

// What a convolution reads, with ph rows and pw columns of zeros around it, once for each column of the kernel: copy j
// begins j columns later, and the rows of all copies are as wide as the outputs'. So the outputs of a sample are one run
// of n places, kernel row i reads the run that is i * w later, and most loads of tiles begin at a cache line (those that
// do not take twice as long, and are what bounds the products).
struct Geometry {
    int C, H, W, kh, kw, ph, pw;
    int h() const { return H + 2 * ph - kh + 1; }
    int w() const { return W + 2 * pw - kw + 1; }
    int n() const { return h() * w(); }
    int taps() const { return kh * kw; }
    int rows() const { return H + 2 * ph; }
    // A plane that is read in blocks of places, of `per_line` numbers a cache line: an odd number of lines, since planes
    // that are a power of two apart would share one place in the cache.
    int plane(int block, int per_line) const {
        return (blocks(up(n(), block) + (kh - 1) * w(), per_line) | 1) * per_line;
    }
    int pair_plane() const { return plane(SIDE, 16); }
    int pairs() const { return up(C, DEPTH) / 2; }
    size_t pair_part() const { return size_t(kw) * pairs() * pair_plane(); }
    int single_plane() const { return plane(DEPTH, 32); }
    int singles() const { return up(C, SIDE); }
    size_t single_part() const { return size_t(kw) * singles() * single_plane(); }
    // A channel with its zeros, where those to the right of a row are those to the left of the next; in whole lines.
    int pitch() const { return W + pw; }
    int padded() const { return up(rows() * pitch() + pw, 32); }
};

// Copy n numbers of a row.
inline void copy_row(uint32_t* to, const uint32_t* from, int n) {
    for (int t = 0; t < n; t += 16) {
        const __mmask16 some = first16(n - t);
        _mm512_mask_storeu_epi32(to + t, some, _mm512_maskz_loadu_epi32(some, from + t));
    }
}
inline void copy_row(uint16_t* to, const uint16_t* from, int n) {
    for (int t = 0; t < n; t += 32) {
        const __mmask32 some = n - t >= 32 ? ~0u : (1u << (n - t)) - 1;
        _mm512_mask_storeu_epi16(to + t, some, _mm512_maskz_loadu_epi16(some, from + t));
    }
}

// A channel's rows at their places among zeros.
inline void lay(const Geometry& s, const float* x, uint32_t* padded) {
    padded += s.ph * s.pitch() + s.pw;
    for (int y = 0; y < s.H; y++)
        copy_row(padded + y * s.pitch(), reinterpret_cast<const uint32_t*>(x) + y * s.W, s.W);
}

// The copies of a padded channel, or pair of channels, for each column of the kernel, `next` apart.
template <class T>
inline void spread(const Geometry& s, const T* padded, T* out, size_t next) {
    for (int j = 0; j < s.kw; j++, out += next)
        for (int y = 0; y < s.rows(); y++) copy_row(out + y * s.w(), padded + y * s.pitch() + j, s.w());
}

inline __m512 number_at(const uint32_t* from) { return _mm512_castsi512_ps(_mm512_load_si512(from)); }

// One sample as dwords of two channels: [part][j][pair][plane].
void pair_channels(const Geometry& s, const float* x, uint32_t* out) {
    const int size = s.padded(), plane = s.pair_plane();
    uint32_t *low = scratch<0>((2 + PARTS) * size), *high = low + size, *split_up = high + size;
    std::fill(low, split_up, 0);
    for (int pair = 0; pair < s.pairs(); pair++, x += 2 * s.H * s.W, out += plane) {
        const int some = s.C - 2 * pair;
        if (some >= 1) lay(s, x, low);
        if (some >= 2) lay(s, x + s.H * s.W, high);
        if (some <= 0) std::fill(low, low + size, 0);
        if (some <= 1) std::fill(high, high + size, 0);
        for (int t = 0; t < size; t += 16) {
            __m512i parts[PARTS];
            split<true>(number_at(low + t), number_at(high + t), parts);
            for (int part = 0; part < PARTS; part++) _mm512_store_si512(split_up + part * size + t, parts[part]);
        }
        for (int part = 0; part < PARTS; part++)
            spread(s, split_up + part * size, out + part * s.pair_part(), size_t(s.pairs()) * plane);
    }
}

// One sample channel by channel: bfloat16 [part][j][channel][plane], with zeros behind the last row.
void single_channels(const Geometry& s, const float* x, uint16_t* out) {
    const int size = s.padded(), plane = s.single_plane();
    uint32_t* padded = scratch<0>(size + PARTS * size / 2);
    uint16_t* split_up = reinterpret_cast<uint16_t*>(padded + size);
    std::fill(padded, padded + size, 0);
    for (int c = 0; c < s.C; c++, x += s.H * s.W, out += plane) {
        lay(s, x, padded);
        for (int t = 0; t < size; t += 32) {
            __m512i parts[PARTS];
            split<false>(number_at(padded + t), number_at(padded + t + 16), parts);
            for (int part = 0; part < PARTS; part++) _mm512_store_si512(split_up + part * size + t, parts[part]);
        }
        for (int part = 0; part < PARTS; part++) {
            uint16_t* to = out + part * s.single_part();
            const size_t next = size_t(s.singles()) * plane;
            spread(s, split_up + part * size, to, next);
            for (int j = 0; j < s.kw; j++) std::fill(to + j * next + s.rows() * s.w(), to + j * next + plane, 0);
        }
    }
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

// One sample's gradients [O, n] as tiles of 32 places by 16 outputs: [part][outputs / 16][places / 32][tile].
void gradient_tiles(int O, int n, const float* g, uint32_t* out, size_t part_size) {
    for (int o = 0; o < O; o += SIDE)
        for (int q = 0; q < n; q += DEPTH, out += TILE) {
            __m512i rows[PARTS][SIDE];
            for (int r = 0; r < SIDE; r++) {
                const float* from = g + size_t(o + r) * n + q;
                const int left = o + r < O ? n - q : 0;
                __m512i parts[PARTS];
                split<false>(_mm512_maskz_loadu_ps(first16(left), from),
                             _mm512_maskz_loadu_ps(first16(left - 16), from + 16), parts);
                for (int part = 0; part < PARTS; part++) rows[part][r] = parts[part];
            }
            for (int part = 0; part < PARTS; part++) {
                transpose(rows[part]);
                for (int r = 0; r < SIDE; r++) _mm512_store_si512(out + part * part_size + r * SIDE, rows[part][r]);
            }
        }
}

// A client's weights, M outputs of a product over `depth` inputs, as tiles of 16 outputs by 32 inputs:
// [M / 32][inputs / 32][tap][part][up to 2][tile]. `along` and `down` are the steps from an input and an output to
// the next.
void weight_tiles(int M, int depth, int taps, size_t down, size_t along, bool flipped, const float* w, uint32_t* out) {
    const __m512i steps = _mm512_mullo_epi32(_mm512_set1_epi32(int(along)),
                                             _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    for (int m = 0; m < M; m += 2 * SIDE) {
        const int tall = M - m > SIDE ? 2 : 1;
        for (int k = 0; k < depth; k += DEPTH, out += size_t(taps) * PARTS * tall * TILE)
            for (int r = 0; r < tall * SIDE; r++) {
                const int left = m + r < M ? depth - k : 0;
                const float* from = w + (m + r) * down + k * along;
                uint32_t* to = out + (r / SIDE) * TILE + (r % SIDE) * SIDE;
                for (int tap = 0; tap < taps; tap++, to += PARTS * tall * TILE) {
                    const float* one = from + (flipped ? taps - 1 - tap : tap);
                    __m512i parts[PARTS];
                    const __m512 none = _mm512_setzero_ps();
                    split<false>(_mm512_mask_i32gather_ps(none, first16(left), steps, one, 4),
                                 _mm512_mask_i32gather_ps(none, first16(left - 16), steps, one + 16 * along, 4), parts);
                    for (int part = 0; part < PARTS; part++) _mm512_store_si512(to + part * tall * TILE, parts[part]);
                }
            }
    }
}

size_t weight_room(int M, int depth, int taps) {
    return size_t(up(M, SIDE)) / SIDE * blocks(depth, DEPTH) * taps * PARTS * TILE;
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

// Up to sixteen places of a sample: what is read there, and where in y they go.
struct Place {
    const uint32_t* from;
    float* to;
    int some;
};

template <int NUMBER>
inline void put(const Place& place, int n, int first, int rows) {
    float* y = place.to + size_t(first) * n;
    if (rows - first >= SIDE && place.some >= SIDE) {
        store_tile<NUMBER>(y, 4 * size_t(n));
        return;
    }
    alignas(64) float tile[TILE];
    store_tile<NUMBER>(tile, 64);
    for (int r = 0; r < std::min(rows - first, SIDE); r++, y += n)
        _mm512_mask_storeu_ps(y, first16(place.some), _mm512_load_ps(tile + r * SIDE));
}

// 16 TALL outputs, or the `rows` there are, at WIDE times 16 places.
template <int TALL, int WIDE>
void output_block(const Geometry& s, const uint32_t* a, const Place* places, int rows) {
    const int plane = s.pair_plane();
    const size_t part_size = s.pair_part();
    clear_sums();
    for (int k = 0; k < s.pairs(); k += SIDE)
        for (int i = 0; i < s.kh; i++)
            for (int j = 0; j < s.kw; j++, a += PARTS * TALL * TILE) {
                const size_t at = (size_t(j) * s.pairs() + k) * plane + i * s.w();
                const uint32_t *left = places[0].from + at, *right = places[WIDE - 1].from + at;
                six_products<TALL, WIDE>(
                    [&](int part) __attribute__((always_inline)) {
                        load_tile<4>(a + part * TALL * TILE, 64);
                        if (TALL == 2) load_tile<5>(a + part * TALL * TILE + TILE, 64);
                    },
                    [&](int part) __attribute__((always_inline)) {
                        load_tile<6>(left + part * part_size, 4 * plane);
                        if (WIDE == 2) load_tile<7>(right + part * part_size, 4 * plane);
                    });
            }
    put<0>(places[0], s.n(), 0, rows);
    if (WIDE == 2) put<1>(places[1], s.n(), 0, rows);
    if (TALL == 2) put<2>(places[0], s.n(), SIDE, rows);
    if (TALL == 2 && WIDE == 2) put<3>(places[1], s.n(), SIDE, rows);
}

// y [B, M, h, w] of x [B, C, H, W] and weights as tiles.
void products_at_places(const Geometry& s, int B, int M, const float* x, const uint32_t* weights, float* y) {
    const size_t image_size = PARTS * s.pair_part();
    const int chunk = chunk_of(B, int(READ_AT_ONCE / (4 * image_size)));
    uint32_t* images = scratch<1>(chunk * image_size);
    const size_t a_size = size_t(s.pairs() / SIDE) * s.taps() * PARTS * TILE;
    std::vector<Place> places;
    for (int first = 0; first < B; first += chunk) {
        places.clear();
        for (int b = first; b < std::min(B, first + chunk); b++) {
            uint32_t* image = images + (b - first) * image_size;
            pair_channels(s, x + size_t(b) * s.C * s.H * s.W, image);
            for (int q = 0; q < s.n(); q += SIDE)
                places.push_back({image + q, y + size_t(b) * M * s.n() + q, s.n() - q});
        }
        for (int m = 0; m < M; m += 2 * SIDE) {
            const uint32_t* a = weights + m / SIDE * a_size;
            for (size_t i = 0; i < places.size(); i += 2) {
                const bool tall = M - m > SIDE, wide = places.size() - i > 1;
                const auto work = tall ? wide ? output_block<2, 2> : output_block<2, 1>
                                       : wide ? output_block<1, 2> : output_block<1, 1>;
                work(s, a, &places[i], M - m);
            }
            for (Place& place : places) place.to += size_t(2 * SIDE) * s.n();
        }
    }
}

// Where the two sides of products over places lie: bfloat16 channels, and tiles of gradients.
struct Sides {
    const uint16_t* x;
    const uint32_t* g;
    int plane, blocks;
    size_t x_part, x_size, g_next, g_part, g_size;
};

// Sums over the places of `some` samples, 16 TALL channels and 16 WIDE outputs, added to `sums`.
template <int TALL, int WIDE>
void sum_block(const Sides& at, int some, float* sums) {
    load_tile<0>(sums, 64);
    if (WIDE == 2) load_tile<1>(sums + TILE, 64);
    if (TALL == 2) load_tile<2>(sums + 2 * TILE, 64);
    if (TALL == 2 && WIDE == 2) load_tile<3>(sums + 3 * TILE, 64);
    for (int b = 0; b < some; b++)
        for (int block = 0; block < at.blocks; block++) {
            const uint16_t* x = at.x + b * at.x_size + block * DEPTH;
            const uint32_t* g = at.g + b * at.g_size + block * TILE;
            six_products<TALL, WIDE>(
                [&](int part) __attribute__((always_inline)) {
                    load_tile<4>(x + part * at.x_part, 2 * at.plane);
                    if (TALL == 2) load_tile<5>(x + part * at.x_part + size_t(SIDE) * at.plane, 2 * at.plane);
                },
                [&](int part) __attribute__((always_inline)) {
                    load_tile<6>(g + part * at.g_part, 64);
                    if (WIDE == 2) load_tile<7>(g + part * at.g_part + at.g_next, 64);
                });
        }
    store_tile<0>(sums, 64);
    if (WIDE == 2) store_tile<1>(sums + TILE, 64);
    if (TALL == 2) store_tile<2>(sums + 2 * TILE, 64);
    if (TALL == 2 && WIDE == 2) store_tile<3>(sums + 3 * TILE, 64);
}

// A tile of sums [channel][output] to w [output][channel][tap].
void put_weights(const float* sums, int channels, int outputs, size_t row, int taps, float* w) {
    __m512i rows[SIDE];
    for (int r = 0; r < SIDE; r++) rows[r] = _mm512_load_si512(sums + r * SIDE);
    transpose(rows);
    const __m512i steps = _mm512_mullo_epi32(_mm512_set1_epi32(taps),
                                             _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    for (int o = 0; o < std::min(outputs, SIDE); o++)
        _mm512_mask_i32scatter_epi32(w + o * row, first16(channels), steps, rows[o], 4);
}

// Some samples' products, added to sums [channels / 32][outputs / 32][tap][4 tiles].
void add_products(const Geometry& s, int some, int O, const Sides& all, float* sums) {
    for (int c = 0; c < s.C; c += 2 * SIDE)
        for (int o = 0; o < O; o += 2 * SIDE)
            for (int tap = 0; tap < s.taps(); tap++, sums += 4 * TILE) {
                const bool tall = s.C - c > SIDE, wide = O - o > SIDE;
                const auto work = tall ? wide ? sum_block<2, 2> : sum_block<2, 1> : wide ? sum_block<1, 2> : sum_block<1, 1>;
                Sides at = all;
                at.x += (size_t(tap % s.kw) * s.singles() + c) * all.plane + tap / s.kw * s.w();
                at.g += o / SIDE * all.g_next;
                work(at, some, sums);
            }
}

void put_sums(const Geometry& s, int O, const float* sums, float* w) {
    for (int c = 0; c < s.C; c += 2 * SIDE)
        for (int o = 0; o < O; o += 2 * SIDE)
            for (int tap = 0; tap < s.taps(); tap++)
                for (int tile = 0; tile < 4; tile++, sums += TILE) {
                    const int channel = c + tile / 2 * SIDE, output = o + tile % 2 * SIDE;
                    if (channel < s.C && output < O)
                        put_weights(sums, s.C - channel, O - output, size_t(s.C) * s.taps(), s.taps(),
                                    w + (size_t(output) * s.C + channel) * s.taps() + tap);
                }
}

// w [O, C, kh, kw] of x [B, C, H, W] and gradients [B, O, h, w].
void products_over_places(const Geometry& s, int B, int O, const float* x, const float* g, float* w) {
    const int chunk = chunk_of(B, SUMMED_AT_ONCE / s.n());
    const size_t sums_size = size_t(blocks(s.C, 2 * SIDE)) * blocks(O, 2 * SIDE) * s.taps() * 4 * TILE;
    float* sums = reinterpret_cast<float*>(scratch<3>(sums_size));
    std::fill(sums, sums + sums_size, 0.0f);
    Sides sides = {nullptr, nullptr, s.single_plane(), blocks(s.n(), DEPTH), s.single_part(), 0, 0, 0, 0};
    sides.g_next = size_t(sides.blocks) * TILE;
    sides.g_part = blocks(O, SIDE) * sides.g_next;
    sides.x_size = PARTS * sides.x_part, sides.g_size = PARTS * sides.g_part;
    uint16_t* channels = reinterpret_cast<uint16_t*>(scratch<1>(chunk * sides.x_size / 2));
    uint32_t* gradients = scratch<2>(chunk * sides.g_size);
    sides.x = channels, sides.g = gradients;
    for (int first = 0; first < B; first += chunk) {
        const int some = std::min(chunk, B - first);
        for (int b = 0; b < some; b++) {
            single_channels(s, x + size_t(first + b) * s.C * s.H * s.W, channels + b * sides.x_size);
            gradient_tiles(O, s.n(), g + size_t(first + b) * O * s.n(), gradients + b * sides.g_size, sides.g_part);
        }
        add_products(s, some, O, sides, sums);
    }
    put_sums(s, O, sums, w);
}

constexpr int ASK_FOR_PERMISSION = 0x1023, TILE_DATA = 18;

}  // namespace

extern "C" {

// Whether the system lets this process use the units.
int tiles_usable() { return syscall(SYS_arch_prctl, ASK_FOR_PERMISSION, TILE_DATA) == 0; }

void tiles_conv(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* x, const float* w,
                float* y) {
    const Geometry s{C, H, W, kh, kw, p, p};
    uint32_t* weights = scratch<4>(weight_room(O, C, s.taps()));
    const Tiles tiles;
    for (int k = 0; k < K; k++) {
        weight_tiles(O, C, s.taps(), size_t(C) * s.taps(), s.taps(), false, w + size_t(k) * O * C * s.taps(), weights);
        products_at_places(s, B, O, x + size_t(k) * B * C * H * W, weights, y + size_t(k) * B * O * s.n());
    }
}

void tiles_conv_input(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* g, const float* w,
                      float* x) {
    // A convolution of the gradients with the kernels turned around.
    const Geometry s{O, H + 2 * p - kh + 1, W + 2 * p - kw + 1, kh, kw, kh - 1 - p, kw - 1 - p};
    uint32_t* weights = scratch<4>(weight_room(C, O, s.taps()));
    const Tiles tiles;
    for (int k = 0; k < K; k++) {
        weight_tiles(C, O, s.taps(), s.taps(), size_t(C) * s.taps(), true, w + size_t(k) * O * C * s.taps(), weights);
        products_at_places(s, B, C, g + size_t(k) * B * O * s.H * s.W, weights, x + size_t(k) * B * C * H * W);
    }
}

void tiles_conv_weight(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* x, const float* g,
                       float* w) {
    const Geometry s{C, H, W, kh, kw, p, p};
    const Tiles tiles;
    for (int k = 0; k < K; k++)
        products_over_places(s, B, O, x + size_t(k) * B * C * H * W, g + size_t(k) * B * O * s.n(),
                             w + size_t(k) * O * C * s.taps());
}

}  // extern "C"

#else

extern "C" int tiles_usable() { return 0; }

#endif
