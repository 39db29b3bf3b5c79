// Convolutions by Winograd's F(MxM, 3x3), of many clients together: kernels of 3x3, stride 1, padding p <= 2, M of 2 or 4.
//
// With M = 2 the four outputs of a tile take 16 products for each pair of channels in place of 36, and with M = 4 its
// sixteen outputs take 36 in place of 144 (Lavin and Gray, 2016). With N = M + 2,
//
//     V = B^T d B of a tile's NxN inputs d,    U = G w G^T of a kernel w,    y = A^T (sum over channels of U V) A
//
// the sums over channels are N N products of matrices. They are made for a block of tiles at a time, small enough that its
// transforms stay in the second-level cache from one step to the next: written out for all tiles, they are several
// times as large as the images. Tensors are as in kernels.cpp. A max pool of 2x2 takes the largest outputs of each tile.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pools.h"

namespace {

// A tile of a matrix product: sums of ROWS rows and two vectors, the vectors and one factor fit into the registers.
constexpr int ROWS = REGISTERS >= 32 ? 11 : 6;
constexpr int COLUMNS = 2 * LANES;

// Numbers of the transforms of a block.
constexpr int64_t AT_ONCE = 3 << 16;

// Matrices [rows, columns] of the N N products. A cache line is between one and the next: so many numbers at a distance of a
// power of two share one set of the first-level cache. So are rows, for the same reason.
struct Products {
    int number, pitch;
    int64_t apart;
    Room room;
    Products(int number, int rows, int columns)
        : number(number), pitch(up(columns, COLUMNS) + 16), apart(int64_t(rows) * pitch + 16), room(number * apart) {
        // Computed with, though not used, are the columns up to a whole tile.
        for (int64_t row = 0; row < rows; row++)
            for (int t = 0; t < number; t++)
                for (int j = columns / LANES * LANES; j < pitch; j += LANES) store(at(t, row) + j, Vector{});
    }
    float* at(int t, int64_t row) { return room + t * apart + row * pitch; }
};

// The same in panels of COLUMNS columns, each [rows, COLUMNS], which a product reads from start to end.
struct Panels {
    int number;
    int64_t panel, apart;
    Room room;
    Panels(int number, int rows, int columns)
        : number(number),
          panel(int64_t(rows) * COLUMNS),
          apart(up(columns, COLUMNS) / COLUMNS * panel + 16),
          room(number * apart) {
        std::fill_n(static_cast<float*>(room), number * apart, 0.0f);
    }
    // A vector of columns from a multiple of LANES on.
    float* at(int t, int64_t row, int column) {
        return room + t * apart + column / COLUMNS * panel + row * COLUMNS + column % COLUMNS;
    }
};

// The transforms of F(M, 3) of one row or column of a tile.
template <int M>
struct Minimal;

template <>
struct Minimal<2> {
    // B^T d.
    static inline void inputs(const Vector* d, Vector (&t)[4]) {
        t[0] = d[0] - d[2], t[1] = d[1] + d[2], t[2] = d[2] - d[1], t[3] = d[1] - d[3];
    }
    // G w.
    static inline void kernels(const Vector (&w)[3], Vector (&u)[4]) {
        const Vector outer = w[0] + w[2];
        u[0] = w[0], u[1] = 0.5f * (outer + w[1]), u[2] = 0.5f * (outer - w[1]), u[3] = w[2];
    }
    // A^T m.
    static inline void outputs(const Vector (&m)[4], Vector (&y)[2]) {
        y[0] = m[0] + m[1] + m[2], y[1] = m[1] - m[2] - m[3];
    }
    // A g.
    static inline void gradients(const Vector* g, Vector (&t)[4]) {
        t[0] = g[0], t[1] = g[0] + g[1], t[2] = g[0] - g[1], t[3] = -g[1];
    }
    // G^T u.
    static inline void sums(const Vector (&u)[4], Vector (&w)[3]) {
        const Vector middle = 0.5f * (u[1] + u[2]);
        w[0] = u[0] + middle, w[1] = 0.5f * (u[1] - u[2]), w[2] = middle + u[3];
    }
};

// A product of polynomials by its values at 0, a, -a, b and -b, and by its highest coefficient. Outputs round two to
// three times as much as in the direct way with a = 2/3 and b = 3/2, and five times with the usual 1 and 2.
template <>
struct Minimal<4> {
    static constexpr float a = 2.0f / 3, b = 1.5f, aa = a * a, bb = b * b;  // a b = 1
    static constexpr float at_a = 1 / (2 * aa * (aa - bb)), at_b = 1 / (2 * bb * (bb - aa));

    static inline void inputs(const Vector* d, Vector (&t)[6]) {
        const Vector even_a = d[4] - bb * d[2], odd_a = a * d[3] - b * d[1];
        const Vector even_b = d[4] - aa * d[2], odd_b = b * d[3] - a * d[1];
        t[0] = d[0] + d[4] - (aa + bb) * d[2];
        t[1] = even_a + odd_a, t[2] = even_a - odd_a, t[3] = even_b + odd_b, t[4] = even_b - odd_b;
        t[5] = d[1] + d[5] - (aa + bb) * d[3];
    }
    static inline void kernels(const Vector (&w)[3], Vector (&u)[6]) {
        const Vector even_a = at_a * (w[0] + aa * w[2]), odd_a = at_a * a * w[1];
        const Vector even_b = at_b * (w[0] + bb * w[2]), odd_b = at_b * b * w[1];
        u[0] = w[0], u[1] = even_a + odd_a, u[2] = even_a - odd_a, u[3] = even_b + odd_b, u[4] = even_b - odd_b, u[5] = w[2];
    }
    static inline void outputs(const Vector (&m)[6], Vector (&y)[4]) {
        const Vector even_a = m[1] + m[2], odd_a = a * (m[1] - m[2]), even_b = m[3] + m[4], odd_b = b * (m[3] - m[4]);
        y[0] = m[0] + even_a + even_b, y[1] = odd_a + odd_b;
        y[2] = aa * even_a + bb * even_b, y[3] = aa * odd_a + bb * odd_b + m[5];
    }
    static inline void gradients(const Vector* g, Vector (&t)[6]) {
        const Vector even_a = g[0] + aa * g[2], odd_a = a * (g[1] + aa * g[3]);
        const Vector even_b = g[0] + bb * g[2], odd_b = b * (g[1] + bb * g[3]);
        t[0] = g[0], t[1] = even_a + odd_a, t[2] = even_a - odd_a, t[3] = even_b + odd_b, t[4] = even_b - odd_b, t[5] = g[3];
    }
    static inline void sums(const Vector (&u)[6], Vector (&w)[3]) {
        const Vector even_a = at_a * (u[1] + u[2]), odd_a = at_a * a * (u[1] - u[2]);
        const Vector even_b = at_b * (u[3] + u[4]), odd_b = at_b * b * (u[3] - u[4]);
        w[0] = u[0] + even_a + even_b, w[1] = odd_a + odd_b, w[2] = aa * even_a + bb * even_b + u[5];
    }
};

// A transform of each row, which `row(a, numbers)` gives, and then of each column, to `out(a, b, number)`.
template <int FROM, int TO, class Row, class Out>
inline __attribute__((always_inline)) void transform_both(void (*transform)(const Vector (&)[FROM], Vector (&)[TO]), Row row,
                                                          Out out) {
    Vector rows[FROM][TO];
#pragma GCC unroll 6
    for (int a = 0; a < FROM; a++) {
        Vector numbers[FROM];
        row(a, numbers);
        transform(numbers, rows[a]);
    }
#pragma GCC unroll 6
    for (int b = 0; b < TO; b++) {
        Vector column[FROM], made[TO];
#pragma GCC unroll 6
        for (int a = 0; a < FROM; a++) column[a] = rows[a][b];
        transform(column, made);
#pragma GCC unroll 6
        for (int a = 0; a < TO; a++) out(a, b, made[a]);
    }
}

// Shuffles within each four numbers of two vectors, which are one instruction where others are two.
constexpr Mask NEAR_EVEN = places_by([](int i) { return i % 4 / 2 * LANES + i / 4 * 4 + i % 2 * 2; });
constexpr Mask NEAR_ODD = places_by([](int i) { return i % 4 / 2 * LANES + i / 4 * 4 + i % 2 * 2 + 1; });
constexpr Mask NEAR_LOW = places_by([](int i) { return i % 2 * LANES + i / 4 * 4 + i % 4 / 2; });
constexpr Mask NEAR_HIGH = places_by([](int i) { return i % 2 * LANES + i / 4 * 4 + i % 4 / 2 + 2; });

// LANES M numbers of a run as M vectors: number e of each M in vector e. Tiles are in an order of their own.
template <int M>
inline void split(const float* run, Vector* v) {
    static_assert(M == 2 || M == 4);
    const Vector a = load(run), b = load(run + LANES), even = shuffle(a, b, NEAR_EVEN), odd = shuffle(a, b, NEAR_ODD);
    if constexpr (M == 2) {
        v[0] = even, v[1] = odd;
    } else {
        const Vector c = load(run + 2 * LANES), d = load(run + 3 * LANES);
        const Vector further_even = shuffle(c, d, NEAR_EVEN), further_odd = shuffle(c, d, NEAR_ODD);
        v[0] = shuffle(even, further_even, NEAR_EVEN), v[2] = shuffle(even, further_even, NEAR_ODD);
        v[1] = shuffle(odd, further_odd, NEAR_EVEN), v[3] = shuffle(odd, further_odd, NEAR_ODD);
    }
}

// The place of a tile in a vector after `split`.
template <int M>
constexpr int place_of(int tile) {
    constexpr int PART = LANES / M;
    return M == 2 ? tile % PART / 2 * 4 + tile / PART * 2 + tile % 2 : tile % PART * 4 + tile / PART;
}

// The reverse of `split`.
template <int M>
inline void weave(Vector* v) {
    Vector low = shuffle(v[0], v[M / 2], NEAR_LOW), high = shuffle(v[0], v[M / 2], NEAR_HIGH);
    if constexpr (M == 2) {
        v[0] = low, v[1] = high;
    } else {
        const Vector next_low = shuffle(v[1], v[3], NEAR_LOW), next_high = shuffle(v[1], v[3], NEAR_HIGH);
        v[0] = shuffle(low, next_low, NEAR_LOW), v[1] = shuffle(low, next_low, NEAR_HIGH);
        v[2] = shuffle(high, next_high, NEAR_LOW), v[3] = shuffle(high, next_high, NEAR_HIGH);
    }
}

// The same for the M / 2 numbers that a pool leaves of a tile's M.
template <int M>
inline void weave_pooled(Vector* v) {
    if constexpr (M == 2) {
        v[0] = shuffle(v[0], v[0], places_by([](int i) { return place_of<M>(i); }));
    } else {
        const Vector low = shuffle(v[0], v[1], places_by([](int i) { return i % 2 * LANES + place_of<M>(i / 2); }));
        v[1] = shuffle(v[0], v[1], places_by([](int i) { return i % 2 * LANES + place_of<M>(LANES / 2 + i / 2); }));
        v[0] = low;
    }
}

template <int M>
struct Geometry {
    int H, W, p;
    int h() const { return H + 2 * p - 2; }
    int w() const { return W + 2 * p - 2; }
    // Rows and columns of tiles. The last ones may reach beyond the outputs.
    int high() const { return (h() + M - 1) / M; }
    int wide() const { return (w() + M - 1) / M; }
};

// The rows of tiles of a block, for this many samples, channels and outputs: of the numbers that are large enough, the one
// with the fewest columns beyond a block's tiles. A block that is larger than AT_ONCE is better than one whose kernels,
// which each block reads, are larger than its tiles.
template <int M>
int rows_at_once(const Geometry<M>& s, int B, int C, int O) {
    const int64_t tiles = std::max(AT_ONCE / ((M + 2) * (M + 2) * (C + O)), int64_t(C) * O / (C + O));
    const int all = B * s.high(), most = std::min(std::max(int(tiles / s.wide()), 1), all);
    const auto columns = [&](int rows) {
        return all / rows * up(rows * s.wide(), COLUMNS) + up(all % rows * s.wide(), COLUMNS);
    };
    int best = most;
    for (int rows = most; rows > most / 2; rows--)
        if (columns(rows) < columns(best)) best = rows;
    return best;
}

// Call `work(b, i, n, at)` on the parts of some rows of tiles, counted through all samples: n rows from i on of sample b,
// which are the block's rows from `at` on.
template <int M, class Work>
void each_part(const Geometry<M>& s, int first, int rows, Work work) {
    for (int at = 0; at < rows;) {
        const int b = (first + at) / s.high(), i = (first + at) % s.high(), n = std::min(rows - at, s.high() - i);
        work(b, i, n, at);
        at += n;
    }
}

// Planes [channels, H, W] of many samples; with `which`, g has the gradients of their max pools.
struct Images {
    int channels, H, W;
    const float* g;
    const uint8_t* which;

    // Rows [first, first + rows) of plane c of sample b, zeros outside of it. A row more at each end may be written, too. The
    // next plane's rows are read after those of all samples, at distances that no processor foresees.
    void lay(int b, int c, int first, int rows, int pitch, float* to, const float* end) const {
        const int top = std::max(first, 0), bottom = std::min(first + rows, H), below = which ? bottom / 2 * 2 : bottom;
        const auto row = [=](int r) { return to + int64_t(r - first) * pitch; };
        const int64_t plane = int64_t(b) * channels + c;
        for (int r = first; r < top; r++) std::fill_n(row(r), W, 0.0f);
        for (int r = below; r < first + rows; r++) std::fill_n(row(r), W, 0.0f);
        if (!which) {
            const float* from = g + (plane * H + top) * W;
            prefetch(from + int64_t(H) * W, int64_t(bottom - top) * W);
            for (int r = top; r < bottom; r++, from += W) copy_row(row(r), from, W);
            return;
        }
        const int upper = top / 2, lower = std::min((bottom + 1) / 2, H / 2);
        const int64_t from = (plane * (H / 2) + upper) * (W / 2), next = from + (H / 2) * (W / 2);
        prefetch(g + next, (lower - upper) * (W / 2)), prefetch(which + next, (lower - upper) * (W / 2));
        spread_planes({1, 2 * (lower - upper), W, pitch, 0, end - row(2 * upper)}, g + from, which + from, row(2 * upper));
    }
};

// The transforms of a plane's tiles in a block: B^T d B of inputs, with SIDE = N numbers a side of a tile, or A g A^T of
// gradients, with SIDE = M.
template <int M, int SIDE>
class Transforms {
  public:
    Transforms(const Geometry<M>& s, int padding, int rows)
        : s_(s),
          p_(padding),
          pitch_(M * s.wide() + MORE),
          padded_((M * std::min(rows, s.high()) + MORE + 2) * pitch_ + 4 * LANES),
          run_(M * (rows * s.wide() + LANES)),
          runs_((MORE ? 2 : 1) * N * run_) {}

    // Of plane c in some rows of tiles, to `place(q)` for a vector of tiles from q on: their first numbers, and each next one
    // `apart` from the one before.
    template <class Place>
    void make(const Images& images, int c, int first, int rows, int64_t apart, Place place) {
        const int columns = M * s_.wide(), run = run_, tiles = rows * s_.wide();
        each_part(s_, first, rows, [&](int b, int i, int n, int at) {
            float* const padded = &padded_[pitch_];
            images.lay(b, c, M * i - p_, M * n + MORE, pitch_, padded + p_, padded_.data() + padded_.size());
            for (int k = 0; k < n; k++) {
                const float* from = padded + k * M * pitch_;
                float* to = &runs_[(at + k) * columns];
                transform_columns(columns, from, to);
                if (MORE) transform_columns(columns - M + MORE, from + M, to + N * run);
            }
        });
        // A sum over tiles also takes those beyond the last one, up to a whole vector.
        if (tiles % LANES)
            for (size_t n = 0; n < runs_.size(); n += run)
                std::fill_n(&runs_[n + M * tiles], M * (LANES - tiles % LANES), 0.0f);
        for (int q = 0; q < tiles; q += LANES) {
            const float* from = &runs_[M * q];
            float* to = place(q);
#pragma GCC unroll 6
            for (int a = 0; a < N; a++, from += run) {
                Vector numbers[2 * M], made[N];
                split<M>(from, numbers);
                if (MORE) split<M>(from + N * run, numbers + M);
                transform(numbers, made);
#pragma GCC unroll 6
                for (int b = 0; b < N; b++, to += apart) store(to, made[b]);
            }
        }
    }

  private:
    static constexpr int N = M + 2, MORE = SIDE - M;

    static inline void transform(const Vector* from, Vector (&to)[N]) {
        if constexpr (MORE)
            Minimal<M>::inputs(from, to);
        else
            Minimal<M>::gradients(from, to);
    }

    // Of some columns, to N runs of rows of tiles: they have the tiles' numbers from the first on, and N further runs those
    // from number M on.
    void transform_columns(int columns, const float* from, float* to) {
        const int pitch = pitch_, run = run_;
        for (int j = 0; j < columns; j += LANES) {
            Vector numbers[SIDE], made[N];
#pragma GCC unroll 6
            for (int a = 0; a < SIDE; a++) numbers[a] = load(from + j + a * pitch);
            transform(numbers, made);
#pragma GCC unroll 6
            for (int a = 0; a < N; a++) store(to + j + a * run, made[a]);
        }
    }

    const Geometry<M> s_;
    const int p_, pitch_;
    std::vector<float> padded_;
    const int run_;
    std::vector<float> runs_;
};

// y = A^T M A of an output's tiles in a block, or their max pools.
template <int M>
class Outputs {
  public:
    Outputs(const Geometry<M>& s, int rows) : s_(s), run_(M * (rows * s.wide() + LANES)), numbers_(M * run_), places_(M * run_) {}

    // To plane o of each sample; with `which`, to those of the max pools.
    void transform(Products& from, int o, int O, int first, int rows, float* y, uint8_t* which) {
        const int side = which ? M / 2 : M, h = which ? s_.h() / 2 : s_.h(), w = which ? s_.w() / 2 : s_.w();
        const int64_t apart = from.apart, tiles = rows * s_.wide();
        const float* sums = from.at(0, o);
        for (int q = 0; q < tiles; q += LANES) {
            Vector v[M][M];
            transform_both<N, M>(
                Minimal<M>::outputs,
                [&](int a, Vector (&m)[N]) {
#pragma GCC unroll 6
                    for (int b = 0; b < N; b++) m[b] = load(sums + (N * a + b) * apart + q);
                },
                [&](int a, int b, Vector number) { v[a][b] = number; });
            which ? keep_largest(v, q) : keep(v, q);
        }
        each_part(s_, first, rows, [&](int b, int i, int n, int at) {
            int64_t to = (int64_t(b) * O + o) * h * w + int64_t(side * i) * w;
            prefetch(y + to + int64_t(h) * w, int64_t(std::min(side * n, h - side * i)) * w);
            for (int k = 0; k < n; k++)
                for (int a = 0; a < std::min(side, h - side * (i + k)); a++, to += w) {
                    const int from = a * run_ + (at + k) * side * s_.wide();
                    copy_row(y + to, &numbers_[from], w);
                    if (which) copy_row(which + to, &places_[from], w);
                }
        });
    }

  private:
    static constexpr int N = M + 2;

    void keep(Vector (&v)[M][M], int q) {
#pragma GCC unroll 4
        for (int a = 0; a < M; a++) {
            weave<M>(v[a]);
#pragma GCC unroll 4
            for (int b = 0; b < M; b++) store(&numbers_[a * run_ + M * q + b * LANES], v[a][b]);
        }
    }

    void keep_largest(const Vector (&v)[M][M], int q) {
        constexpr int P = M / 2;
#pragma GCC unroll 2
        for (int a = 0; a < M; a += 2) {
            Vector values[P], places[P];
#pragma GCC unroll 2
            for (int b = 0; b < P; b++) {
                const auto [value, place] = largest({v[a][2 * b], v[a][2 * b + 1], v[a + 1][2 * b], v[a + 1][2 * b + 1]});
                values[b] = value, places[b] = Vector(place);
            }
            weave_pooled<M>(values), weave_pooled<M>(places);
#pragma GCC unroll 2
            for (int b = 0; b < P; b++) {
                const int to = a / 2 * run_ + P * q + b * LANES;
                store(&numbers_[to], values[b]);
                const Bytes bytes = bytes_of(Mask(places[b]));
                std::memcpy(&places_[to], &bytes, sizeof bytes);
            }
        }
    }

    const Geometry<M> s_;
    const int run_;
    std::vector<float> numbers_;
    std::vector<uint8_t> places_;
};

// Rows [0, R) of V vectors of one panel of a product: c (+)= sum over k < K of a[r ra + k ka] b[k].
template <int R, int V>
void product_tile(int K, const float* a, int64_t ra, int64_t ka, const float* b, float* c, int64_t pitch, bool add) {
    Vector sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = add ? load(c + r * pitch + v * LANES) : Vector{};
    for (int k = 0; k < K; k++, a += ka, b += COLUMNS) {
        Vector value[V];
        for (int v = 0; v < V; v++) value[v] = load(b + v * LANES);
        for (int r = 0; r < R; r++) {
            const float factor = a[r * ra];
            for (int v = 0; v < V; v++) sum[r][v] += factor * value[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(c + r * pitch + v * LANES, sum[r][v]);
}

// The same with R rows or fewer.
template <int R, int V>
void product_rows(int rows, int K, const float* a, int64_t ra, int64_t ka, const float* b, float* c, int64_t pitch, bool add) {
    if constexpr (R > 1)
        if (rows < R) return product_rows<R - 1, V>(rows, K, a, ra, ka, b, c, pitch, add);
    product_tile<R, V>(K, a, ra, ka, b, c, pitch, add);
}

// Matrix t of c [rows, columns] (+)= a b, for a of any strides and K rows of b.
void product(int t, int rows, int columns, int K, const float* a, int64_t ra, int64_t ka, Panels& b, Products& c, bool add) {
    for (int j = 0; j < columns; j += COLUMNS) {
        const bool half = columns - j <= LANES;
        each_block(rows, half ? 2 * ROWS : ROWS, [&](int first, int some) {
            (half ? product_rows<2 * ROWS, 1> : product_rows<ROWS, 2>)(some, K, a + first * ra, ra, ka, b.at(t, 0, j),
                                                                      c.at(t, first) + j, c.pitch, add);
        });
    }
}

// U = G w G^T of kernels [rows, C], as matrices [rows, pitch of U]; rotated by half a turn for the derivative by the input.
template <int M>
void transform_kernels(int rows, int C, bool rotated, const float* w, Products& U) {
    for (int64_t row = 0; row < rows; row++)
        for (int c = 0; c < C; c += LANES) {
            const float* kernels = w + (row * C + c) * 9;
            const int left = std::min(LANES, C - c);
            float taps[9][LANES] = {};
            for (int i = 0; i < left; i++)
                for (int tap = 0; tap < 9; tap++) taps[rotated ? 8 - tap : tap][i] = kernels[i * 9 + tap];
            transform_both<3, M + 2>(
                Minimal<M>::kernels,
                [&](int a, Vector (&numbers)[3]) {
                    for (int b = 0; b < 3; b++) numbers[b] = load(taps[3 * a + b]);
                },
                [&](int a, int b, Vector v) { store(U.at((M + 2) * a + b, row) + c, v); });
        }
}

// w = G^T U G.
template <int M>
void transform_sums(int rows, int C, Products& U, float* w) {
    for (int64_t row = 0; row < rows; row++)
        for (int c = 0; c < C; c += LANES) {
            float taps[9][LANES];
            transform_both<M + 2, 3>(
                Minimal<M>::sums,
                [&](int a, Vector (&numbers)[M + 2]) {
                    for (int b = 0; b < M + 2; b++) numbers[b] = load(U.at((M + 2) * a + b, row) + c);
                },
                [&](int a, int b, Vector v) { store(taps[3 * a + b], v); });
            float* kernels = w + (row * C + c) * 9;
            for (int i = 0; i < std::min(LANES, C - c); i++)
                for (int tap = 0; tap < 9; tap++) kernels[i * 9 + tap] = taps[tap][i];
        }
}

// Transforms of the tiles of LANES channels, [N N, LANES, tiles], as rows of channels: [N N, tiles, channels] from `c` on.
void transpose(Panels& from, int tiles, Panels& to, int c) {
    for (int t = 0; t < from.number; t++)
        for (int q = 0; q < tiles; q += LANES) {
            Vector v[LANES];
            for (int i = 0; i < LANES; i++) v[i] = load(from.at(t, i, q));
            exchange(v);
            for (int i = 0; i < LANES; i++) store(to.at(t, q + i, c), v[i]);
        }
}

// The convolutions of clients' images [C, H, W] with their kernels' transforms, which `kernels(k, U)` makes: [O, C] of any
// strides.
template <int M, class Kernels>
void convolve(const Geometry<M>& s, int K, int B, int C, int O, const float* x, const uint8_t* from, Products& U, int64_t ra,
              int64_t ka, Kernels kernels, float* y, uint8_t* which) {
    const int rows = rows_at_once(s, B, C, O);
    const int64_t given = from ? int64_t(s.H / 2) * (s.W / 2) : int64_t(s.H) * s.W;
    const int64_t plane = which ? int64_t(s.h() / 2) * (s.w() / 2) : int64_t(s.h()) * s.w();
    Panels V(U.number, C, rows * s.wide());
    Products sums(U.number, O, rows * s.wide());
    Transforms<M, M + 2> inputs(s, s.p, rows);
    Outputs<M> outputs(s, rows);
    for (int64_t k = 0; k < K; k++) {
        const Images images{C, s.H, s.W, x + k * B * C * given, from ? from + k * B * C * given : nullptr};
        const int64_t made = k * B * O * plane;
        kernels(k, U);
        for (int first = 0; first < B * s.high(); first += rows) {
            const int some = std::min(rows, B * s.high() - first);
            for (int c = 0; c < C; c++) inputs.make(images, c, first, some, V.apart, [&](int q) { return V.at(0, c, q); });
            for (int t = 0; t < U.number; t++) product(t, O, some * s.wide(), C, U.at(t, 0), ra, ka, V, sums, false);
            for (int o = 0; o < O; o++) outputs.transform(sums, o, O, first, some, y + made, which ? which + made : nullptr);
        }
    }
}

template <int M>
void conv(int K, int B, int C, int H, int W, int O, int p, const float* x, const float* w, float* y, uint8_t* which) {
    Products U((M + 2) * (M + 2), O, C);
    const auto kernels = [=](int64_t k, Products& U) { transform_kernels<M>(O, C, false, w + k * O * C * 9, U); };
    convolve(Geometry<M>{H, W, p}, K, B, C, O, x, nullptr, U, U.pitch, 1, kernels, y, which);
}

// The convolution of the gradients with the rotated kernels.
template <int M>
void conv_input(int K, int B, int C, int H, int W, int O, int p, const float* g, const float* w, float* x,
                const uint8_t* which) {
    const Geometry<M> forward{H, W, p}, s{forward.h(), forward.w(), 2 - p};
    Products U((M + 2) * (M + 2), O, C);
    const auto kernels = [=](int64_t k, Products& U) { transform_kernels<M>(O, C, true, w + k * O * C * 9, U); };
    convolve(s, K, B, O, C, g, which, U, 1, U.pitch, kernels, x, nullptr);
}

template <int M>
void conv_weight(int K, int B, int C, int H, int W, int O, int p, const float* x, const float* g, float* w) {
    const Geometry<M> s{H, W, p};
    const int rows = rows_at_once(s, B, C, O), most = rows * s.wide(), number = (M + 2) * (M + 2);
    Products U(number, O, C), G(number, O, most);
    Panels V(number, up(most, LANES), C), run(number, LANES, most);
    Transforms<M, M + 2> inputs(s, p, rows);
    Transforms<M, M> gradients(s, 0, rows);
    for (int64_t k = 0; k < K; k++) {
        const Images images{C, H, W, x + k * B * C * H * W, nullptr};
        const Images slopes{O, s.h(), s.w(), g + k * B * O * s.h() * s.w(), nullptr};
        for (int first = 0; first < B * s.high(); first += rows) {
            const int some = std::min(rows, B * s.high() - first), tiles = some * s.wide();
            for (int c = 0; c < C; c += LANES) {
                for (int i = 0; i < std::min(LANES, C - c); i++)
                    inputs.make(images, c + i, first, some, run.apart, [&](int q) { return run.at(0, i, q); });
                transpose(run, tiles, V, c);
            }
            for (int o = 0; o < O; o++)
                gradients.make(slopes, o, first, some, G.apart, [&](int q) { return G.at(0, o) + q; });
            for (int t = 0; t < number; t++) product(t, O, C, up(tiles, LANES), G.at(t, 0), G.pitch, 1, V, U, first > 0);
        }
        transform_sums<M>(O, C, U, w + k * O * C * 9);
    }
}

}  // namespace

// `side` is M.
extern "C" {

void winograd_conv(int side, int K, int B, int C, int H, int W, int O, int, int, int p, const float* x, const float* w, float* y,
                   uint8_t* which) {
    (side == 4 ? conv<4> : conv<2>)(K, B, C, H, W, O, p, x, w, y, which);
}

void winograd_conv_input(int side, int K, int B, int C, int H, int W, int O, int, int, int p, const float* g, const float* w,
                         float* x, const uint8_t* which) {
    (side == 4 ? conv_input<4> : conv_input<2>)(K, B, C, H, W, O, p, g, w, x, which);
}

void winograd_conv_weight(int side, int K, int B, int C, int H, int W, int O, int, int, int p, const float* x, const float* g,
                          float* w) {
    (side == 4 ? conv_weight<4> : conv_weight<2>)(K, B, C, H, W, O, p, x, g, w);
}

}  // extern "C"
