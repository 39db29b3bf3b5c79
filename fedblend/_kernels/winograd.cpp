// Convolutions by Winograd's F(2x2, 3x3), of many clients together: kernels of 3x3, stride 1, padding p <= 2.
//
// Four outputs of a tile take 16 products for each pair of channels in place of 36 (Lavin and Gray, 2016). With
//
//     V = B^T d B of a tile's 4x4 inputs d,    U = G w G^T of a kernel w,    y = A^T (sum over channels of U V) A
//
// the sums over channels are 16 products of matrices. They are made for a block of tiles at a time, small enough that its
// transforms stay in the second-level cache from one step to the next: written out for all tiles, they are several
// times as large as the images. Tensors are as in kernels.cpp. A max pool of 2x2 takes the largest output of each tile.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "pools.h"

namespace {

// A tile of a matrix product: sums of ROWS rows and two vectors, the vectors and one factor fit into the registers.
constexpr int ROWS = REGISTERS >= 32 ? 11 : 6;
constexpr int COLUMNS = 2 * LANES;

// Numbers of the transforms of a block.
constexpr int64_t AT_ONCE = 1 << 18;

// The largest of as few parts of n as possible that are of about one size, at most `most`.
inline int in_parts(int n, int most) {
    const int parts = (n + most - 1) / most;
    return (n + parts - 1) / parts;
}

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

// Matrices [rows, columns] of the 16 products. A cache line is between one and the next: sixteen numbers at a distance of
// a power of two share one set of the first-level cache. So are rows, for the same reason.
struct Products {
    int pitch;
    int64_t apart;
    Room room;
    Products(int rows, int columns) : pitch(up(columns, COLUMNS) + 16), apart(int64_t(rows) * pitch + 16), room(16 * apart) {
        // Computed with, though not used, are the columns up to a whole tile.
        for (int64_t row = 0; row < rows; row++)
            for (int t = 0; t < 16; t++)
                for (int j = columns / LANES * LANES; j < pitch; j += LANES) store(at(t, row) + j, Vector{});
    }
    float* at(int t, int64_t row) { return room + t * apart + row * pitch; }
};

// The same in panels of COLUMNS columns, each [rows, COLUMNS], which a product reads from start to end.
struct Panels {
    int64_t panel, apart;
    Room room;
    Panels(int rows, int columns)
        : panel(int64_t(rows) * COLUMNS), apart(up(columns, COLUMNS) / COLUMNS * panel + 16), room(16 * apart) {
        std::fill_n(static_cast<float*>(room), 16 * apart, 0.0f);
    }
    // A vector of columns from a multiple of LANES on.
    float* at(int t, int64_t row, int column) {
        return room + t * apart + column / COLUMNS * panel + row * COLUMNS + column % COLUMNS;
    }
};

struct Geometry {
    int H, W, p;
    int h() const { return H + 2 * p - 2; }
    int w() const { return W + 2 * p - 2; }
    // Rows and columns of tiles. The last ones reach beyond the outputs where these are odd.
    int high() const { return (h() + 1) / 2; }
    int wide() const { return (w() + 1) / 2; }
};

// The rows of tiles of a block, for this many samples, channels and outputs: those of whole samples, or of a part of one. A
// block that is larger than AT_ONCE is better than one whose kernels, which each block reads, are larger than its tiles.
int rows_at_once(const Geometry& s, int B, int C, int O) {
    const int64_t tiles = std::max(AT_ONCE / (16 * (C + O)), int64_t(C) * O / (C + O));
    const int rows = std::max(int(tiles / s.wide()), 1), samples = std::min(rows / s.high(), B);
    return samples ? in_parts(B, samples) * s.high() : in_parts(s.high(), rows);
}

// Call `work(b, first, rows, at)` on the parts of some rows of tiles, counted through all samples: `rows` from `first` on of
// sample b, whose tiles begin at column `at` of the block's matrices. Returns the columns, whole vectors for each part.
template <class Work>
int each_part(const Geometry& s, int first, int rows, Work work) {
    int at = 0;
    while (rows > 0) {
        const int b = first / s.high(), i = first % s.high(), some = std::min(rows, s.high() - i);
        work(b, i, some, at);
        first += some, rows -= some, at += up(some * s.wide(), LANES);
    }
    return at;
}

// The most columns of a block.
int columns_at_once(const Geometry& s, int B, int rows) {
    int most = 0;
    for (int first = 0; first < B * s.high(); first += rows)
        most = std::max(most, each_part(s, first, std::min(rows, B * s.high() - first), [](int, int, int, int) {}));
    return most;
}

// Planes [channels, H, W] of many samples; with `which`, the planes of which g has the gradients of a max pool.
class Images {
  public:
    Images(int channels, int H, int W, const float* g, const uint8_t* which)
        : channels_(channels), H_(H), W_(W), g_(g), which_(which), plane_(which ? H * W + 2 * W + 4 * LANES : 0) {}

    // Plane c of sample b, in which at least the rows from `first` up to `last` are right.
    const float* plane(int b, int c, int first, int last) {
        const int64_t place = int64_t(b) * channels_ + c;
        if (!which_) return g_ + place * H_ * W_;
        const int top = std::max(first, 0) / 2, bottom = std::min((last + 1) / 2, H_ / 2);
        const int64_t from = (place * (H_ / 2) + top) * (W_ / 2);
        spread_planes({1, 2 * (bottom - top), W_, W_, 0, int64_t(plane_.size()) - 2 * top * W_}, g_ + from, which_ + from,
                      &plane_[2 * top * W_]);
        return plane_.data();
    }

  private:
    int channels_, H_, W_;
    const float* g_;
    const uint8_t* which_;
    std::vector<float> plane_;
};

// V = B^T d B of tiles.
class Inputs {
  public:
    Inputs(const Geometry& s, int rows)
        : s_(s), plane_((rows + 2) * s.wide() + 2 * LANES), planes_(8 * plane_), row_(s.W + 2 * s.p + 4 * LANES + 4) {}

    // Of `rows` rows of tiles of an image, to columns of a row from `at` on.
    void transform(const float* image, int first, int rows, Panels& to, int row, int at) {
        // Number (a, e) of tile (i, j) is in the plane of rows a % 2, a % 2 + 2, ... and columns e, e + 2, ..., at (i + a / 2, j).
        for (int r = 0; r < 2 * rows + 2; r++) split_row(image, 2 * first + r - s_.p, &planes_[r % 2 * 4 * plane_ + r / 2 * s_.wide()]);
        // Beyond the last tile, no numbers of an earlier image, which may be infinite: a sum takes them times zero.
        for (int n = 0; n < 8; n++) store(&planes_[n * plane_ + (rows + 1) * s_.wide()], Vector{});
        for (int q = 0; q < rows * s_.wide(); q += LANES) {
            Vector t[4][4];
#pragma GCC unroll 4
            for (int e = 0; e < 4; e++) {
                const float* even = &planes_[e * plane_ + q];
                const float* odd = even + 4 * plane_;
                const Vector d[4] = {load(even), load(odd), load(even + s_.wide()), load(odd + s_.wide())};
                t[0][e] = d[0] - d[2], t[1][e] = d[1] + d[2], t[2][e] = d[2] - d[1], t[3][e] = d[1] - d[3];
            }
#pragma GCC unroll 4
            for (int a = 0; a < 4; a++) {
                float* v = to.at(4 * a, row, at + q);
                store(v, t[a][0] - t[a][2]), store(v + to.apart, t[a][1] + t[a][2]);
                store(v + 2 * to.apart, t[a][2] - t[a][1]), store(v + 3 * to.apart, t[a][1] - t[a][3]);
            }
        }
    }

  private:
    // Write row `from` of a padded image to the four planes of its columns; whole vectors, so also to the next row.
    void split_row(const float* image, int from, float* to) {
        if (from < 0 || from >= s_.H) {
            for (int e = 0; e < 4; e++) std::fill(to + e * plane_, to + e * plane_ + s_.wide(), 0.0f);
            return;
        }
        copy_row(&row_[s_.p], image + int64_t(from) * s_.W, s_.W);
        for (int j = 0; j < s_.wide(); j += LANES) {
            const float* row = &row_[2 * j];
            const Vector a = load(row), b = load(row + LANES), c = load(row + 2), d = load(row + LANES + 2);
            store(to + j, shuffle(a, b, EVEN)), store(to + plane_ + j, shuffle(a, b, ODD));
            store(to + 2 * plane_ + j, shuffle(c, d, EVEN)), store(to + 3 * plane_ + j, shuffle(c, d, ODD));
        }
    }

    const Geometry s_;
    const int plane_;
    std::vector<float> planes_, row_;
};

// A g A^T of tiles of gradients.
class Gradients {
  public:
    Gradients(const Geometry& s, int rows)
        : s_(s), plane_(rows * s.wide() + 2 * LANES), planes_(4 * plane_), row_(s.w() + 3 * LANES) {}

    void transform(const float* image, int first, int rows, float* to, int64_t apart) {
        for (int r = 0; r < 2 * rows; r++) split_row(image, 2 * first + r, &planes_[r % 2 * 2 * plane_ + r / 2 * s_.wide()]);
        for (int n = 0; n < 4; n++) store(&planes_[n * plane_ + rows * s_.wide()], Vector{});
        for (int q = 0; q < rows * s_.wide(); q += LANES) {
            Vector t[4][2];
#pragma GCC unroll 2
            for (int e = 0; e < 2; e++) {
                const Vector top = load(&planes_[e * plane_ + q]), bottom = load(&planes_[(2 + e) * plane_ + q]);
                t[0][e] = top, t[1][e] = top + bottom, t[2][e] = top - bottom, t[3][e] = -bottom;
            }
#pragma GCC unroll 4
            for (int a = 0; a < 4; a++) {
                float* v = to + 4 * a * apart + q;
                store(v, t[a][0]), store(v + apart, t[a][0] + t[a][1]);
                store(v + 2 * apart, t[a][0] - t[a][1]), store(v + 3 * apart, -t[a][1]);
            }
        }
    }

  private:
    void split_row(const float* image, int from, float* to) {
        if (from >= s_.h()) {
            for (int e = 0; e < 2; e++) std::fill(to + e * plane_, to + e * plane_ + s_.wide(), 0.0f);
            return;
        }
        copy_row(row_.data(), image + int64_t(from) * s_.w(), s_.w());
        for (int j = 0; j < s_.wide(); j += LANES) {
            const Vector a = load(&row_[2 * j]), b = load(&row_[2 * j + LANES]);
            store(to + j, shuffle(a, b, EVEN)), store(to + plane_ + j, shuffle(a, b, ODD));
        }
    }

    const Geometry s_;
    const int plane_;
    std::vector<float> planes_, row_;
};

// y = A^T M A of tiles, and their max pool.
class Outputs {
  public:
    Outputs(const Geometry& s, int rows)
        : s_(s), size_(2 * up(rows * s.wide(), LANES)), numbers_(2 * size_), places_(size_) {}

    // Of `rows` rows of tiles, to the plane y; with `which`, to that of the max pool.
    void transform(const float* M, int64_t apart, int first, int rows, float* y, uint8_t* which) {
        for (int q = 0; q < rows * s_.wide(); q += LANES) {
            Vector t[2][4];
#pragma GCC unroll 4
            for (int e = 0; e < 4; e++) {
                const float* m = M + e * apart + q;
                const Vector second = load(m + 4 * apart), third = load(m + 8 * apart);
                t[0][e] = load(m) + second + third, t[1][e] = second - third - load(m + 12 * apart);
            }
            Vector v[4];
#pragma GCC unroll 2
            for (int a = 0; a < 2; a++) v[2 * a] = t[a][0] + t[a][1] + t[a][2], v[2 * a + 1] = t[a][1] - t[a][2] - t[a][3];
            if (which) {
                store_largest(v, &numbers_[q], &places_[q], LANES, LANES);
                continue;
            }
#pragma GCC unroll 2
            for (int a = 0; a < 2; a++) {
                float* to = &numbers_[a * size_ + 2 * q];
                store(to, shuffle(v[2 * a], v[2 * a + 1], LOW)), store(to + LANES, shuffle(v[2 * a], v[2 * a + 1], HIGH));
            }
        }
        if (which) {
            const int w = s_.w() / 2;
            for (int i = 0; i < std::min(rows, s_.h() / 2 - first); i++) {
                copy_row(y + (first + i) * w, &numbers_[i * s_.wide()], w);
                std::copy_n(&places_[i * s_.wide()], w, which + (first + i) * w);
            }
            return;
        }
        for (int i = 0; i < std::min(2 * rows, s_.h() - 2 * first); i++)
            copy_row(y + int64_t(2 * first + i) * s_.w(), &numbers_[i % 2 * size_ + i / 2 * 2 * s_.wide()], s_.w());
    }

  private:
    const Geometry s_;
    const int size_;
    std::vector<float> numbers_;
    std::vector<uint8_t> places_;
};

// Rows [0, R) of one panel of a product: c (+)= sum over k < K of a[r ra + k ka] b[k].
template <int R>
void product_tile(int K, const float* a, int64_t ra, int64_t ka, const float* b, float* c, int64_t pitch, bool add) {
    Vector sum[R][2];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2; v++) sum[r][v] = add ? load(c + r * pitch + v * LANES) : Vector{};
    for (int k = 0; k < K; k++, a += ka, b += COLUMNS) {
        const Vector first = load(b), second = load(b + LANES);
        for (int r = 0; r < R; r++) {
            const float factor = a[r * ra];
            sum[r][0] += factor * first, sum[r][1] += factor * second;
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2; v++) store(c + r * pitch + v * LANES, sum[r][v]);
}

// The same with R rows or fewer.
template <int R>
void product_rows(int rows, int K, const float* a, int64_t ra, int64_t ka, const float* b, float* c, int64_t pitch, bool add) {
    if constexpr (R > 1)
        if (rows < R) return product_rows<R - 1>(rows, K, a, ra, ka, b, c, pitch, add);
    product_tile<R>(K, a, ra, ka, b, c, pitch, add);
}

// Matrix t of c [rows, columns] (+)= a b, for a of any strides and K rows of b.
void product(int t, int rows, int columns, int K, const float* a, int64_t ra, int64_t ka, Panels& b, Products& c, bool add) {
    for (int j = 0; j < columns; j += COLUMNS)
        each_block(rows, ROWS, [&](int first, int some) {
            product_rows<ROWS>(some, K, a + first * ra, ra, ka, b.at(t, 0, j), c.at(t, first) + j, c.pitch, add);
        });
}

// U = G w G^T of kernels [rows, C], as matrices [rows, pitch of U]; rotated by half a turn for the derivative by the input.
void transform_kernels(int rows, int C, bool rotated, const float* w, Products& U) {
    for (int64_t row = 0; row < rows; row++)
        for (int c = 0; c < C; c += LANES) {
            const float* kernels = w + (row * C + c) * 9;
            const int left = std::min(LANES, C - c);
            float taps[9][LANES] = {};
            for (int i = 0; i < left; i++)
                for (int tap = 0; tap < 9; tap++) taps[rotated ? 8 - tap : tap][i] = kernels[i * 9 + tap];
            Vector t[4][3];
            for (int b = 0; b < 3; b++) {
                const Vector first = load(taps[b]), second = load(taps[3 + b]), third = load(taps[6 + b]);
                const Vector outer = first + third;
                t[0][b] = first, t[1][b] = 0.5f * (outer + second), t[2][b] = 0.5f * (outer - second), t[3][b] = third;
            }
            for (int a = 0; a < 4; a++) {
                const Vector outer = t[a][0] + t[a][2];
                store(U.at(4 * a, row) + c, t[a][0]), store(U.at(4 * a + 1, row) + c, 0.5f * (outer + t[a][1]));
                store(U.at(4 * a + 2, row) + c, 0.5f * (outer - t[a][1])), store(U.at(4 * a + 3, row) + c, t[a][2]);
            }
        }
}

// w = G^T U G.
void transform_sums(int rows, int C, Products& U, float* w) {
    for (int64_t row = 0; row < rows; row++)
        for (int c = 0; c < C; c += LANES) {
            Vector t[3][4];
            for (int b = 0; b < 4; b++) {
                Vector u[4];
                for (int a = 0; a < 4; a++) u[a] = load(U.at(4 * a + b, row) + c);
                const Vector middle = 0.5f * (u[1] + u[2]);
                t[0][b] = u[0] + middle, t[1][b] = 0.5f * (u[1] - u[2]), t[2][b] = middle + u[3];
            }
            float taps[9][LANES];
            for (int a = 0; a < 3; a++) {
                const Vector middle = 0.5f * (t[a][1] + t[a][2]);
                store(taps[3 * a], t[a][0] + middle), store(taps[3 * a + 1], 0.5f * (t[a][1] - t[a][2]));
                store(taps[3 * a + 2], middle + t[a][3]);
            }
            float* kernels = w + (row * C + c) * 9;
            for (int i = 0; i < std::min(LANES, C - c); i++)
                for (int tap = 0; tap < 9; tap++) kernels[i * 9 + tap] = taps[tap][i];
        }
}

// Exchange the blocks beside the diagonal, of S numbers in S vectors, in blocks of twice the size.
template <int S>
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

// Transforms of the tiles of LANES channels, [16, LANES, tiles], as rows of channels: [16, tiles, channels] from `c` on.
void transpose(Panels& from, int tiles, Panels& to, int c) {
    for (int t = 0; t < 16; t++)
        for (int q = 0; q < tiles; q += LANES) {
            Vector v[LANES];
            for (int i = 0; i < LANES; i++) v[i] = load(from.at(t, i, q));
            exchange<1>(v);
            for (int i = 0; i < LANES; i++) store(to.at(t, q + i, c), v[i]);
        }
}

// The convolution of one client's images with the kernels' transforms: a [O, C] of any strides.
void convolve(const Geometry& s, int B, int C, int O, Images& images, Products& U, int64_t ra, int64_t ka, float* y,
              uint8_t* which) {
    const int rows = rows_at_once(s, B, C, O), most = columns_at_once(s, B, rows);
    const int64_t plane = which ? int64_t(s.h() / 2) * (s.w() / 2) : int64_t(s.h()) * s.w();
    Panels V(C, most);
    Products M(O, most);
    Inputs inputs(s, rows);
    Outputs outputs(s, rows);
    for (int first = 0; first < B * s.high(); first += rows) {
        const int some = std::min(rows, B * s.high() - first);
        int columns = 0;
        for (int c = 0; c < C; c++)
            columns = each_part(s, first, some, [&](int b, int i, int n, int at) {
                inputs.transform(images.plane(b, c, 2 * i - s.p, 2 * (i + n) + 2 - s.p), i, n, V, c, at);
            });
        for (int t = 0; t < 16; t++) product(t, O, columns, C, U.at(t, 0), ra, ka, V, M, false);
        for (int o = 0; o < O; o++)
            each_part(s, first, some, [&](int b, int i, int n, int at) {
                const int64_t place = (int64_t(b) * O + o) * plane;
                outputs.transform(M.at(0, o) + at, M.apart, i, n, y + place, which ? which + place : nullptr);
            });
    }
}

}  // namespace

extern "C" {

void winograd_conv(int K, int B, int C, int H, int W, int O, int, int, int p, const float* x, const float* w, float* y,
                   uint8_t* which) {
    const Geometry s{H, W, p};
    const int64_t outputs = which ? int64_t(s.h() / 2) * (s.w() / 2) : int64_t(s.h()) * s.w();
    Products U(O, C);
    for (int64_t k = 0; k < K; k++) {
        Images images(C, H, W, x + k * B * C * H * W, nullptr);
        transform_kernels(O, C, false, w + k * O * C * 9, U);
        convolve(s, B, C, O, images, U, U.pitch, 1, y + k * B * O * outputs, which ? which + k * B * O * outputs : nullptr);
    }
}

// The convolution of the gradients with the rotated kernels.
void winograd_conv_input(int K, int B, int C, int H, int W, int O, int, int, int p, const float* g, const float* w, float* x,
                         const uint8_t* which) {
    const Geometry forward{H, W, p}, s{forward.h(), forward.w(), 2 - p};
    const int64_t given = which ? int64_t(s.H / 2) * (s.W / 2) : int64_t(s.H) * s.W;
    Products U(O, C);
    for (int64_t k = 0; k < K; k++) {
        Images images(O, s.H, s.W, g + k * B * O * given, which ? which + k * B * O * given : nullptr);
        transform_kernels(O, C, true, w + k * O * C * 9, U);
        convolve(s, B, O, C, images, U, 1, U.pitch, x + k * B * C * H * W, nullptr);
    }
}

void winograd_conv_weight(int K, int B, int C, int H, int W, int O, int, int, int p, const float* x, const float* g, float* w,
                          const uint8_t* which) {
    const Geometry s{H, W, p};
    const int64_t given = which ? int64_t(s.h() / 2) * (s.w() / 2) : int64_t(s.h()) * s.w();
    const int rows = rows_at_once(s, B, C, O), most = columns_at_once(s, B, rows);
    Products U(O, C), G(O, most);
    Panels V(up(most, LANES), C), run(LANES, most);
    Inputs inputs(s, rows);
    Gradients gradients(s, rows);
    for (int64_t k = 0; k < K; k++) {
        Images images(O, s.h(), s.w(), g + k * B * O * given, which ? which + k * B * O * given : nullptr);
        for (int first = 0; first < B * s.high(); first += rows) {
            const int some = std::min(rows, B * s.high() - first);
            int columns = 0;
            for (int c = 0; c < C; c += LANES) {
                for (int i = 0; i < std::min(LANES, C - c); i++)
                    columns = each_part(s, first, some, [&](int b, int i0, int n, int at) {
                        inputs.transform(x + ((k * B + b) * C + c + i) * H * W, i0, n, run, i, at);
                    });
                transpose(run, columns, V, c);
            }
            for (int o = 0; o < O; o++)
                each_part(s, first, some, [&](int b, int i, int n, int at) {
                    gradients.transform(images.plane(b, o, 2 * i, 2 * (i + n)), i, n, G.at(0, o) + at, G.apart);
                });
            for (int t = 0; t < 16; t++) product(t, O, C, columns, G.at(t, 0), G.pitch, 1, V, U, first > 0);
        }
        transform_sums(O, C, U, w + k * O * C * 9);
    }
}

}  // extern "C"
